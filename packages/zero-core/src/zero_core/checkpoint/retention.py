"""Retention of checkpoints in a folder: under way, left over by a killed save, or kept.

Hidden names in a folder of checkpoints: ``.TAG.saving`` is one under way, ``.TAG.old`` one that is
being replaced, ``.latest.*.saving`` the file ``latest`` under way.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from zero_core.checkpoint.files import LATEST, read_latest
from zero_core.checkpoint.manifest import MANIFEST, is_plain, read_manifest
from zero_core.errors import CheckpointError

_log = logging.getLogger(__name__)

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)")


class Aside:
    """Folder of a checkpoint under way, locked until it is renamed or removed.

    Attributes:
        folder: its path.
    """

    def __init__(self, directory: Path, tag: str) -> None:
        self.folder = directory / f".{tag}.saving"
        self._descriptor: int | None = None

    def make(self) -> None:
        """Make and lock the folder.

        Raises:
            CheckpointError: another program saves the same tag there.
        """
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{self.folder} is there: another program saves this checkpoint. Wait for it, or "
                "save to another folder"
            ) from None
        self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        _lock(self._descriptor)

    def rename_to(self, place: Path) -> None:
        """Rename the complete folder to ``place``."""
        self.folder.rename(place)
        self._close()

    def remove(self) -> None:
        """Remove the folder if this object made it and it was not renamed."""
        if self._descriptor is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int) -> bool:
    """Lock a folder until its descriptor is closed. Returns whether another one has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    return False


def remove_stale(directory: Path) -> None:
    """Remove what killed saves left in ``directory``, and undo a replacement that was cut short.

    A save under way of a live program on this machine is left alone.
    """
    for path in sorted(directory.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        if path.is_symlink() or not path.is_dir():
            if match["tag"].startswith(LATEST) and match["kind"] == "saving":
                path.unlink(missing_ok=True)
        elif match["kind"] == "saving":
            _remove_unlocked(path)
        elif (path / MANIFEST).is_file():
            if directory.joinpath(match["tag"], MANIFEST).is_file():
                shutil.rmtree(path, ignore_errors=True)
            elif not directory.joinpath(match["tag"]).exists():
                path.rename(directory / match["tag"])


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Kept:
    """A checkpoint in a folder.

    Attributes:
        tag: its name.
        step: optimizer steps at which it was saved.
        saved_at: when, in nanoseconds since the epoch.
    """

    tag: str
    step: int
    saved_at: int

    @property
    def is_numbered(self) -> bool:
        """Whether the tag ends with the step, as the names that `save_checkpoint` gives do."""
        digits = re.search(r"[0-9]+\Z", self.tag)
        return digits is not None and int(digits[0]) == self.step


def list_checkpoints(directory: Path) -> list[Kept]:
    """Return the complete checkpoints in ``directory`` whose manifests can be read, oldest first.

    Raises:
        CheckpointError: there is no such folder.
    """
    found = []
    try:
        places = sorted(p for p in directory.iterdir() if is_plain(p.name) and p.is_dir())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for place in places:
        try:
            step = read_manifest(place).progress_step()
            saved_at = (place / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):
            continue
        found.append(Kept(place.name, step, saved_at))
    return sorted(found, key=lambda one: (one.saved_at, one.step))


def prune(
    directory: Path,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    newest: str | None = None,
    is_trial: bool = False,
) -> list[str]:
    """Remove checkpoints that are not to be kept, and return their tags.

    Only those whose tag ends with their step (``step-300``, ``global_step300``) are removed. What
    has a name of its own ("best"), what cannot be read, the newest one and the one that ``latest``
    names always stay.

    Args:
        directory: the folder of all checkpoints.
        keep_last: how many of those that were saved last stay. None: all.
        keep_every: those of steps that are multiples of it stay too.
        newest: the tag that was just saved, if one was.
        is_trial: return the tags only.
    """
    if keep_last is None:
        return []
    saved = [one for one in list_checkpoints(directory) if one.is_numbered]
    always = {newest, read_latest(directory)}
    removed = [
        one.tag
        for one in saved[: max(len(saved) - keep_last, 0)]
        if one.tag not in always and not (keep_every and one.step % keep_every == 0)
    ]
    for tag in () if is_trial else removed:
        # Under a hidden name first: a removal that is cut short leaves no half a checkpoint.
        hidden = directory / f".{tag}.saving"
        try:
            directory.joinpath(tag).rename(hidden)
        except OSError as error:
            _log.warning("%s stays, though it is not to be kept: %s", directory / tag, error)
            continue
        shutil.rmtree(hidden, ignore_errors=True)
    return removed
