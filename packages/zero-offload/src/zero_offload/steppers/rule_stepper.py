"""Update by one fused kernel: a single pass over each run of pieces, whatever memory it is in.

ZeRO-Offload (arXiv 2101.06840, section 5) moves the optimizer to the host and makes it fast there.
The kernel reads the gradient in the dtype it left the device in, updates master weights and state,
and writes the rounded parameters in the same pass, so that no separate unscale or cast pass reads
host memory again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run, plan_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.protocols import Groups
from zero_offload.rules.rule import KERNEL_DTYPES, MASTER, Rule
from zero_offload.steppers.block_layout import Block, BlockLayout
from zero_offload.steppers.stepper import Chunk, Stepper, check_num_steps


class RuleStepper(Stepper):
    """Stepper whose update is a `Rule`. A subclass has the blocks in its memory.

    Args:
        rule: the update, before its ``for_params``.
        groups: the optimizer's ``param_groups``, for the initial values of states.
    """

    has_kernel = True

    def __init__(self, geometry: Geometry, rule: Rule, layout: BlockLayout, groups: Groups) -> None:
        super().__init__(geometry, torch.device("cpu"))
        self.rule = rule
        self.layout = layout
        self.states = rule.states
        self._initial = [{name: rule.initial(name, g) for name in rule.states} for g in groups]

    @abstractmethod
    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        """Divide a step into chunks, whose blocks are then taken in this order."""

    @abstractmethod
    def take(self, index: int) -> dict[str, Tensor]:
        """Return the buffers of a block, the caller's until `put`."""

    @abstractmethod
    def put(self, index: int) -> None:
        """Store the updated buffers of a block that was taken."""

    @torch.no_grad()
    def fill_fresh(self) -> None:
        """Write the initial values of all states. To be called once there is memory."""
        for i in range(len(self.geometry.pieces)):
            self._fill(i, is_fresh=True)

    def _fill(self, piece: int, *, is_fresh: bool) -> None:
        """Write the initial values of a piece's states. Fresh storage is zero already."""
        span = self.geometry.pieces[piece]
        for name, value in self._initial[span.group].items():
            if value or not is_fresh:
                first = torch.full((span.stop - span.start,), value, device="cpu")
                self.write(name, span.start, first)

    def plan(self, active: Sequence[int], groups: Groups, grads: GradLedger) -> list[Chunk]:
        """Merge pieces with equal settings into runs, and divide these into chunks."""
        pieces = self.geometry.pieces
        keys: dict[int, Hashable] = {
            i: self.rule.hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active
        }
        runs = plan_runs(self.geometry, active, keys)
        for run in runs:
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
        return self.chunks(runs)

    def update(
        self, chunk: Chunk, grads: GradLedger, grad_scale: float, out: Callable[[int, int], Tensor]
    ) -> None:
        """Call the kernel once per span of gradient memory, or once per block of the rule."""
        taken: dict[int, dict[str, Tensor]] = {}
        for run in chunk.runs:
            rounded = None if self.is_in_place else out(run.start, run.stop)
            for index, start, stop in self.layout.overlaps(run.start, run.stop):
                block = self.layout.blocks[index]
                if index not in taken:
                    taken[index] = self.take(index)
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
            self.put(index)

    def read_scalars(self, piece: int) -> dict[str, float]:
        """Return the count, also under the name that torch's optimizer has for it, if any."""
        count = self.num_steps[piece]
        own = dict.fromkeys(self.rule.scalars, float(count)) if count else {}
        return {"num_steps": count, **own}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the count. Torch's ``step`` beside it is the same number."""
        count = check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(
                f"{type(self.rule).__name__} has no scalars {unknown}; the state is another "
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
