"""Lets transformers shard a quantized model while it loads it.

At stage 3 transformers (5.23, ``PreTrainedModel.from_pretrained``) makes a model within
``zero.Init``, unless it is quantized: that one it loads whole on every rank, and nothing of it is
gathered where its embeddings are resized. Here each parameter is sharded as soon as it has its
value, and embeddings are gathered to be resized.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any

HOME = "zero_engine.deepspeed"
_LOADING = f"{HOME}.zero.quantized_loading"
_TAKEN = ["model", "state_dict", "load_config"]
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable without which threads read all the weights of a quantized checkpoint ahead."""


def mend_loading(module: ModuleType) -> None:
    """Change ``module``, which is ``transformers.core_model_loading``, as the top says."""
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
                stack.enter_context(importlib.import_module(_LOADING).sharded_loading())
            return load(model, state_dict, load_config, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = load_sharded  # type: ignore[attr-defined]


def mend_resizing(module: ModuleType) -> None:
    """Change ``module``, which is ``transformers.modeling_utils``, as the top says."""
    model = module.PreTrainedModel
    # Not resize_token_embeddings: models override it, to resize further embeddings (Gemma 4).
    embeddings, head = model._get_resized_embeddings, model._get_resized_lm_head
    model._get_resized_embeddings = _gathering(embeddings)
    model._get_resized_lm_head = _gathering(head)


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


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
