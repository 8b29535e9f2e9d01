"""Retention of checkpoints in a folder: under way, left over by a killed save, or kept.

Hidden names in a folder of checkpoints: ``.TAG.saving`` is one under way, ``.TAG.old`` one that is
being replaced, ``.latest.*.saving`` the file ``latest`` under way. By marks, ``.TOKEN-RANK``, ranks
find out which of them share a folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero_core.checkpoint.files import LATEST, read_latest
from zero_core.checkpoint.manifest import MANIFEST, is_plain, read_manifest
from zero_core.errors import CheckpointError

_log = logging.getLogger(__name__)

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)")
_MARK = re.compile(r"\.[0-9a-f]{32}-[0-9]+")
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<step>[0-9]+)", re.DOTALL)
GIVEN_PREFIXES = ("step-", "global_step")
"""What the step follows in tags that this project gives."""
_NO_SAVE_S = 24 * 3600
"""Seconds after which nothing that is hidden belongs to a save under way, where no lock says so."""
_TRIES = 200
_PAUSE_S = 0.01


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
        is_lost = False
        for _ in range(_TRIES):
            try:
                self.folder.mkdir()
                self._descriptor = _open_locked(self.folder)
            except FileExistsError:
                if not is_lost:
                    break
            if self._descriptor is not None:
                return
            # Another program took it for one that a killed save left, and is removing it.
            is_lost = True
            time.sleep(_PAUSE_S)
        raise CheckpointError(
            f"{self.folder} is there: another program saves this checkpoint. Wait for it, or "
            "save to another folder"
        )

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


def _open_locked(folder: Path) -> int | None:
    """Open and lock a folder that was just made. None: another program is removing it."""
    try:
        descriptor = _open(folder)
    except FileNotFoundError:
        return None
    try:
        is_own = _lock(descriptor) is not False
        if is_own and os.path.samestat(folder.stat(), os.fstat(descriptor)):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(descriptor: int) -> bool | None:
    """Lock a folder until its descriptor is closed.

    Returns:
        Whether it is locked now. False: another program has the lock. None: the file system has no
        locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_stale(directory: Path) -> None:
    """Remove what killed saves left in ``directory``, and undo a replacement that was cut short.

    A save under way of a live program is left alone. Where the file system has no locks, so is all
    that is younger than a day, and so are marks in any case.
    """
    for path in sorted(directory.iterdir(), key=_saving_first):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            if _MARK.fullmatch(path.name) and _is_past(path):
                path.unlink(missing_ok=True)
        elif path.is_symlink() or not path.is_dir():
            if match["tag"].startswith(LATEST) and match["kind"] == "saving":
                path.unlink(missing_ok=True)
        elif match["kind"] == "saving":
            _remove_unlocked(path)
        elif not (directory / f".{match['tag']}.saving").exists():  # else it is being replaced
            with suppress(OSError):  # another program was first
                _settle(path, directory / match["tag"])


def _settle(old: Path, place: Path) -> None:
    """Remove what ``place`` has replaced, or put it back if that was never done."""
    if place.joinpath(MANIFEST).is_file():
        discard(old)
    elif old.joinpath(MANIFEST).is_file() and not place.exists():
        old.rename(place)


def _saving_first(path: Path) -> tuple[bool, str]:
    return path.suffix != ".saving", path.name


def _is_past(path: Path) -> bool:
    """Whether ``path`` is too old to belong to a save under way."""
    try:
        return time.time() - path.lstat().st_mtime > _NO_SAVE_S
    except FileNotFoundError:
        return False


def _remove_unlocked(path: Path) -> None:
    try:
        descriptor = _open(path)
    except FileNotFoundError:  # another program was first
        return
    try:
        is_dead = _lock(descriptor)
        if is_dead or (is_dead is None and _is_past(path)):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a folder, under a hidden name: the next save removes what is left if it is cut short.

    Raises:
        OSError: it cannot be renamed.
    """
    hidden = path.with_name(f".{path.name.lstrip('.')}.{uuid.uuid4().hex}.saving")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@dataclass(frozen=True)
class Kept:
    """A checkpoint in a folder.

    Attributes:
        tag: its name.
        saved_at: when, in nanoseconds since the epoch.
        prefix: the tag without the digits at its end.
        step: these digits, or None.
    """

    tag: str
    saved_at: int
    prefix: str
    step: int | None


def list_checkpoints(directory: Path) -> list[Kept]:
    """Return the complete checkpoints in ``directory``, oldest first. No manifest is read.

    Raises:
        CheckpointError: there is no such folder.
    """
    found = []
    try:
        places = sorted(p for p in directory.iterdir() if is_plain(p.name) and p.is_dir())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for place in places:
        with suppress(OSError):
            saved_at = (place / MANIFEST).stat().st_mtime_ns
            found.append(Kept(place.name, saved_at, *split_tag(place.name)))
    return sorted(found, key=lambda one: (one.saved_at, one.step or 0))


def split_tag(tag: str) -> tuple[str, int | None]:
    """Return ``tag`` without the digits at its end, and these digits, None if there are none."""
    match = _NUMBERED.fullmatch(tag)
    return (tag, None) if match is None else (match["prefix"], int(match["step"]))


def prune(
    directory: Path,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    newest: str | None = None,
    prefixes: Collection[str] = GIVEN_PREFIXES,
    is_trial: bool = False,
) -> list[str]:
    """Remove checkpoints that are not to be kept, and return their tags.

    Only those whose tag is one of ``prefixes`` and their step (``step-300``) are removed. What has
    a name of its own ("best", "best-300"), what cannot be read, the newest one and the one that
    ``latest`` names always stay.

    Args:
        directory: the folder of all checkpoints.
        keep_last: how many of those of the highest steps stay, up to the newest one's: what is
            beyond it was saved before the training went back. None: all.
        keep_every: those of steps that are multiples of it stay too.
        newest: the tag that was just saved, if one was.
        prefixes: what the step follows in their tags.
        is_trial: return the tags only.
    """
    if keep_last is None:
        return []
    saved = [
        (one.tag, one.step)
        for one in list_checkpoints(directory)
        if one.step is not None and one.prefix in prefixes
    ]
    latest = read_latest(directory)
    always = {newest, latest}
    prefix, reached = split_tag(newest or latest or "")
    if reached is None or prefix not in prefixes:
        reached = max((step for _, step in saved), default=0)
    # By step: a folder that was copied has new times. What is beyond the newest was given up.
    saved.sort(key=lambda one: (one[1] <= reached, one[1]))
    removed = [
        tag
        for tag, step in saved[: max(len(saved) - keep_last, 0)]
        if tag not in always
        and not (keep_every and step % keep_every == 0)
        and _is_of(directory / tag, step)
    ]
    for tag in () if is_trial else removed:
        try:
            discard(directory / tag)
        except OSError as error:
            _log.warning("%s stays, though it is not to be kept: %s", directory / tag, error)
    return removed


def _is_of(place: Path, step: int) -> bool:
    """Whether ``place`` can be read and was saved at ``step``."""
    try:
        return read_manifest(place).progress_step() == step
    except CheckpointError:
        return False
