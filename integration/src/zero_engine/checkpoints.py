"""``zero-engine verify | inspect | export | prune | import``: checkpoints on the command line.

Each command returns its exit code: see `zero_engine.terminal`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import zero_core
from zero_core import CheckpointError
from zero_engine.deepspeed_import.importing import import_checkpoint
from zero_engine.progress import working
from zero_engine.terminal import DONE, refuse, say

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_Answer = tuple[Mapping[str, object], str]
"""A report as JSON and as text."""


def _command(answer: Callable[..., _Answer]) -> Callable[..., int]:
    """Return a command that prints what ``answer`` returns, and returns its exit code."""

    @functools.wraps(answer)
    def run(*arguments: Any, as_json: bool, **options: Any) -> int:
        try:
            content, text = answer(*arguments, **options)
        except CheckpointError as error:
            return refuse(error, as_json=as_json)
        say(content, text, as_json=as_json)
        return DONE

    return run


@_command
def verify(directory: str, tag: str | None) -> _Answer:
    """Check every byte of a checkpoint, with progress on stderr."""
    found = zero_core.inspect_checkpoint(directory, tag)  # a live run may save a newer one
    with working("verifying") as show:
        checked = zero_core.verify_checkpoint(directory, found["tag"], progress=show)
    text = f"{found['folder']}: all {found['files']} files are intact ({checked} bytes)"
    return {"is_whole": True, "folder": found["folder"], "bytes": checked}, text


@_command
def inspect(directory: str, tag: str | None) -> _Answer:
    """Describe a checkpoint."""
    found = zero_core.inspect_checkpoint(directory, tag)
    lines = []
    for key, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        title = "frozen are saved" if key == "has_frozen" else key.replace("_", " ")
        lines.append(f"{title:17} {shown}")
    return found, "\n".join(lines)


@_command
def export(directory: str, output: str, tag: str | None, dtype: str | None) -> _Answer:
    """Write a checkpoint's model, with progress on stderr."""
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    chosen = None if dtype is None else _DTYPES[dtype]
    found = zero_core.inspect_checkpoint(directory, tag)
    with working("exporting") as show:
        written = zero_core.export_checkpoint(
            directory, output, found["tag"], dtype=chosen, progress=show
        )
    text = f"{output}: {len(written)} parameters"
    return {"output": output, "parameters": len(written)}, text


@_command
def prune(
    directory: str,
    keep_last: int,
    keep_every: int | None,
    prefixes: Sequence[str],
    *,
    is_trial: bool,
) -> _Answer:
    """Remove checkpoints that are not to be kept."""
    with working("looking for checkpoints" if is_trial else "removing checkpoints"):
        removed = zero_core.prune_checkpoints(
            directory,
            keep_last=keep_last,
            keep_every=keep_every,
            prefixes=prefixes,
            is_trial=is_trial,
        )
    verb = "would be removed" if is_trial else "removed"
    text = "\n".join(f"{tag} {verb}" for tag in removed) or "nothing to remove"
    return {"removed": removed, "is_trial": is_trial}, text


@_command
def convert(
    directory: str, output: str, tag: str | None, optimizer: str | None, frozen: Sequence[str]
) -> _Answer:
    """Import a checkpoint of DeepSpeed's."""
    with working("importing"):
        place = import_checkpoint(directory, output, tag, optimizer=optimizer, frozen=frozen)
    return {"folder": str(place)}, f"wrote {place}"
