"""`import_checkpoint`, which converts DeepSpeed's checkpoint to zero-core's."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError, checkpoint
from zero_core.errors import CheckpointCorruptError
from zero_engine.deepspeed_import.source import (
    FOLDER,
    MASTER,
    OWN_STATE,
    Source,
    read_stage_0,
    read_universal,
    read_zero,
)

_WHAT = "the import of a checkpoint"
_MAX_ANSWER_BYTES = 64 << 10


def import_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    optimizer: str | None = None,
    frozen: Sequence[str] = (),
) -> Path:
    """Convert DeepSpeed's checkpoint ``tag`` of ``directory``. Returns the new checkpoint's folder.

    A separate process reads the pickles with an unpickler of tensors and plain containers, with
    bounded memory and processor time, and without network if the system permits network namespaces.
    Otherwise a note is printed. Progress goes to stderr. Nothing in ``output`` is replaced, and its
    file ``latest`` is written only if there is none. Only one rank may call it.

    Args:
        directory: folder that DeepSpeed's ``save_checkpoint`` was given, or one checkpoint's
            folder.
        output: folder for checkpoints, as `zero_core.Engine.load_checkpoint` takes it.
        tag: None is the tag in the file ``latest``, if ``directory`` has that file.
        optimizer: class of the optimizer, such as "AdamW". None is the saved configuration's.
        frozen: names of parameters that were not trained. Used at stage 0, whose files lack them.

    Raises:
        CheckpointError: there is no such checkpoint, a part of it cannot be imported, or the new
            folder exists or overlaps with the old one.
        CheckpointCorruptError: the checkpoint is damaged.
    """
    try:
        place = find_place(checkpoint.local_path(directory, _WHAT), tag)
        # If ``place`` is a link, the new folder gets the link's name.
        target = checkpoint.local_path(output, _WHAT) / Path(os.path.abspath(place)).name
        _check_target(place, target)
    except OSError as error:
        raise CheckpointError(f"{directory} is not imported into {output}: {error}") from error
    request = {
        "place": str(place),
        "output": str(output),
        "tag": target.name,
        "optimizer": optimizer,
        "frozen": list(frozen),
        "parent": os.getpid(),
    }
    command = [sys.executable, "-P", "-m", "zero_engine.deepspeed_import.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # the child has ended, and its exit code says why
                child.stdin.write(json.dumps(request).encode())
                child.stdin.close()
            data = child.stdout.read(_MAX_ANSWER_BYTES + 1)
            if len(data) > _MAX_ANSWER_BYTES:  # a malicious pickle may control the child
                child.kill()
            child.wait()
        except BaseException:
            child.kill()
            raise
    answer = None
    if child.returncode == 0:
        with suppress(ValueError, RecursionError):
            answer = json.loads(data)
    if not isinstance(answer, dict):
        ended = f"code {child.returncode}; what it printed is above"
        if child.returncode == -signal.SIGXCPU:
            ended = "SIGXCPU: it took more processor time than files of this size need"
        elif child.returncode < 0:
            ended = signal.Signals(-child.returncode).name
        raise CheckpointError(
            f"{directory} is not imported: the process that reads it ended: {ended}"
        )
    if "error" in answer:
        is_corrupt = answer.get("kind") == CheckpointCorruptError.__name__
        raise (CheckpointCorruptError if is_corrupt else CheckpointError)(answer["error"])
    return target


def _check_target(place: Path, target: Path) -> None:
    source, new = place.resolve(), target.resolve()
    if source.is_relative_to(new) or new.is_relative_to(source):
        raise CheckpointError(
            f"{target} would replace DeepSpeed's checkpoint {place}, or lie in it: give another "
            "folder for the imported one"
        )
    if os.path.lexists(target):
        what = "a checkpoint" if _is_ours(target) else "something else than a checkpoint of ours"
        raise CheckpointError(
            f"{target} is there already, {what}: load or remove it, or import into another folder"
        )
    latest = checkpoint.read_latest(target.parent)
    if latest is not None and not _is_ours(target.parent / latest):
        raise CheckpointError(
            f"{target.parent} holds checkpoints of another program (its file 'latest' names "
            f"{latest}): import into another folder"
        )


def _is_ours(folder: Path) -> bool:
    return (folder / checkpoint.MANIFEST).is_file()


_LATEST = ("latest", "latest_universal")
_MAX_TAG = 1024
_SPARE_BYTES = 1 << 30
"""Allowance for buffers with several names, which are written several times."""
_MAX_RATIO = 4
"""Largest ratio of size to disk blocks that `size_of` takes for compression, not for holes."""


def find_place(directory: Path, tag: str | None) -> Path:
    if tag is None:
        if (directory / FOLDER / "optimizer_state.pt").is_file():
            return directory
        named = [directory / name for name in _LATEST if (directory / name).is_file()]
        if named:
            with named[0].open(encoding="utf-8", errors="replace") as file:
                tag = file.read(_MAX_TAG).strip()
        elif any(directory.glob("*_states.pt")):
            return directory
        else:
            raise CheckpointError(
                f"{directory} holds no checkpoint of DeepSpeed's: there is neither a file 'latest' "
                "nor a file *_model_states.pt in it"
            )
    if tag in {"", ".", ".."} or Path(tag).name != tag:
        raise CheckpointError(f"{directory}: {tag!r:.200} is no tag, which is a folder's name")
    if not (directory / tag).is_dir():
        raise CheckpointError(f"there is no folder {directory / tag}")
    return directory / tag


def read_source(place: Path, frozen: Sequence[str]) -> Source:
    for pattern, what in (
        ("layer_*expert*_states.pt", "mixtures of experts (DeepSpeed-MoE)"),
        ("expp_rank_*_optim_states.pt", "mixtures of experts (DeepSpeed-MoE)"),
        ("layer_*-model_*states.pt", "pipeline parallelism"),
        ("mp_rank_01*_model_states.pt", "tensor parallelism"),
    ):
        if any(place.glob(pattern)):
            raise CheckpointError(f"{place} is a checkpoint of {what}, which is not imported")
    try:
        optim_files = sorted(place.glob("*_optim_states.pt"))
        if (place / FOLDER / "optimizer_state.pt").is_file():
            source = read_universal(place)
        elif optim_files:
            source = read_zero(place, optim_files)
        else:
            source = read_stage_0(place, frozen)
        source.check_extent(size_of(place) + _SPARE_BYTES)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # a malicious file may raise anything
        raise CheckpointCorruptError(
            f"{place} is not as DeepSpeed writes its checkpoints: {type(error).__name__} {error}"
        ) from error
    return source


def size_of(place: Path) -> int:
    found = {}
    for path in place.rglob("*.pt"):
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode):
            on_disk = facts.st_blocks * 512 * _MAX_RATIO
            found[facts.st_dev, facts.st_ino] = min(facts.st_size, on_disk)
    return sum(found.values())


_SEED = 0
"""Seed of the random generators, whose states DeepSpeed does not save."""
_MAX_TEXT = 4000


def write_source(source: Source, directory: Path, tag: str, optimizer: str | None) -> Path:
    """Write checkpoint ``tag`` into ``directory``. Returns its folder.

    The file ``latest`` is written if there is none. One fragment of a parameter at a time is in
    memory. ``optimizer`` is the optimizer's class; None is the saved configuration's.
    """
    checkpoint.check_tag(tag)
    # The manifest is made first, so that wrong content is refused before tensors are written.
    known = [name for param in source.params for name in param.states or ()]
    states = list(dict.fromkeys([MASTER, *known]))
    kind = optimizer or _optimizer_of(source)
    content = _manifest(source, states, f"{kind} with {len(source.groups)} groups")
    directory.mkdir(parents=True, exist_ok=True)
    aside = checkpoint.Aside(directory, tag)
    try:
        aside.make()
        files: dict[str, dict[str, Any]] = {}
        for name in states:
            _note(f"writing {name}")
            found: dict[str, Sequence[Tensor]] = {}
            for index, param in enumerate(source.params):
                if param.states is not None:
                    given = param.states.get(name)
                    # A parameter that was never updated has no moments: they are zero.
                    found[str(index)] = given or (torch.zeros(param.numel),)
            files |= checkpoint.write_file(aside.folder, checkpoint.file_name(name, 0), found)
        _note("writing frozen parameters and buffers")
        frozen = {str(i): p.value for i, p in enumerate(source.params) if p.states is None}
        files |= checkpoint.write_file(
            aside.folder, checkpoint.file_name(checkpoint.VALUE, 0), frozen
        )
        files |= checkpoint.write_file(aside.folder, checkpoint.BUFFERS, dict(source.buffers))
        rng = {"torch": torch.Generator().manual_seed(_SEED).get_state()}
        files |= checkpoint.write_file(aside.folder, checkpoint.file_name(checkpoint.RNG, 0), rng)
        checkpoint.write_manifest(aside, {**content, "files": files})
        if os.path.lexists(directory / tag):
            raise CheckpointError(f"{directory / tag} has been made meanwhile: it stays")
        latest = checkpoint.read_latest(directory)
        aside.commit(is_latest=latest is None)
        if latest is not None:
            _note(f"note: {directory / 'latest'} still names {latest}")
    finally:
        aside.remove()
    return directory / tag


def _optimizer_of(source: Source) -> str:
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
            kept |= checkpoint.encode({name: value}, "client_state")
        except CheckpointError as error:
            _note(f"left out: {error}")
    return {
        "format": checkpoint.FORMAT,
        "version": checkpoint.VERSION,
        "chunk_bytes": checkpoint.CHUNK_BYTES,
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
        "progress": checkpoint.encode(progress, "progress"),
        "client_state": kept,
        "has_frozen": True,
    }


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Shorten ``text`` and escape control characters, because a malicious file may contain it."""
    cut = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut
    )
