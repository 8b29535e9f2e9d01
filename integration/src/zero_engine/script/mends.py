"""Changes of other projects' modules, which `hook` makes as soon as one has been imported.

Every Python process imports this file: at the top nothing but the standard library's light parts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

HOME = "zero_engine.deepspeed"
_TAKEN = ["model", "state_dict", "load_config"]
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable without which threads read all the weights of a quantized checkpoint ahead."""


def mend_accelerate(module: Any) -> None:
    """Let accelerate see all ranks with DeepSpeed where there is no accelerator.

    accelerate (1.15, ``PartialState.__init__``) asks ``_prepare_backend`` for the backend. Without
    an accelerator and with ``cpu=False``, which is how DeepSpeed is chosen, there is none; it then
    joins the group all the same, but counts one process, number 0, on every rank. Every rank would
    read all data and write every file. Here it is told of gloo.
    """
    state = module.PartialState
    prepare = state._prepare_backend

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, *args, **kwargs)
        uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        has_ranks = uses_deepspeed and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if backend is None and not self._cpu and has_ranks:
            backend = "gloo"
            if os.environ.get("RANK", "0") == "0":
                import logging

                logging.getLogger("zero_engine").warning(
                    "no accelerator: accelerate is told to join %s ranks by gloo, as it would "
                    "otherwise take every rank for the only one",
                    os.environ["WORLD_SIZE"],
                )
        return backend, kind

    state._prepare_backend = prepare_backend


def mend_lightning(module: Any) -> None:
    """Let Lightning's own DeepSpeed strategies run where there is no accelerator.

    Lightning (2.6, ``DeepSpeedStrategy.setup_environment`` of the Trainer and of Fabric) refuses
    every accelerator but CUDA's, as the real DeepSpeed needs it, and devices without a number. This
    engine computes on CPUs, too.
    """
    cuda = module.CUDAAccelerator
    cpu = importlib.import_module(cuda.__module__.rpartition(".")[0]).CPUAccelerator
    validate = module._validate_device_index_selection
    # The module uses the name for isinstance() alone, which takes several classes.
    module.CUDAAccelerator = (cuda, cpu)
    module._validate_device_index_selection = lambda devices: validate(
        [device for device in devices if device.type != "cpu"]
    )


def mend_loading(module: Any) -> None:
    """Let transformers shard a quantized model while it loads it.

    At stage 3 transformers (5.23, ``PreTrainedModel.from_pretrained``) makes a model within
    ``zero.Init``, unless it is quantized: that one it loads whole on every rank. Here each
    parameter is sharded as soon as it has its value.
    """
    import inspect

    load = module.convert_and_load_state_dict_in_model
    found = list(inspect.signature(load).parameters)
    if found[: len(_TAKEN)] != _TAKEN:
        raise ImportError(f"{load.__name__}() takes {found}, expected {_TAKEN} first")

    @wraps(load)
    def load_sharded(
        model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        with ExitStack() as stack:
            is_sharded = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
            if is_sharded and load_config.hf_quantizer is not None:
                importlib.import_module(HOME).init_distributed()
                stack.callback(_set_variable, _SEQUENTIAL, os.environ.get(_SEQUENTIAL))
                os.environ[_SEQUENTIAL] = "1"
                loading = importlib.import_module(f"{HOME}.zero.partition_parameters")
                stack.enter_context(loading.sharded_loading())
            return load(model, state_dict, load_config, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = load_sharded


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def mend_resizing(module: Any) -> None:
    """Have transformers gather the embeddings of a quantized model, which it resizes whole."""
    model = module.PreTrainedModel
    # Not resize_token_embeddings: models override it, to resize further embeddings (Gemma 4).
    for name in ("_get_resized_embeddings", "_get_resized_lm_head"):
        setattr(model, name, _gathering(getattr(model, name)))


def _gathering(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``resize``, a method of a model, with the values of the module that it resizes."""

    @wraps(resize)
    def resize_gathered(self: Any, old: Any, *args: Any, **kwargs: Any) -> Any:
        if "hf_quantizer" not in vars(self):
            return resize(self, old, *args, **kwargs)
        gather = importlib.import_module(HOME).zero.GatheredParameters
        with gather(old.parameters(), modifier_rank=0):
            return resize(self, old, *args, **kwargs)

    return resize_gathered


MENDS: Mapping[str, Callable[[Any], None]] = {
    "accelerate.state": mend_accelerate,
    "lightning.fabric.strategies.deepspeed": mend_lightning,
    "lightning.pytorch.strategies.deepspeed": mend_lightning,
    # The same code under the names of the package pytorch-lightning.
    "lightning_fabric.strategies.deepspeed": mend_lightning,
    "pytorch_lightning.strategies.deepspeed": mend_lightning,
    "transformers.core_model_loading": mend_loading,
    "transformers.modeling_utils": mend_resizing,
}
"""Functions that change a module, by its name."""
