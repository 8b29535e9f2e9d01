"""Engine methods that save and load state: checkpoints, exports and weight patches."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint import whole_models
from zero_core.checkpoint.files import holds_checkpoint, list_checkpoints, split_tag
from zero_core.checkpoint.load import load_checkpoint
from zero_core.checkpoint.manifest import MANIFEST
from zero_core.checkpoint.patches import PatchWriter, WeightPatch
from zero_core.checkpoint.safetensors_files import StoredTensor, find_tensors
from zero_core.checkpoint.save import OnPending, PendingSave, Saver, SaveRequest
from zero_core.checkpoint.storage import Location, local_path, location_of
from zero_core.checkpoint.whole_models import Loaded
from zero_core.comm.communicator import Communicator
from zero_core.core.extension import Extensions
from zero_core.core.passes import Passes
from zero_core.errors import CheckpointError
from zero_core.optim.train_state import TrainState
from zero_core.runtime.device_states import NO_PARTS
from zero_core.runtime.gathered import GatheredCalls
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.update import StepGradient

_log = logging.getLogger(__name__)
_STEP = re.compile(r"(step-|global_step)[0-9]+")  # tags of saves without a tag


class ModelCheckpoints(GatheredCalls):
    """Save and load methods of all engines, including those built for evaluation."""

    sharded_state: ShardedState
    _communicator: Communicator
    _passes: Passes
    _saver: Saver
    _train: TrainState

    def full_state_dict(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> dict[str, Tensor]:
        """Return the whole model's state dict on the CPU, on every rank or on ``rank`` alone.

        Values are read from the parameter shards, or, if ``dtype`` differs from that of a trained
        parameter, cast from its master weights. Tied names share a tensor. Every rank must call it.
        """
        self._device_states.check_states("full_state_dict()")
        with self.place.during("full_state_dict()"):
            return whole_models.full_state_dict(self.sharded_state, dtype=dtype, rank=rank)

    def export_safetensors(
        self, directory: str | Path, *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write ``model.safetensors`` for Hugging Face and return the folder.

        A large model has several files and an index. Every rank must call it. Rank 0 writes.
        """
        self._device_states.check_states("export_safetensors()")
        with self.place.during("export_safetensors()"):
            place = local_path(directory, "an export")
            if place.suffix == ".safetensors" and not place.is_dir():
                raise CheckpointError(f"export_safetensors: {place} names a file: give its folder")
            return whole_models.export_safetensors(self.sharded_state, place, dtype=dtype)

    def save_checkpoint(
        self,
        directory: str | Location,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        has_frozen: bool = True,
        is_latest: bool = True,
        drops_partial: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> Location:
        """Write the training state. It can be loaded at another stage, world size or state tier.

        Every rank must call it, between two steps. The previous checkpoint stays complete until the
        new one is complete. An engine built for evaluation has no optimizer states: load its
        checkpoint ``without=("optimizer", "lr_scheduler", "progress")``.

        Args:
            directory: folder of all checkpoints: a path, or an fsspec URL such as
                ``s3://bucket/run``.
            tag: name of this checkpoint. None is ``step-N``.
            client_state: JSON values and small tensors that a load returns.
            has_frozen: whether the values of frozen parameters are written.
            is_latest: whether a load without a tag takes this checkpoint.
            drops_partial: allow a save in the middle of a step, without that step's gradients.
            keep_last: if ``tag`` ends with the step, keep only the last ``keep_last`` checkpoints
                of its prefix.
            keep_every: also keep checkpoints whose step is a multiple of ``keep_every``.

        Raises:
            CheckpointError: a value cannot be stored, a rank failed, or a step is in progress.
        """
        tag = f"step-{self._train.global_steps}" if tag is None else tag
        kept = has_frozen, is_latest, keep_last, keep_every
        with self._saving("save_checkpoint()", drops_partial=drops_partial):
            place = location_of(directory)
            return self._saver.save(SaveRequest(place, tag, client_state or {}, *kept))

    @contextmanager
    def _saving(self, call: str, *, drops_partial: bool) -> Iterator[None]:
        self._device_states.check_states(call)
        self._communicator.forget_values()
        self._communicator.forget_errors()  # a resumed run has none, and equals one that goes on
        with self.place.during(call):
            yield

    def load_checkpoint(
        self, directory: str | Location, tag: str | None = None, *, without: Collection[str] = ()
    ) -> tuple[Location, dict[str, Any]]:
        """Restore a checkpoint's parameters and buffers.

        Trained parameters are rounded from its master weights. See `Engine.load_checkpoint`.
        """
        return self._load(directory, tag, {*without, "optimizer", "lr_scheduler", "progress"})

    def _load(
        self, directory: str | Location, tag: str | None, without: Collection[str]
    ) -> tuple[Location, dict[str, Any]]:
        self._device_states.check_here("load_checkpoint()")
        with self.place.during("load_checkpoint()"), self.rewriting():
            place = location_of(directory)
            found = load_checkpoint(self.sharded_state, place, tag, self._train, without=without)
        self.place.num_steps = self._train.global_steps
        return found

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Allow writes to shards and optimizer states in this context. Every rank must enter it.

        Gradients accumulated since the last step are dropped.
        """
        self._device_states.check_here("writing shards and states")
        self._device_states.before_write()
        self._passes.units.release_all()
        yield
        self._passes.backward.discard()
        self._train.enter_micro_step(0)
        self._communicator.begin_step(self._train.global_steps)
        self._passes.units.values_replaced()
        self._device_states.edits.forget()
        self.place.unfinished = ""


class TrainingCheckpoints(ModelCheckpoints):
    """Save and load methods of training engines."""

    _extensions: Extensions
    _gradient: StepGradient
    _patches: PatchWriter

    def async_save(
        self,
        directory: str | Location,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        has_frozen: bool = True,
        is_latest: bool = True,
        drops_partial: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        on_pending: OnPending = "wait",
        max_copy_bytes: int | None = None,
    ) -> PendingSave:
        """Write the training state as `save_checkpoint` does, in a background thread.

        The call waits for pending updates and returns before anything is written. A part of a state
        is copied only if a step changes it before the thread has written it. The copies take host
        memory of at most the size of this rank's states (``async_save_bytes`` of `plan`). The call
        itself copies states of extensions, of optimizers that update whole parameters, and of tiers
        other than `SnapshotTier`. Until the save has ended, change values only through the engine.

        Loads, `close`, the end of the interpreter, and any write of values outside of a step wait
        for the save. If the save fails, its files are removed and the training goes on. The error
        is logged, and raised on all ranks by ``result()`` of the returned future, or else by the
        next save or by `close`. If the process is killed first, this save leaves no checkpoint.

        Args:
            directory: as in `save_checkpoint`, like all arguments that are not listed here.
            on_pending: if an earlier save is pending, "wait" for it or "refuse".
            max_copy_bytes: limit for the copies. A step that needs more waits for the thread. Set
                a limit if states are on NVMe and host memory has no room for their copies.

        Raises:
            CheckpointError: as `save_checkpoint`; also if an earlier save failed, or is pending and
                ``on_pending`` is "refuse".
        """
        tag = f"step-{self._train.global_steps}" if tag is None else tag
        kept = has_frozen, is_latest, keep_last, keep_every
        with self._saving("async_save()", drops_partial=drops_partial):
            request = SaveRequest(location_of(directory), tag, client_state or {}, *kept)
            return self._saver.start(request, on_pending=on_pending, max_bytes=max_copy_bytes)

    @contextmanager
    def _saving(self, call: str, *, drops_partial: bool) -> Iterator[None]:
        self._gradient.policy.check_unused(f"{call.removesuffix('()')} between backward and step")
        self._train.check_ended(or_dropped=drops_partial)
        began = perf_counter()
        with super()._saving(call, drops_partial=drops_partial):
            yield
        for follow in self._extensions.saved:
            follow(call, perf_counter() - began)

    def load_checkpoint(
        self, directory: str | Location, tag: str | None = None, *, without: Collection[str] = ()
    ) -> tuple[Location, dict[str, Any]]:
        """Restore what `save_checkpoint` wrote and return the checkpoint's folder and client state.

        Every rank must call it. Without ``tag`` the newest complete checkpoint is loaded. Parts
        named in ``without`` stay as they are; see `zero_core.checkpoint.PARTS`.

        Raises:
            CheckpointError: there is no checkpoint, or it does not fit the engine.
            CheckpointCorruptError: the checkpoint is damaged or incomplete.
        """
        if "optimizer" in without:
            self.place.check_finished(f"load_checkpoint(without={sorted(without)})")
        began = perf_counter()
        found = self._load(directory, tag, without)
        for follow in self._extensions.loaded:
            follow(str(found[0]), perf_counter() - began)
        return found

    def resume(
        self, directory: str | Location, *, last_step: int | None = None
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint in ``directory``, or change nothing if there is none.

        For programs that restart with the same command line, with any number of ranks. Every rank
        must call it. With ``memory_checkpoint``, a snapshot in memory is preferred if it is at
        least as new as the newest checkpoint on disk, and not after ``last_step``. Returns the
        client state given to the save, or to `step` for a snapshot. None if nothing was loaded.
        Without the file ``latest``, the newest ``step-N`` is loaded, with a warning.

        Raises:
            CheckpointError: as `load_checkpoint`; also if only some ranks find a checkpoint.
        """
        self._device_states.check_here("resume()", NO_PARTS)
        control, place = self.sharded_state.control, location_of(directory)
        for find in self._extensions.newer_state:
            if (restore := find(place, last_step)) is not None:
                with self.rewriting():
                    return restore()

        def unnamed_tags() -> list[str] | None:
            if holds_checkpoint(place) or (place / MANIFEST).is_file():
                return None  # `load_checkpoint` finds the newest, or refuses a checkpoint's folder
            return list_checkpoints(place) if place.is_dir() else []

        rows = control.gather_json(control.together("checkpoint: find", unnamed_tags))
        if None in rows:
            return self.load_checkpoint(place)[1]
        tags = sorted(set[str](rows[0]).intersection(*rows))
        steps = [(split_tag(tag)[1] or 0, tag) for tag in tags if _STEP.fullmatch(tag)]
        newest = max(steps)[1] if steps else None
        if tags and control.rank == 0:
            _log.warning(
                "resume(): %s has checkpoints (%s) and no file 'latest', as after an incomplete "
                "copy or a kill in the first save. It loads %s. load_checkpoint(..., tag) loads "
                "another",
                *(place, ", ".join(tags), newest or "none, because no tag is step-N"),
            )
        return None if newest is None else self.load_checkpoint(place, newest)[1]

    @property
    def patch_version(self) -> int:
        """Version of the newest weight patch. 0 before the first, or without ``weight_patches``."""
        return self._patches.version

    def weight_patch(
        self, since: int | None = None, *, path: str | Path | None = None
    ) -> WeightPatch:
        """Write the compute weights that changed since a version, for `zero_core.apply_patch`.

        A version is the state of the weights when a patch was written. Version 0 is the state after
        `build`. One patch serves all receivers of version ``since`` or newer, including receivers
        that have loaded an export made in between. With the key ``weight_patches``, a log has
        the positions of changes. Values are read when the patch is written. A 16-bit weight is sent
        if any of its bits changed. Three kinds of weights are sent whole if they were updated: fp32
        weights, shards in a file, and 16-bit weights that are their own master weights or part of
        split ones (``offload_optimizer.state_dtype`` other than float32). Persistent buffers are
        rank 0's. Quantized bytes never change. Every rank must call it, between two steps.

        Args:
            since: the receiver's version. None sends all values, for any receiver.
            path: the file that rank 0 writes. None keeps the patch in rank 0's memory.

        Raises:
            PatchGapError: ``since`` is older than the log of changes. All ranks raise it.
            RuntimeError: ``since`` is given without the key ``weight_patches``, or the call is
                within ``gathered`` or after ``offload_states``.
            ValueError: there is no such version, or ranks passed different ``since``.
            CheckpointFailedError: the file could not be written.
        """
        self._device_states.check("weight_patch()")
        if self.is_gathered:
            raise RuntimeError("weight_patch() within gathered(): call it after that has ended")
        with self.place.during("weight_patch()"):
            return self._patches.write(since, None if path is None else local_path(path, "a patch"))


def load_pretrained(
    engine: ModelCheckpoints, source: str | Path | Sequence[str | Path], *, strict: bool = True
) -> Loaded:
    """Load the weights of safetensors files into the engine, and return the unmatched names.

    Every rank must call it and must see the files. Each rank reads the ranges that it keeps. Master
    weights keep the file's precision, unless ``data_types.master_weights_from`` is "rounded".
    Parameters and buffers are cast to their dtype. The file may name a tied weight by any of its
    names. Names match with and without Hugging Face's ``base_model_prefix``. Names in the model's
    ``_keys_to_ignore_on_load_missing`` and ``_keys_to_ignore_on_load_unexpected`` are ignored. All
    names, shapes and dtypes are checked before anything is changed. Gradients of a backward without
    a step are dropped.

    Args:
        engine: fresh from `zero_core.build`, because moments of other weights would be wrong.
        source: a safetensors file, several, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        strict: whether the files must have every parameter and persistent buffer, and nothing else.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit, the engine has finished a micro-step or
            loaded a checkpoint's progress, or a rank failed. If a read failed after the checks, the
            values are undefined: build the engine again.
        CheckpointCorruptError: a file is damaged or incomplete.
    """
    if num_steps := engine._train.micro_steps:
        raise CheckpointError(
            f"load_pretrained() after {num_steps} micro-steps: the optimizer's state "
            "belongs to other weights; load into a fresh engine, or set weights by engine.states"
        )
    state = engine.sharded_state

    def check() -> tuple[dict[str, StoredTensor], Loaded, bytes]:
        stored = find_tensors(source)
        matched, names = whole_models.match_files(state, stored)
        if strict and (names.missing or names.unexpected):
            raise CheckpointError(
                f"{source} does not fit the model: missing {_some(names.missing)}, unexpected "
                f"{_some(names.unexpected)}; strict=False leaves both as they are"
            )
        described = repr([(n, t.shape, t.dtype, t.start) for n, t in stored.items()])
        return matched, names, hashlib.sha256(described.encode()).digest()

    matched, names, digest = state.control.together("load_pretrained: check", check)
    if len(set(state.control.gather_bytes(digest))) > 1:
        raise CheckpointError(f"load_pretrained: ranks see different files at {source}")
    with engine.rewriting():
        state.quiesce()
        state.control.place.unfinished = "load_pretrained()"
        rounds = engine.config.data_types.master_weights_from == "rounded"
        restore = partial(whole_models.restore_files, state, matched, rounds_masters=rounds)
        state.control.together("load_pretrained: read", restore)
    return names


def _some(names: tuple[str, ...]) -> str:
    if len(names) <= 10:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(names[:10])}, ... ({len(names)} in all)]"
