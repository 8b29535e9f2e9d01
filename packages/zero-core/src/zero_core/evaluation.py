"""An engine for evaluation alone: a model too large for one rank, without anything to train it.

It keeps parameters as the configuration says, in shards at stage 3, and neither gradients nor
master weights nor optimizer state. At stage 3 the model's values are in the engine's shards: end it
with `zero_core.give_back`, which leaves them in the model, before another engine trains it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_core.config import Config, OffloadOptimizerConfig
from zero_core.engine import Engine
from zero_core.errors import ConfigError
from zero_core.schedule import Schedule

__all__ = ["EvaluationEngine", "for_evaluation"]

_log = logging.getLogger(__name__)

_HINT = "this engine was built for evaluation: build(is_training=True) makes one that trains"


class EvaluationEngine(Engine):
    """Made by ``zero_core.build(..., is_training=False)``; every parameter counts as frozen.

    Calls compute no gradients; what trains, or keeps a training, raises RuntimeError.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradients; see `Engine`."""
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    def scale(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError; so does ``backward``."""
        raise RuntimeError(f"backward: {_HINT}")

    def step(self) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(f"step(): {_HINT}")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(f"clip_grad_norm_(): {_HINT}")

    def load_checkpoint(
        self, directory: str | Path, tag: str | None = None, *, without: Collection[str] = ()
    ) -> tuple[Path, dict[str, Any]]:
        """As `Engine.load_checkpoint`, of the values and buffers alone, trained ones rounded."""
        training = {"optimizer", "lr_scheduler", "progress"}
        return super().load_checkpoint(directory, tag, without={*without, *training})

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: there is no training to go on with."""
        raise RuntimeError(
            f"save_checkpoint(): {_HINT}; export_safetensors() writes the values alone"
        )


def for_evaluation(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Schedule | None,
) -> Config:
    """``config`` without what only a training uses; a line in the log says so.

    Raises:
        ConfigError: an optimizer or scheduler was given all the same.
    """
    if optimizer is not None or lr_scheduler is not None:
        raise ConfigError(
            "build(is_training=False) uses no optimizer and no lr_scheduler: leave them out, or "
            "build for training"
        )
    offload = config.zero_optimization.offload_optimizer
    unused = [
        key
        for key, is_there in (
            ("optimizer", config.optimizer is not None),
            ("scheduler", config.scheduler is not None),
            ("zero_optimization.offload_optimizer", offload.device != "none"),
            ("activation_checkpointing", config.activation_checkpointing is not None),
        )
        if is_there
    ]
    if unused:
        _log.info("evaluation alone: %s not used", ", ".join(unused))
    zero = config.zero_optimization.model_copy(
        update={"offload_optimizer": OffloadOptimizerConfig()}
    )
    return config.model_copy(
        update={
            "optimizer": None,
            "scheduler": None,
            "activation_checkpointing": None,
            "zero_optimization": zero,
        }
    )
