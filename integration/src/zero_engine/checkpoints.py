"""``zero-engine verify | inspect | export | prune | import``: checkpoints on the command line.

Each command returns its exit code: 0, 1 for a damaged checkpoint, 2 for another mistake.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_engine.deepspeed_import.importing import import_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def verify(directory: str, tag: str | None, *, as_json: bool) -> int:
    """Check every byte of a checkpoint, with progress on stderr."""
    done = 0
    try:
        found = zero_core.inspect_checkpoint(directory, tag)  # a live run may save a newer one
        with _progress("verifying") as (bar, task):
            for done, total in zero_core.verify_checkpoint(directory, found["tag"]):
                bar.update(task, completed=done, total=total)
    except CheckpointError as error:
        return _refuse(error, as_json=as_json)
    text = f"{found['folder']}: {found['files']} files of {done} bytes are what was written"
    _say({"is_whole": True, "folder": found["folder"], "bytes": done}, text, as_json=as_json)
    return 0


def inspect(directory: str, tag: str | None, *, as_json: bool) -> int:
    """Describe a checkpoint."""
    try:
        found = zero_core.inspect_checkpoint(directory, tag)
    except CheckpointError as error:
        return _refuse(error, as_json=as_json)
    lines = []
    for key, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(f"{key.replace('_', ' '):17} {shown}")
    _say(found, "\n".join(lines), as_json=as_json)
    return 0


def export(
    directory: str, output: str, tag: str | None, dtype: str | None, *, as_json: bool
) -> int:
    """Write a checkpoint's model, with progress on stderr."""
    if dtype is not None and dtype not in _DTYPES:
        error = CheckpointError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
        return _refuse(error, as_json=as_json)
    count = 0
    try:
        chosen = None if dtype is None else _DTYPES[dtype]
        found = zero_core.inspect_checkpoint(directory, tag)
        with _progress("exporting") as (bar, task):
            for _ in zero_core.export_checkpoint(directory, output, found["tag"], dtype=chosen):
                count += 1
                bar.update(task, completed=count, total=found["parameters"])
    except CheckpointError as error:
        return _refuse(error, as_json=as_json)
    text = f"{output}: {count} parameters"
    _say({"output": output, "parameters": count}, text, as_json=as_json)
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
        removed = zero_core.prune_checkpoints(
            directory,
            keep_last=keep_last,
            keep_every=keep_every,
            prefixes=prefixes,
            is_trial=is_trial,
        )
    except CheckpointError as error:
        return _refuse(error, as_json=as_json)
    verb = "would be removed" if is_trial else "removed"
    text = "\n".join(f"{tag} {verb}" for tag in removed) or "nothing to remove"
    _say({"removed": removed, "is_trial": is_trial}, text, as_json=as_json)
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
        place = import_checkpoint(directory, output, tag, optimizer=optimizer, frozen=frozen)
    except CheckpointError as error:
        return _refuse(error, as_json=as_json)
    _say({"folder": str(place)}, f"wrote {place}", as_json=as_json)
    return 0


@contextmanager
def _progress(what: str) -> Iterator[tuple[Progress, TaskID]]:
    """Draw a bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task(what, total=None)


def _say(content: Mapping[str, object], text: str, *, as_json: bool) -> None:
    print(json.dumps(content, indent=2) if as_json else text)


def _refuse(error: CheckpointError, *, as_json: bool) -> int:
    is_corrupt = isinstance(error, CheckpointCorruptError)
    if as_json:
        print(json.dumps({"error": str(error), "is_corrupt": is_corrupt}, indent=2))
    else:
        print(f"error: {error}", file=sys.stderr)
    return 1 if is_corrupt else 2
