"""Retention of checkpoints in a folder: which there are, and which are kept."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from zero_core.checkpoint.files import read_latest
from zero_core.checkpoint.manifest import MANIFEST, is_plain, read_manifest
from zero_core.checkpoint.storage.location import Location, entry
from zero_core.errors import CheckpointError

_log = logging.getLogger(__name__)

_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<step>[0-9]+)", re.DOTALL)
GIVEN_PREFIXES = ("step-", "global_step")
"""What the step follows in tags that this project gives."""


class Kept(NamedTuple):
    """A checkpoint in a folder. Its tag ends with the digits of ``step``, if these are digits."""

    tag: str
    saved_at: int  # in nanoseconds since the epoch
    prefix: str
    step: int | None


def check_kept(keep_last: int | None, keep_every: int | None) -> None:
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} = {value}: expected 1 or more, or None")


def list_checkpoints(directory: Location) -> list[Kept]:
    """Return the complete checkpoints in ``directory``, oldest first. No manifest is read."""
    found = []
    try:
        places = [p for p in directory.iterdir() if is_plain(p.name) and p.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    for place in places:
        with suppress(OSError):
            saved_at = entry(place / MANIFEST).modified_ns()
            found.append(Kept(place.name, saved_at, *split_tag(place.name)))
    return sorted(found, key=lambda one: (one.saved_at, one.step or 0))


def split_tag(tag: str) -> tuple[str, int | None]:
    """Return ``tag`` without the digits at its end, and these digits, None if there are none."""
    match = _NUMBERED.fullmatch(tag)
    return (tag, None) if match is None else (match["prefix"], int(match["step"]))


def prune(
    directory: Location,
    *,
    keep_last: int,
    keep_every: int | None,
    prefixes: Collection[str],
    newest: str | None = None,
    is_trial: bool = False,
) -> list[str]:
    """Remove checkpoints that are not to be kept, and return their tags.

    Only those whose tag is one of ``prefixes`` and their step (``step-300``) are removed. What has
    a name of its own ("best", "best-300"), what cannot be read, the newest one and the one that
    ``latest`` names always stay.

    Args:
        directory: the folder of all checkpoints.
        keep_last: how many of those of the highest steps stay, up to the newest one's: what is
            beyond it was saved before the training went back.
        keep_every: those of steps that are multiples of it stay too.
        prefixes: what the step follows in their tags.
        newest: the tag that was just saved, if one was.
        is_trial: return the tags only.
    """
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
    removed = []
    for tag, step in saved[: max(len(saved) - keep_last, 0)]:
        if tag in always or (keep_every and step % keep_every == 0):
            continue
        with suppress(CheckpointError):  # what cannot be read stays
            if read_manifest(directory / tag).progress_step() == step:
                removed.append(tag)
    for tag in () if is_trial else removed:
        try:
            entry(directory / tag).discard()
        except OSError as error:
            _log.warning("%s stays, though it is not to be kept: %s", directory / tag, error)
    return removed
