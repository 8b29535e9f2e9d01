"""Parameters that stay gathered while a model generates (stage 3).

[Note: generation]
A model that generates runs a forward for every token, and values do not change in between. At stage
3 each forward would gather every unit. So ``generate``, the method of transformers' models, runs
within `zero_core.ShardedModel.generating`. The first forward gathers the units, which then stay
gathered, up to ``stage3_max_live_parameters`` elements. If all units stay, later forwards do not
wait for other ranks, and ranks may generate different numbers of tokens.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

from torch import nn

from zero_core.object_methods import ObjectMethods


def keep_while_generating(model: nn.Module, generating: WeakMethod[Any]) -> ObjectMethods:
    """Make ``generate`` of a model and its submodules run within the ``generating`` context."""

    def keeping(generate: Any) -> Any:
        @functools.wraps(generate)
        def generate_within(*args: Any, **kwargs: Any) -> Any:
            method = generating()
            with nullcontext() if method is None else method():
                return generate(*args, **kwargs)

        return generate_within

    modules = [m for m in model.modules() if "generate" in dir(type(m))]
    return ObjectMethods("generate", [(m, keeping(m.generate)) for m in modules])
