"""Ray Train on the engine: a configuration of Ray's `TorchTrainer` that carries the engine's.

    def train():  # on every worker
        engine = zero_engine.ray.build(model, optimizer=optimizer)
        ...

    TorchTrainer(train, torch_config=ZeroConfig(zero="zero.json"), scaling_config=...).fit()

Ray starts the workers and their process group. ``engine.resume`` resumes at any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

from ray.train.torch import TorchConfig
from torch import nn

import zero_core
from zero_core import ConfigError, Engine
from zero_engine.deepspeed.config.reader import load

_ZERO: ContextVar[Mapping[str, Any] | None] = ContextVar("zero", default=None)
"""Configuration of the engine on this worker, while Ray runs the training function."""


@dataclass
class ZeroConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's `TorchConfig` with the engine's configuration ``zero``, or its JSON file's path.

    The file is read where the object is made, so that workers on other machines need not have it.
    """

    zero: Mapping[str, Any] | str | PathLike[str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.zero = load(self.zero)

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Context in which Ray runs the training function on a worker."""
        return partial(_serving, super().train_func_context, self.zero)


@contextmanager
def _serving(outer: Callable[[], AbstractContextManager[Any]], zero: Any) -> Iterator[None]:
    token = _ZERO.set(zero)
    try:
        with outer():
            yield
    finally:
        _ZERO.reset(token)


def build(model: nn.Module, **further: Any) -> Engine:
    """Build the engine of a worker from the `ZeroConfig` of its `TorchTrainer`.

    ``further``: other arguments of `zero_core.build`. Every worker must call it, in the thread of
    the training function. Raises ConfigError elsewhere, and as `zero_core.build` does.
    """
    zero = _ZERO.get()
    if zero is None:
        raise ConfigError(
            "zero_engine.ray.build() found no ZeroConfig: call it in the function that "
            "TorchTrainer(..., torch_config=ZeroConfig(zero=...)) runs on its workers"
        )
    engine: Engine = zero_core.build(model, zero, **further)
    return engine
