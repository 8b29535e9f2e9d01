"""Lightning's precision plugin for the engine's own backward, clipping and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from zero_core import ConfigError, Engine, ShardedModel

_BLOCK_OF: Mapping[str, str | None] = {
    "32-true": None,
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}


class ZeroPrecision(Precision):
    """The model in 16 bits with fp32 master weights, or all of it in fp32.

    "mixed" and "true" are the same here: parameters, activations and inputs are in the 16-bit
    dtype, the optimizer works on fp32 master weights; there is no autocast. fp16 has its loss
    scaled by the engine.
    """

    def __init__(self, precision: Any) -> None:
        """Take Lightning's name of a precision.

        Raises:
            ConfigError: one that the engine does not have.
        """
        if precision not in _BLOCK_OF:
            raise ConfigError(
                f"Trainer(precision={precision!r}) is not served by the ZeRO strategies; "
                f"choose one of {sorted(_BLOCK_OF)}"
            )
        self.precision = precision
        self._engine: ShardedModel | None = None

    @property
    def block(self) -> str | None:
        """The block of the engine's configuration that is to be enabled, if any."""
        return _BLOCK_OF[str(self.precision)]

    def attach(self, engine: ShardedModel | None) -> None:
        """Work on ``engine`` from now on. None: there is none any more."""
        self._engine = engine

    @property
    def _attached(self) -> Engine:
        assert isinstance(self._engine, Engine), "the strategy attaches its engine in setup()"
        return self._engine

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward of ``tensor``, which Lightning has divided by the batches to accumulate."""
        if model.automatic_optimization:
            is_last = not model.trainer.fit_loop._should_accumulate()
            self._attached.set_gradient_accumulation_boundary(is_last)
        model.backward(self._attached.scale(tensor), *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Forward and backward by ``closure``, Lightning's hooks and clipping, `Engine.step`."""
        if kwargs:
            raise TypeError(f"the engine's step takes no arguments, found {sorted(kwargs)}")
        result = closure()
        if result is None and model.automatic_optimization:
            raise MisconfigurationException(
                "training_step returned None: a step of the ZeRO strategies needs a loss on every "
                "rank; return a loss of zero, (output * 0).sum(), to skip a batch"
            )
        self._after_closure(model, optimizer)
        self._attached.step()
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        self._attached.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        raise MisconfigurationException(
            "gradient_clip_algorithm='value' is not served by the ZeRO strategies: use 'norm'"
        )
