"""``world_size_invariant``: arithmetic and random numbers that do not depend on the world size.

[Note: random numbers that follow the micro-batch]
Dropout draws from torch's generators, whose state depends on earlier draws of the rank. So the
first training forward of a micro-step seeds the generators from the seed, the step, and the number
of the micro-batch in the step. Thus a micro-batch gets the same random numbers on any rank, at any
world size. A micro-batch that is repeated, because its forward raised or its gradients were
dropped, is seeded again.

[Note: one norm for any world size]
Sums of rounded numbers depend on the order of addition, which depends on the number of ranks. With
``world_size_invariant`` a norm is computed in two stages that do not depend on this number:
- norms of **chunks**, `CHUNK_NUMEL` elements at fixed places of a segment. Shards consist of whole
  chunks (`zero_core.layout.arithmetic.Layout.build`), and one operator reduces each chunk as a row.
- **bins**: each chunk's power is rounded to 24 bits and added to the bin of its exponent, in which
  all terms are integers. Sums of integers below 2**53 are exact in float64, in any order. A bin
  has room for 2**28 chunks, or 2**38 elements.
This is a reproducible sum by indexed bins (Demmel and Nguyen, "Fast Reproducible Floating-Point
Summation", ARITH 2013), with bins at fixed places and a single level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import outside_graphs, seed_generators
from zero_core.comm.communicator import Communicator, NamedWork
from zero_core.comm.control import ControlGroup
from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.groups import Ranks
from zero_core.config import Config
from zero_core.core.extension import Extension
from zero_core.core.grads import Arithmetic, FlatGrads
from zero_core.core.saved import is_in_backward
from zero_core.errors import ConfigError
from zero_core.layout.arithmetic import CHUNK_NUMEL
from zero_core.optim.train_state import TrainState
from zero_core.protocols import AddingCollectives


class Invariance(Extension):
    """Extension that seeds micro-batches, and refuses sums that depend on the world size."""

    def __init__(self, model: nn.Module, config: Config, train: TrainState, ranks: Ranks) -> None:
        self._train = train
        self._seed = config.seed or 0
        self._ranks = ranks
        self._seeded = (-1, -1, -1)  # `_place` of the last seed
        self._reduced = (-1, -1, -1)  # `_place` of the last backward
        self._is_running = False  # whether a forward is running or has raised
        self.handles = [
            model.register_forward_pre_hook(outside_graphs(self._enter), prepend=True),
            model.register_forward_hook(outside_graphs(self._leave)),
        ]

    @property
    def _place(self) -> tuple[int, int, int]:
        train = self._train
        return train.global_steps, train.num_accumulated, train.num_drops

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not module.training or is_in_backward():
            return
        place = self._place
        if place != self._seeded or self._is_running:
            self._seeded = place
            number = place[1] * self._ranks.size + self._ranks.rank  # of the micro-batch
            seed_generators(self._ranks.device, self._seed, self._train.global_steps, number)
        self._is_running = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            self._is_running = False

    def begin_backward(self, *, is_new: bool) -> None:
        if not self._train.scaler.is_applied:
            raise RuntimeError(
                "world_size_invariant divides each loss by all ranks' micro-batches before "
                "backward: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if self._reduced == self._place:
            raise RuntimeError(
                "world_size_invariant: a second backward in one micro-step, whose gradients would "
                "be added in another order at another world size: add up the losses and call "
                "engine.backward() once, then engine.step()"
            )
        self._reduced = self._place

    def before_local_sums(self) -> None:
        raise RuntimeError(
            "world_size_invariant: gradients that are added up on their rank first would be "
            "added in another order at another world size. Leave no_sync() and "
            "set_requires_gradient_sync(False) out: each backward is reduced"
        )


class SequentialGrads(FlatGrads):
    """Gradients that are added to the step's sum rank by rank, as a sequential plan requires.

    See [Note: the same bits at any world size] in `zero_core.layout.gradient_plan`.
    """

    _missing = -0.0  # adding -0.0 changes no bit
    _added: set[int]  # positions added since `begin_backward`

    def begin_backward(self) -> None:
        self._added = set()

    def add(self, position: int, grad: Tensor) -> None:
        if position in self._added:
            shape = list(self.params[position].shape)
            name = self._communicator.name_of(f"parameter of shape {shape}", self.segment.index)
            raise RuntimeError(
                f"world_size_invariant: a {name} had two gradients in one backward, as of a module "
                "that is used twice under reentrant activation checkpointing. They would be added "
                "in another order at another world size: checkpoint with use_reentrant=False"
            )
        self._added.add(position)
        if self.segment.world_size == 1:  # round as if the gradient were communicated
            grad = grad.to(self.plan.communicated)
        super().add(position, grad)

    def _start_reduction(self, target: Tensor, full: Tensor) -> NamedWork:
        if self.shard.is_empty and target.dtype is sum_dtype(full.dtype):
            return super()._start_reduction(target, full)
        if self.shard.is_empty:
            target.fill_(self._missing)
        return self._communicator.reduce_scatter(target, full, self.segment.index, is_added=True)


_MANTISSA_BITS = 24
_BIN_BITS = 2
_LEAST_EXPONENT, _LARGEST_EXPONENT = -160, 160
NUM_BINS = (_LARGEST_EXPONENT - _LEAST_EXPONENT) // _BIN_BITS
"""Number of bins. They cover [2**-161, 2**159): smaller powers count as 0, larger as infinite."""
_ROWS = 1024
"""Number of chunks that an accelerator reduces at once. It is fixed, because a kernel's order of
additions may depend on the shape."""


def chunk_norms(values: Tensor, p: float = 2.0) -> Tensor:
    """Return the ``p``-norm of each chunk of 1-D ``values``, in fp32 (float64 for float64)."""
    rows, dtype = values.view(-1, CHUNK_NUMEL), sum_dtype(values.dtype)
    parts = [rows] if values.is_cpu else [*torch.split(rows, _ROWS)]
    missing = 0 if values.is_cpu else -len(rows) % _ROWS  # a CPU reduces each row by itself
    if missing:
        parts[-1] = torch.nn.functional.pad(parts[-1], (0, 0, 0, missing))
    norms = [torch.linalg.vector_norm(part, p, dim=1, dtype=dtype) for part in parts]
    return torch.cat(norms)[: len(rows)]


def bin_powers(norms: Tensor, p: float = 2.0) -> Tensor:
    """Return the sums of the chunks' ``norms ** p`` by bin: [NUM_BINS], float64.

    The results of several ranks may be added in any order.
    """
    powers = norms.to(torch.float64).pow(p)
    mantissa, exponent = torch.frexp(powers)
    place = exponent - _LEAST_EXPONENT
    index = place.div(_BIN_BITS, rounding_mode="floor").clamp(0, NUM_BINS - 1)
    whole = (mantissa * 2.0**_MANTISSA_BITS).round()
    whole = torch.ldexp(whole, place.remainder(_BIN_BITS))
    whole = torch.where((place < 0) & powers.isfinite(), 0.0, whole)
    whole = torch.where(place >= NUM_BINS * _BIN_BITS, torch.inf, whole)
    bins = torch.zeros(NUM_BINS, dtype=torch.float64, device=norms.device)
    return bins.index_add_(0, index.long(), whole)


def sum_bins(bins: Tensor) -> Tensor:
    """Return the sum that the ``bins`` of `bin_powers` represent: 0-dim, float64."""
    first = 2.0 ** (_LEAST_EXPONENT - _MANTISSA_BITS)
    scale = torch.arange(NUM_BINS, dtype=torch.float64, device=bins.device)
    return (bins * torch.ldexp(torch.full_like(scale, first), scale * _BIN_BITS)).sum()


class Invariant(Arithmetic):
    """Arithmetic with equal bits at each world size: [Note: one norm for any world size]."""

    num_sums = NUM_BINS
    grads_class = SequentialGrads

    def check(self, config: Config, communicator: Communicator, ranks: Ranks) -> None:
        if not isinstance(communicator.transport, AddingCollectives):
            raise ConfigError(
                "world_size_invariant needs collectives with reduce_add, as of zero_core.protocols."
                f"AddingCollectives: {type(communicator.transport).__name__} has none"
            )
        offload = config.zero_optimization.offload_optimizer
        is_split = offload.device_budget is not None or offload.ratio not in (0.0, 1.0, None)
        if offload.device != "none" and is_split and ranks.device.type != "cpu":
            raise ConfigError(
                f"world_size_invariant on {ranks.device.type} with a part of the optimizer on the "
                "host: host and device differ by units in the last place, and each world size has "
                "the border elsewhere. Set zero_optimization.offload_optimizer.ratio to 0 or 1, or "
                "name the host's parameters in offload_optimizer.parameters"
            )

    @staticmethod
    def measure(values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        return chunk_norms(values, p)

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        return None

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        assert not squares, "the engine adds up gradients, not the tier"
        return bin_powers(torch.cat([*norms]))

    def finish(self, sums: Tensor) -> None:
        sums[0] = sum_bins(sums)

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        if math.isinf(p):
            return super().over_ranks([norm.max() for norm in norms], p, control)
        bins = control.sum(bin_powers(torch.cat([*norms]), p))
        return math.pow(float(sum_bins(bins)), 1.0 / p)


def arithmetic_of(config: Config) -> Arithmetic:
    return Invariant() if config.world_size_invariant else Arithmetic()
