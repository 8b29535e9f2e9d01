"""Parameters that stay gathered while a model generates (stage 3).

[Note: generation]
A model that generates runs a forward for every token, and between two of them no value changes. At
stage 3 each forward would gather every unit. So ``generate``, the method of transformers' models,
runs within `zero_core.ShardedModel.generating`: the first forward gathers, and units stay, as many
as ``stage3_max_live_parameters`` allows. If that is all of them, no later forward waits for other
ranks, which may end at another length.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from zero_core.object_methods import ObjectMethods

_GENERATE = "generate"


class Generating(Protocol):
    """Keeps parameters gathered. `zero_core.ShardedModel` is the one implementation."""

    def generating(self) -> AbstractContextManager[nn.Module]:
        """Keep them within."""


class Generation(ObjectMethods):
    """Has ``generate`` of a model and of its parts run within `Generating.generating`."""

    def __init__(self, model: nn.Module, engine: Generating) -> None:
        """Replace the method, until `remove`. ``engine`` is held weakly."""
        modules = [m for m in model.modules() if _GENERATE in dir(type(m))]
        reference = weakref.ref(engine)
        super().__init__(_GENERATE, [(m, _keeping(m.generate, reference)) for m in modules])


def _keeping(generate: Any, reference: weakref.ref[Generating]) -> Any:
    @functools.wraps(generate)
    def generate_within(*args: Any, **kwargs: Any) -> Any:
        engine = reference()
        with nullcontext() if engine is None else engine.generating():
            return generate(*args, **kwargs)

    return generate_within
