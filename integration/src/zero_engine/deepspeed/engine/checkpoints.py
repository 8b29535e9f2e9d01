"""Checkpoints under DeepSpeed's names: ``global_step{N}``, ``latest``, a client state.

The format is `zero_core.checkpoint`'s: safetensors and a manifest, without pickles. A client state
is JSON and small tensors. Small files have DeepSpeed's names: see [Note: stand-in files] in
`zero_engine.deepspeed.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core import CheckpointError, Engine
from zero_core.checkpoint import MANIFEST, find, local_path, read_latest, read_manifest
from zero_engine.deepspeed.checkpoint import refuse_foreign, without_ties, write_stand_ins
from zero_engine.deepspeed.engine.facts import Facts
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed_import.importing import import_checkpoint
from zero_engine.deepspeed_import.source import OWN_STATE

_log = logging.getLogger(__name__)
_SCRIPT = '''"""Writes a checkpoint's model in fp32: python zero_to_fp32.py . OUTPUT_DIR"""

from zero_engine.deepspeed.utils.zero_to_fp32 import main

main()
'''
"""Program that is written next to the checkpoints, as DeepSpeed does."""


class Checkpoints(Facts):
    """Base class of the engine: saving and loading of checkpoints."""

    global_samples: int
    _has_warned_of_partial = False

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a complete checkpoint, as ``save_dir/global_step{N}`` unless ``tag`` is given.

        Every rank must call it. ``client_state`` is JSON and small tensors. A partly accumulated
        gradient is not saved, with one warning: after a load, the step starts again. If ranks pass
        different tags, ``checkpoint.tag_validation`` decides: by default rank 0's is used, with a
        warning. An engine without an optimizer saves all parameters and the buffers. The program
        ``zero_to_fp32.py`` is written into ``save_dir``.

        Raises:
            ValueError: ``save_dir`` is empty or None.
            CheckpointError: ``save_dir`` is a URL, a value of the client state cannot be saved, or
                backward has already begun the next update, before its ``step``.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint() needs a directory, found {save_dir!r}")
        place = local_path(save_dir, "a checkpoint of DeepSpeed's names")
        name = _agreed_tag(self, f"global_step{self.global_steps}" if tag is None else str(tag))
        if self.core.states.holds_gradient and not self._has_warned_of_partial:
            self._has_warned_of_partial = True
            _log.warning(
                "checkpoint after step %d and in the middle of the next one, of which there is a "
                "gradient already: that is not kept, and after a load the step begins anew; save "
                "after a whole step to lose nothing",
                self.global_steps,
            )
        self.core.save_checkpoint(
            save_dir,
            name,
            {**(client_state or {}), OWN_STATE: {"global_samples": self.global_samples}},
            has_frozen=not exclude_frozen_parameters or not isinstance(self.core, Engine),
            is_latest=save_latest,
            drops_partial=True,
        )
        config = self.core.config
        stage, is_bf16 = config.zero_optimization.stage, config.bf16.enabled
        write_stand_ins(place / name, rank=self.core.rank, stage=stage, is_bf16=is_bf16)
        if self.core.rank == 0:
            Path(save_dir, "zero_to_fp32.py").write_text(_SCRIPT, encoding="utf-8")
        self.core.sharded_state.control.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        from_deepspeed: str | Path | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore a checkpoint, except random generators. Returns its folder and the client state.

        Every rank must call it. With ``tag`` None and no file ``latest``, returns (None, None).

        Args:
            load_dir: folder that `save_checkpoint` was given.
            tag: tag of the checkpoint; None is the newest.
            load_module_strict: False keeps the values of frozen parameters that the checkpoint
                lacks.
            load_optimizer_states: False keeps the optimizer's state and groups.
            load_lr_scheduler_states: False keeps the scheduler's state.
            load_module_only: True loads parameters and buffers only.
            custom_load_fn: must be None, or NotServedError is raised.
            from_deepspeed: a folder on a shared file system. ``load_dir`` was written by DeepSpeed:
                rank 0 imports it into this folder, while the other ranks wait. If the folder
                already holds checkpoints, its newest is loaded without an import, so that a
                restarted script resumes. Run ``zero-engine import`` beforehand if the import takes
                longer than the process group's timeout.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit the model.
            CheckpointCorruptError: the checkpoint's bytes are not what was written.
        """
        if custom_load_fn is not None:
            raise NotServedError("load_checkpoint(custom_load_fn=...)")
        if from_deepspeed is not None:
            tag = _import(self, load_dir, tag, from_deepspeed)
            load_dir = from_deepspeed
        place = local_path(load_dir, "a checkpoint of DeepSpeed's names")
        if tag is None and read_latest(place) is None:
            _log.warning("%s holds no checkpoint: there is no file 'latest' in it", load_dir)
            return None, None
        refuse_foreign(load_dir, tag)
        name = None if tag is None else str(tag)
        left_out = {
            "frozen": not load_module_strict and not read_manifest(find(place, name)).has_frozen,
            "optimizer": load_module_only or not load_optimizer_states,
            "lr_scheduler": load_module_only or not load_lr_scheduler_states,
            "progress": load_module_only,
        }
        without = ["rng", *(part for part, is_out in left_out.items() if is_out)]
        try:
            loaded, client_state = self.core.load_checkpoint(load_dir, name, without=without)
        except CheckpointError as error:
            text = str(error)
            for core, deepspeeds in _WORDS.items():
                text = text.replace(core, deepspeeds)
            raise type(error)(text) from error
        own = client_state.pop(OWN_STATE, {})
        if not load_module_only:
            samples = self.global_steps * self.train_batch_size()
            self.global_samples = own.get("global_samples", samples)
        self.fill_small_params()
        return str(loaded), client_state

    def fill_small_params(self) -> None:
        """At stage 3, update the kept copies of small parameters. Every rank must call it."""
        if self.core.config.zero_optimization.stage == 3:
            self.core.publish()

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model as one file, in the compute dtype, on rank 0.

        Every rank must call it. The file is in safetensors format if its name ends in
        ``.safetensors``, otherwise in that of torch.save. As in DeepSpeed, nothing is written at
        stage 3 without ``stage3_gather_16bit_weights_on_model_save``: the method returns False.
        """
        path = local_path(save_dir, "a model of DeepSpeed's names") / save_filename
        is_sharded = self.zero_optimization_partition_weights()
        if is_sharded and not self.settings.gather_16bit_weights_on_model_save:
            _log.warning(
                "%s is not written: at stage 3 that needs "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save = true",
                path,
            )
            return False
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                save_file(without_ties(state), path, metadata={"format": "pt"})
            else:
                torch.save(state, path)
        self.core.sharded_state.control.barrier()
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model in the compute dtype on rank 0's CPU, and None on other ranks.

        Every rank must call it. Tied names share a tensor.
        """
        state = self.core.full_state_dict(rank=0)
        if self.core.rank != 0:
            return None
        if exclude_frozen_parameters:
            for spec in self.core.layout.params:
                for name in () if spec.is_trainable else (spec.name, *spec.aliases):
                    state.pop(name, None)
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return ``module.state_dict()``. At stage 3, ungathered parameters are empty in it."""
        state: dict[str, Any] = self.module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load the state dict ``checkpoint["module"]`` of rank 0 into the model.

        Every rank must call it, and needs memory for the whole model. ``fetch_z3_params`` has no
        effect. Raises NotServedError for ``custom_load_fn`` and ``allowed_missing_keys``.
        """
        if custom_load_fn is not None:
            raise NotServedError("load_module_state_dict(custom_load_fn=...)")
        if allowed_missing_keys is not None:
            what = "load_module_state_dict(allowed_missing_keys=...)"
            raise NotServedError(what, "use strict=False")
        with self.core.gathered(modifier_rank=0) as module:
            module.load_state_dict(checkpoint["module"], strict=strict)


def _import(engine: Checkpoints, source: str | Path, tag: object, output: str | Path) -> str:
    """Import ``source`` on rank 0, unless ``output`` has checkpoints. Returns the tag to load."""
    state = engine.core.sharded_state

    def on_rank_0() -> str:
        if engine.core.rank != 0:
            return ""
        frozen = [spec.name for spec in engine.core.layout.params if not spec.is_trainable]
        kind = state.optimizer.rpartition(" with ")[0]
        name = None if tag is None else str(tag)
        newest = read_latest(Path(output))
        # A checkpoint without a manifest is DeepSpeed's own. The import refuses to overwrite it.
        if newest is not None and Path(output, newest, MANIFEST).is_file():
            if name is not None and not Path(output, name, MANIFEST).is_file():
                raise CheckpointError(
                    f"{output} holds checkpoints, but no {name}: import that into another folder"
                )
            _log.warning("%s holds checkpoints: its newest, %s, is loaded", output, newest)
            return newest
        return import_checkpoint(source, output, name, optimizer=kind, frozen=frozen).name

    found = state.control.together("checkpoint: import", on_rank_0)
    return str(state.control.gather_json(found)[0])


_WORDS = {
    'without=("optimizer", "lr_scheduler", "progress")': "load_module_only=True",
    'without=("lr_scheduler",)': "load_lr_scheduler_states=False",
    'without=("frozen",)': "load_module_strict=False",
}
"""Zero-core's arguments in error messages, and DeepSpeed's arguments with the same effect."""


class TagMismatchError(CheckpointError, AssertionError):
    """Ranks save a checkpoint under different tags. An AssertionError too, as in DeepSpeed."""


def _agreed_tag(engine: Checkpoints, tag: str) -> str:
    """Return rank 0's tag. Other tags warn or raise, by ``checkpoint.tag_validation``."""
    validation = engine.settings.tag_validation
    tags: list[str] = engine.core.sharded_state.control.gather_json(tag)
    if len(set(tags)) > 1 and validation != "IGNORE":
        text = f"the ranks save a checkpoint under different tags: {tags}; pass the same to all"
        if validation == "FAIL":
            raise TagMismatchError(text)
        _log.warning("%s. %r, rank 0's, is taken", text, tags[0])
    return tags[0]
