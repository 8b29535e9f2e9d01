"""Writes a `Source` as zero-core's checkpoint, which any stage and world size loads."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError
from zero_core.checkpoint import (
    BUFFERS,
    CHUNK_BYTES,
    FORMAT,
    RNG,
    VALUE,
    VERSION,
    Aside,
    check_tag,
    encode,
    file_name,
    read_latest,
    write_file,
    write_manifest,
)
from zero_engine.deepspeed_import.source import MASTER, OWN_STATE, Source

_SEED = 0
"""Seed of the random generators, whose states DeepSpeed does not save."""
_MAX_TEXT = 4000


def write_source(source: Source, directory: Path, tag: str, optimizer: str | None) -> Path:
    """Write checkpoint ``tag`` into ``directory``. Returns its folder.

    The file ``latest`` is written if there is none. One fragment of a parameter at a time is in
    memory. ``optimizer`` is the optimizer's class; None is the saved configuration's.
    """
    check_tag(tag)
    # The manifest first, because it refuses content before the long writing of tensors.
    known = [name for param in source.params for name in param.states or ()]
    states = list(dict.fromkeys([MASTER, *known]))
    kind = optimizer or _optimizer_of(source)
    content = _manifest(source, states, f"{kind} with {len(source.groups)} groups")
    directory.mkdir(parents=True, exist_ok=True)
    aside = Aside(directory, tag)
    try:
        aside.make()
        files: dict[str, dict[str, Any]] = {}
        for name in states:
            _note(f"writing {name}")
            found: dict[str, Sequence[Tensor]] = {}
            for index, param in enumerate(source.params):
                if param.states is not None:
                    given = param.states.get(name)
                    # Without an update, moments are zero.
                    found[str(index)] = given or (torch.zeros(param.numel),)
            files |= write_file(aside.folder, file_name(name, 0), found)
        _note("writing frozen parameters and buffers")
        frozen = {str(i): p.value for i, p in enumerate(source.params) if p.states is None}
        files |= write_file(aside.folder, file_name(VALUE, 0), frozen)
        files |= write_file(aside.folder, BUFFERS, dict(source.buffers))
        rng = {"torch": torch.Generator().manual_seed(_SEED).get_state()}
        files |= write_file(aside.folder, file_name(RNG, 0), rng)
        write_manifest(aside, {**content, "files": files})
        if os.path.lexists(directory / tag):
            raise CheckpointError(f"{directory / tag} has been made meanwhile: it stays")
        latest = read_latest(directory)
        aside.commit(is_latest=latest is None)
        if latest is not None:
            _note(f"note: {directory / 'latest'} still names {latest}")
    finally:
        aside.remove()
    return directory / tag


def _optimizer_of(source: Source) -> str:
    """Return zero-core's name of the saved configuration's optimizer class.

    Without a name (a script made the optimizer) it is AdamW, the most usual one.
    """
    if source.optimizer is None:
        _note(
            "note: the saved configuration names no optimizer, which is taken for AdamW; "
            "--optimizer says another"
        )
        return "AdamW"
    kind, params = source.optimizer
    if kind.lower() not in {"adam", "adamw"}:
        raise CheckpointError(
            f"the checkpoint is of the optimizer {kind}: Adam and AdamW are imported. If its "
            "states mean the same as theirs, give its class, --optimizer AdamW"
        )
    if not params.get("bias_correction", True):
        return "Adam"
    is_adam = kind.lower() == "adam" and not params.get("adam_w_mode", True)
    return "Adam" if is_adam else "AdamW"


def _manifest(source: Source, states: Sequence[str], optimizer: str) -> dict[str, Any]:
    """Return the manifest without the files."""
    progress = {
        "global_steps": source.global_steps,
        "micro_steps": source.global_steps,
        "skipped_steps": source.skipped_steps,
        "loss_scaler": dict(source.loss_scale),
        "param_groups": list(source.groups),
        "lr_scheduler": source.schedule,
    }
    own = {"global_samples": source.global_samples}
    kept: dict[str, Any] = {}
    for name, value in {**source.client_state, OWN_STATE: own}.items():
        try:
            kept |= encode({name: value}, "client_state")
        except CheckpointError as error:
            _note(f"left out: {error}")
    return {
        "format": FORMAT,
        "version": VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "world_size": 1,
        "optimizer": optimizer,
        "states": list(states),
        "params": [
            {
                "name": param.names[0],
                "aliases": list(param.names[1:]),
                "shape": list(param.shape),
                "dtype": str(param.dtype).removeprefix("torch."),
                "is_trainable": param.states is not None,
            }
            for param in source.params
        ],
        # One segment per parameter, because its fragments are written one after another.
        "segments": [
            {
                "is_trainable": param.states is not None,
                "shard_numel": param.numel,
                "slots": [[param.names[0], 0, param.numel]],
            }
            for param in source.params
        ],
        "scalars": {
            param.names[0]: {"num_steps": param.step, "step": param.step}
            if param.step
            else {"num_steps": 0}
            for param in source.params
            if param.states is not None
        },
        "whole_states": {},
        "python_rng": [random.Random(_SEED).getstate()],
        "progress": encode(progress, "progress"),
        "client_state": kept,
        "has_frozen": True,
    }


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return ``text`` shortened, with control characters escaped: a file may have chosen it."""
    cut = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut
    )
