"""An update rule by one fused kernel: a single pass over host memory for each run of pieces.

ZeRO-Offload (arXiv 2101.06840, section 5) moves the optimizer to the host and makes it fast there.
The kernel reads the gradient in the dtype it left the device in, updates master weights and state,
and writes the rounded parameters in the same pass, so that no separate unscale or cast pass reads
host memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, Run, cut_runs, plan_runs
from zero_offload.grads import GradLedger
from zero_offload.rule_stepper import RuleStepper
from zero_offload.rules import MASTER, Rule
from zero_offload.stepper import Chunk
from zero_offload.store import ShardStore

__all__ = ["KERNEL_DTYPES", "KernelStepper", "can_serve", "joined_grad"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_serve(geometry: Geometry) -> bool:
    """Whether every shard has a dtype that kernels read and write."""
    return all(tensor.dtype in KERNEL_DTYPES for _, tensor in geometry.shards)


class KernelStepper(RuleStepper):
    """A `Rule` over host memory, one kernel call per run, or per piece if it counts blocks.

    Args:
        geometry: the flat space; shards of fp32, bf16 or fp16.
        rule: the update.
        groups: the optimizer's ``param_groups``, for what states hold at first.
        is_in_place: see `Stepper`.
        upper: host memory for the parameters of a range inside one shard, which lasts as long as
            the stepper: a split master weight has its upper half there. The shards themselves by
            default.
    """

    def __init__(
        self,
        geometry: Geometry,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        *,
        is_in_place: bool,
        upper: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        # What rests elsewhere is no place for the upper half of a split master weight.
        shards = [shard for _, shard in geometry.shards]
        rules = [rule if t.is_meta else rule.for_params(t.dtype) for t in shards]
        split = {i for i, own in enumerate(rules) if own.is_master_split}
        super().__init__(geometry, rule, groups, is_in_place=is_in_place, split=split)
        self._upper = geometry.view if upper is None else upper
        self._stores = [
            ShardStore(own, self._spans(i, own), self._upper) for i, own in enumerate(rules)
        ]
        for i in split:
            start, shard = geometry.shards[i]
            self._upper(start, start + shard.numel()).copy_(shard)
        for i in range(len(geometry.pieces)):
            self._fill(i, is_fresh=True)

    def _spans(self, shard: int, rule: Rule) -> list[tuple[int, int]]:
        if rule.block == 1:
            start, tensor = self.geometry.shards[shard]
            return [(start, start + tensor.numel())]
        owners = zip(self.geometry.pieces, self.geometry.piece_shards, strict=True)
        return [(piece.start, piece.stop) for piece, owner in owners if owner == shard]

    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """One chunk per run of pieces with equal settings."""
        keys = self._settings(active, groups)
        chunks = []
        runs = plan_runs(self.geometry, active, keys)
        for run in cut_runs(runs) if self._rule.block == 1 else runs:
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
            chunks.append(Chunk((run,), keys[run.pieces[0]]))
        return chunks

    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """One kernel call per stretch of gradient memory, or per piece."""
        (run,) = chunk.runs
        store = self._stores[self.geometry.piece_shards[run.pieces[0]]]
        is_split = store.rule.is_master_split
        rounded = None if self.is_in_place or is_split else out(run.start, run.stop)
        for a, b, grad in self._stretches(run, store.rule, grads):
            store.rule.update(
                None if is_split else self.master(a, b),
                grad if grad.dtype in KERNEL_DTYPES else grad.float(),
                store.views(a, b),
                chunk.settings,
                grad_scale,
                None if rounded is None else rounded[a - run.start : b - run.start],
            )

    def _stretches(self, run: Run, rule: Rule, grads: GradLedger) -> list[tuple[int, int, Tensor]]:
        """What each call updates, with its gradient."""
        if rule.block == 1:
            return grads.segments(run.start, run.stop)
        spans = [(self.geometry.pieces[i].start, self.geometry.pieces[i].stop) for i in run.pieces]
        return [(a, b, joined_grad(grads, a, b)) for a, b in spans]

    def master(self, start: int, stop: int) -> Tensor:
        """See `Stepper.master`."""
        store = self._stores[self.geometry.shard_at(start)]
        if store.rule.is_master_split:
            return self._upper(start, stop)
        return super().master(start, stop)

    def read_master(self, start: int, stop: int) -> Tensor:
        """See `Stepper.read_master`; halves are joined. Padding has no lower half."""
        values = super().read_master(start, stop)
        for store in self._stores:
            if store.rule.is_master_split:
                store.read(MASTER, values, start)
        return values

    def write_master(self, start: int, values: Tensor) -> None:
        """See `Stepper.write_master`."""
        super().write_master(start, values)
        for store in self._stores:
            if store.rule.is_master_split:
                store.write(MASTER, values, start)

    @property
    def master_bytes(self) -> int:
        """See `Stepper.master_bytes`."""
        pairs = zip(self.geometry.shards, self._stores, strict=True)
        upper = sum(shard.nbytes for (_, shard), store in pairs if store.rule.is_master_split)
        lower = sum(store.num_bytes(is_master=True) for store in self._stores)
        return super().master_bytes + upper + lower

    @property
    def state_bytes(self) -> int:
        """See `Stepper.state_bytes`."""
        return sum(store.num_bytes(is_master=False) for store in self._stores)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Stepper.read`."""
        values = torch.zeros(stop - start, dtype=self._rule.states[name], device="cpu")
        for store in self._stores:
            store.read(name, values, start)
        return values

    def write(self, name: str, start: int, values: Tensor) -> None:
        """See `Stepper.write`."""
        for store in self._stores:
            store.write(name, values, start)


def joined_grad(grads: GradLedger, start: int, stop: int) -> Tensor:
    """The gradient of a piece in one stretch of memory; in fp32 if its parts differ in dtype."""
    dtypes = {part.dtype for _, _, part in grads.segments(start, stop)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return grads.gather(start, stop, dtype, 1.0)
