"""The shapes of the objects that this package is handed and hands out.

Structural types only: whoever has these methods fits, and nobody imports this module to do so.
They repeat the part of the engine's protocols that is used here, under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["AdamKernel", "DeviceTierFactory", "ParamStore", "StateTier", "Work"]


class Work(Protocol):
    """A copy under way."""

    def wait(self) -> object:
        """Make the caller's current stream wait for it; on a CPU, block until it is done."""
        ...


@runtime_checkable
class ParamStore(Protocol):
    """Takes new values of parameter shards that rest where a tier cannot write itself."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``[start, start + values.numel())`` of the flat space; any thread, one at a time.

        ``values`` is 1-D, in the shard's dtype, within one shard, and free when it returns.
        """
        ...


@runtime_checkable
class AdamKernel(Protocol):
    """One pass over flat host memory: gradient in, master and moments updated, copy out."""

    def adam_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        """Apply one Adam update in place.

        ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32, 1-D and contiguous and are updated;
        ``grad`` is fp32, bf16 or fp16 and is multiplied by ``grad_scale`` first; ``out`` (fp32,
        bf16 or fp16) receives the rounded master; ``step`` counts this update, from 1.
        """
        ...


@runtime_checkable
class StateTier(Protocol):
    """Where master weights and optimizer state live, and who updates them.

    Offsets are elements of the local flat space ``[0, numel)``; a piece is the part of one
    parameter that lies in it.
    """

    def offer_grad(self, start: int, grad: Tensor) -> None:
        """Take the final gradient of ``[start, start + grad.numel())`` for the coming step."""
        ...

    def discard_grads(self) -> None:
        """Forget what was offered."""
        ...

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces listed in ``active``; may return before it is done."""
        ...

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards within ``[start, stop)`` hold their new values."""
        ...

    def state_names(self) -> Sequence[str]:
        """Names of the elementwise states, ``master_weight`` first."""
        ...

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU."""
        ...

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``."""
        ...

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Per-piece scalars, ``num_steps`` among them."""
        ...

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave."""
        ...


class DeviceTierFactory(Protocol):
    """Makes a tier on the compute device out of torch's own optimizer."""

    def __call__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        param_store: ParamStore | None = None,
    ) -> StateTier:
        """Make a tier for ``[0, numel)``; ``pieces`` and ``params`` in its coordinates."""
        ...
