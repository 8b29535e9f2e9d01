"""``zero-engine verify | inspect | export | prune | import``: checkpoints on the command line.

Each command returns its exit code: see `zero_engine.terminal`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import zero_core
from zero_core import CheckpointError
from zero_engine.deepspeed_import.importing import import_checkpoint
from zero_engine.progress import working
from zero_engine.terminal import refuse, say

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def verify(directory: str, tag: str | None, *, as_json: bool) -> int:
    """Check every byte of a checkpoint, with progress on stderr."""
    try:
        found = zero_core.inspect_checkpoint(directory, tag)  # a live run may save a newer one
        with working("verifying") as show:
            checked = zero_core.verify_checkpoint(directory, found["tag"], progress=show)
    except CheckpointError as error:
        return refuse(error, as_json=as_json)
    text = f"{found['folder']}: all {found['files']} files are intact ({checked} bytes)"
    say({"is_whole": True, "folder": found["folder"], "bytes": checked}, text, as_json=as_json)
    return 0


def inspect(directory: str, tag: str | None, *, as_json: bool) -> int:
    """Describe a checkpoint."""
    try:
        found = zero_core.inspect_checkpoint(directory, tag)
    except CheckpointError as error:
        return refuse(error, as_json=as_json)
    lines = []
    for key, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        title = "frozen are saved" if key == "has_frozen" else key.replace("_", " ")
        lines.append(f"{title:17} {shown}")
    say(found, "\n".join(lines), as_json=as_json)
    return 0


def export(
    directory: str, output: str, tag: str | None, dtype: str | None, *, as_json: bool
) -> int:
    """Write a checkpoint's model, with progress on stderr."""
    if dtype is not None and dtype not in _DTYPES:
        error = CheckpointError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
        return refuse(error, as_json=as_json)
    try:
        chosen = None if dtype is None else _DTYPES[dtype]
        found = zero_core.inspect_checkpoint(directory, tag)
        with working("exporting") as show:
            written = zero_core.export_checkpoint(
                directory, output, found["tag"], dtype=chosen, progress=show
            )
    except CheckpointError as error:
        return refuse(error, as_json=as_json)
    text = f"{output}: {len(written)} parameters"
    say({"output": output, "parameters": len(written)}, text, as_json=as_json)
    return 0


def prune(
    directory: str,
    keep_last: int,
    keep_every: int | None,
    prefixes: Sequence[str],
    *,
    is_trial: bool,
    as_json: bool,
) -> int:
    """Remove checkpoints that are not to be kept."""
    try:
        with working("looking for checkpoints" if is_trial else "removing checkpoints"):
            removed = zero_core.prune_checkpoints(
                directory,
                keep_last=keep_last,
                keep_every=keep_every,
                prefixes=prefixes,
                is_trial=is_trial,
            )
    except CheckpointError as error:
        return refuse(error, as_json=as_json)
    verb = "would be removed" if is_trial else "removed"
    text = "\n".join(f"{tag} {verb}" for tag in removed) or "nothing to remove"
    say({"removed": removed, "is_trial": is_trial}, text, as_json=as_json)
    return 0


def convert(
    directory: str,
    output: str,
    tag: str | None,
    optimizer: str | None,
    frozen: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Import a checkpoint of DeepSpeed's."""
    try:
        with working("importing"):
            place = import_checkpoint(directory, output, tag, optimizer=optimizer, frozen=frozen)
    except CheckpointError as error:
        return refuse(error, as_json=as_json)
    say({"folder": str(place)}, f"wrote {place}", as_json=as_json)
    return 0
