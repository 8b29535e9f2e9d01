"""Lets transformers shard a quantized model while it loads it.

At stage 3 transformers (5.23, ``PreTrainedModel.from_pretrained``) makes a model within
``zero.Init``, unless it is quantized: that one it loads whole on every rank, and nothing of it is
gathered where its embeddings are resized. Here each parameter is sharded as soon as it has its
value, and embeddings are gathered to be resized.
"""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any

HOME = "zero_engine.deepspeed"
_LOADING = f"{HOME}.zero.quantized_loading"
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable without which threads read all the weights of a quantized checkpoint ahead."""


def mend_loading(module: ModuleType) -> None:
    """Change ``module``, which is ``transformers.core_model_loading``, as the top says."""
    load = module.convert_and_load_state_dict_in_model

    @wraps(load)
    def load_sharded(
        model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        deepspeed = importlib.import_module(HOME)
        with ExitStack() as stack:
            is_sharded = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
            if load_config.hf_quantizer is not None and is_sharded:
                deepspeed.init_distributed()
                stack.callback(_set_variable, _SEQUENTIAL, os.environ.get(_SEQUENTIAL))
                os.environ[_SEQUENTIAL] = "1"
                stack.enter_context(importlib.import_module(_LOADING).sharded_loading())
            return load(model, state_dict, load_config, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = load_sharded  # type: ignore[attr-defined]


def mend_resizing(module: ModuleType) -> None:
    """Change ``module``, which is ``transformers.modeling_utils``, as the top says."""
    resize = module.PreTrainedModel.resize_token_embeddings

    @wraps(resize)
    def resize_gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
        gather = importlib.import_module(HOME).zero.GatheredParameters
        ends = (self.get_input_embeddings(), self.get_output_embeddings())
        params = [param for end in ends if end is not None for param in end.parameters()]
        with gather(params, modifier_rank=0, enabled="hf_quantizer" in vars(self)):
            return resize(self, *args, **kwargs)

    module.PreTrainedModel.resize_token_embeddings = resize_gathered


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
