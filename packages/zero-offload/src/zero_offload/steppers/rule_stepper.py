"""Update by one fused kernel: a single pass over each run of pieces, whatever memory it is in.

ZeRO-Offload (arXiv 2101.06840, section 5) moves the optimizer to the host and makes it fast there.
The kernel reads the gradient in the dtype it left the device in, updates master weights and state,
and writes the rounded parameters in the same pass, so that no separate unscale or cast pass reads
host memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, plan_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.rules.rule import KERNEL_DTYPES, MASTER
from zero_offload.steppers.block_layout import Block
from zero_offload.steppers.block_store import BlockStore
from zero_offload.steppers.stepper import Chunk, Stepper, check_num_steps


def can_serve(geometry: Geometry) -> bool:
    """Return whether every shard has a dtype that kernels read and write."""
    return all(tensor.dtype in KERNEL_DTYPES for _, tensor in geometry.shards)


class RuleStepper(Stepper):
    """Stepper whose update is a `Rule`, over a store in host memory or in a file.

    Args:
        store: master weights and state.
        groups: the optimizer's ``param_groups``, for the initial values of states.
    """

    has_kernel = True

    def __init__(self, store: BlockStore, groups: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(store.geometry, torch.device("cpu"))
        self.file = store.file
        self._store = store
        self._rule = rule = store.rule
        self._initial = [{name: rule.initial(name, g) for name in rule.states} for g in groups]
        with torch.no_grad():
            for i in range(len(self.geometry.pieces)):
                self._fill(i, is_fresh=True)

    @property
    def is_in_place(self) -> bool:
        """Whether the shards are the master weights."""
        return self._store.is_in_place

    @property
    def master_bytes(self) -> int:
        """Bytes of the master weights, including shards that are their own."""
        return self._store.master_bytes

    @property
    def master_copy_bytes(self) -> int:
        """Bytes of the master weights that are not the memory of a shard."""
        return self._store.master_copy_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the elementwise state."""
        return self._store.state_bytes

    def _fill(self, piece: int, *, is_fresh: bool) -> None:
        """Write the initial values of a piece's states. Fresh storage is zero already."""
        span = self.geometry.pieces[piece]
        for name, value in self._initial[span.group].items():
            if value or not is_fresh:
                first = torch.full((span.stop - span.start,), value, device="cpu")
                self.write(name, span.start, first)

    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """Merge pieces with equal settings into runs, and let the store divide them."""
        pieces = self.geometry.pieces
        keys: dict[int, Hashable] = {
            i: self._rule.hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active
        }
        runs = plan_runs(self.geometry, active, keys)
        for run in runs:
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
        return self._store.chunks(runs)

    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """Call the kernel once per span of gradient memory, or once per block of the rule."""
        taken: dict[int, dict[str, Tensor]] = {}
        for run in chunk.runs:
            rounded = None if self.is_in_place else out(run.start, run.stop)
            for index, start, stop in self._store.layout.overlaps(run.start, run.stop):
                block = self._store.layout.blocks[index]
                if index not in taken:
                    taken[index] = self._store.take(index)
                for a, b, grad in _grads_of(block, start, stop, grads):
                    stored = block.clip(taken[index], a, b)
                    block.rule.update(
                        stored.pop(MASTER, None),
                        grad if grad.dtype in KERNEL_DTYPES else grad.float(),
                        stored,
                        run.key,
                        grad_scale,
                        None if rounded is None else rounded[a - run.start : b - run.start],
                    )
        for index in taken:
            self._store.put(index)

    def settle(self) -> None:
        """Complete the transfers of a step."""
        self._store.settle()

    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the rule's states in the dtypes that a checkpoint holds."""
        return self._rule.states

    def master(self, start: int, stop: int) -> Tensor:
        """Return master weights of a range inside one shard."""
        return self._store.master(start, stop)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of a state or of the master weights."""
        return self._store.read(name, start, stop)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a state or the master weights."""
        self._store.write(name, start, values)

    def read_scalars(self, piece: int) -> dict[str, float]:
        """Return the count, also under the name that torch's optimizer has for it, if any."""
        count = self.num_steps[piece]
        own = dict.fromkeys(self._rule.scalars, float(count)) if count else {}
        return {"num_steps": count, **own}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the count. Torch's ``step`` beside it is the same number."""
        count = check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(
                f"{type(self._rule).__name__} has no scalars {unknown}; the state is another "
                f"optimizer's"
            )
        if count == 0:
            self._fill(piece, is_fresh=False)
        self.num_steps[piece] = count


def _grads_of(
    block: Block, start: int, stop: int, grads: GradLedger
) -> list[tuple[int, int, Tensor]]:
    """The span and gradient of each call of the block's rule."""
    if block.rule.block == 1:
        return grads.segments(start, stop)
    return [(start, stop, grads.joined(start, stop))]
