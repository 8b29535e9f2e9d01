"""Activation checkpointing of every block, as the configuration asks for it.

Each block keeps its inputs alone and is computed again in backward (Chen et al., arXiv
1604.06174), by torch's non-reentrant `torch.utils.checkpoint`. With ``cpu_checkpointing`` the
positional inputs wait in host memory (`zero_core.runtime.host_inputs`). Only the block's
``forward`` is wrapped, on the object: names, class and hooks stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.object_methods import ObjectMethods
from zero_core.runtime.host_inputs import HostInputs


class Recompute(ObjectMethods):
    """Wraps the forwards of blocks until `remove`."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        passes: Passes,
        host_inputs: HostInputs | None,
        *,
        is_on_cpu: bool,
    ) -> None:
        """Wrap ``blocks``, the modules of the passes' blocks, in their order.

        ``is_on_cpu``: a block's inputs wait in host memory, where ``host_inputs`` move those on an
        accelerator.
        """
        self._is_on_cpu = is_on_cpu
        self._host_inputs = host_inputs
        self._backward = passes.backward
        pairs = zip(passes.units.blocks, blocks, strict=True)
        super().__init__("forward", [(module, self._wrap(unit, module)) for unit, module in pairs])

    def _wrap(self, unit: Unit, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._recomputing(unit)

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if torch.compiler.is_compiling() and not self._is_on_cpu:
                # The compiled backward recomputes; the weights that it saved tell when it begins.
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            with nullcontext() if self._host_inputs is None else self._host_inputs.context():
                return checkpoint(
                    forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
                )

        return wrapped

    @contextmanager
    def _recomputing(self, unit: Unit) -> Iterator[None]:
        self._backward.enter_recompute(unit)
        yield
