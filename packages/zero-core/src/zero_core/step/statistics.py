"""Statistics of a step's gradient that all ranks agree on, with one reading by the host.

[Note: one synchronisation]
Square sums, flags and counts are one vector on the device. What the host knows of them is uploaded
from page-locked memory, all ranks' vectors are summed by one all-reduce, and the sum is copied back
to page-locked memory, followed by an event. None of it blocks the host: it waits for the event when
it reads. Meanwhile kernels may read the sum on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zero_core.comm.communicator import Communicator
from zero_core.comm.meter import FACTS, Meter
from zero_core.sharded.norms import Norms
from zero_core.step.agreement import NUM_WORDS

_UNREDUCED, _TAIL_LATE, _WITH_GRAD, _WRITTEN, _HASH = range(5)
_SQUARES = _HASH + NUM_WORDS
_FIRST_PARAM = _SQUARES + NUM_WORDS


def statistics_nbytes(num_params: int, num_units: int, norms: Norms) -> int:
    """Return the bytes that are summed over the ranks in a step of such a model."""
    return (_FIRST_PARAM + num_params + num_units + norms.num_sums) * torch.float64.itemsize


class GradientStatistics:
    """One float64 vector per step: flags, counts of ranks, and sums of the gradient's squares."""

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        num_params: int,
        num_units: int,
        meter: Meter,
        norms: Norms,
    ) -> None:
        """``norms`` are those of the gradient, whose sums the vector has."""
        self._communicator = communicator
        self._device = device
        self._meter = meter
        self._has_stream = device.type != "cpu"
        self._first_unit = _FIRST_PARAM + num_params
        self._first_sum = self._first_unit + num_units
        self._norms = norms
        numel = self._first_sum + norms.num_sums
        self._sent = torch.zeros(numel, dtype=torch.float64, pin_memory=self._has_stream)
        self._total = torch.zeros(numel, dtype=torch.float64, device=device)
        self._read = self._total
        if self._has_stream:
            self._read = torch.zeros(numel, dtype=torch.float64, pin_memory=True)
        self._event: torch.Event | None = None  # of a copy to the host that it has not read
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """Whether the host has read the sum."""
        return self._is_known

    def agree(
        self,
        square_sums: Tensor,
        params: Collection[int],
        *,
        has_unreduced: bool,
        is_tail_late: bool,
        left_out: Collection[int],
        num_written: int = 0,
        words: Sequence[float] = (0.0,) * NUM_WORDS,
    ) -> None:
        """Start to sum the statistics over all ranks. Every rank must call it.

        Args:
            square_sums: of this rank's shards, on the device: see `Norms.add_squares`.
            params: numbers of the parameters with a gradient on this rank.
            has_unreduced: whether this rank has gradients that no reduction has carried.
            is_tail_late: whether this rank had a block's gradients before the tail's.
            left_out: units that needed no gradient on this rank.
            num_written: parameters that programs have written: see `zero_core.sharded.edits`.
            words: hash of what must be equal on all ranks: see `zero_core.step.agreement`.
        """
        self._wait()  # the upload of sums that nobody has read
        sent, total = self._sent, self._total
        sent.zero_()
        sent[_UNREDUCED] = float(has_unreduced)
        sent[_TAIL_LATE] = float(is_tail_late)
        sent[_WITH_GRAD] = float(bool(params))
        sent[_WRITTEN] = num_written
        hashed = torch.tensor(words, dtype=torch.float64)
        sent[_HASH:_SQUARES] = hashed
        sent[_SQUARES:_FIRST_PARAM] = hashed.square()
        if params:
            sent[_FIRST_PARAM + torch.tensor(sorted(params))] = 1.0
        if left_out:
            sent[self._units][torch.tensor(sorted(left_out))] = 1.0
        total.copy_(sent, non_blocking=True)
        total[self._first_sum :] = square_sums
        self._meter.add_all_reduce(FACTS, total.nbytes)
        self._communicator.sum_statistics(total)
        self._norms.finish(total[self._first_sum :])
        if self._has_stream:
            self._read.copy_(total, non_blocking=True)
            self._event = torch.accelerator.current_stream(self._device).record_event()
        self._is_known = False

    @property
    def _units(self) -> slice:
        return slice(self._first_unit, self._first_sum)

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None  # not before: Ctrl-C may come meanwhile

    # ------------------------------------------------------------ on the host

    @property
    def square_sum(self) -> float:
        """Square of the gradient's 2-norm, loss scale included."""
        return float(self._known()[self._first_sum])

    @property
    def has_unreduced(self) -> bool:
        """Whether any rank has gradients that no reduction has carried."""
        return bool(self._known()[_UNREDUCED] > 0)

    @property
    def is_tail_late(self) -> bool:
        """Whether any rank had a block's gradients before the tail's."""
        return bool(self._known()[_TAIL_LATE] > 0)

    @property
    def is_left_out_agreed(self) -> bool:
        """Whether all ranks have the same ``left_out``. All ranks get the same answer."""
        counts = self._known()[self._units]
        return bool(((counts == 0) | (counts == self._communicator.world_size)).all())

    @property
    def is_hash_agreed(self) -> bool:
        """Whether all ranks have the same ``words``. All ranks get the same answer."""
        return bool(self._has_one_hash(self._known()))

    @property
    def is_any_written(self) -> bool:
        """Whether a program has written a parameter on any rank: see `zero_core.sharded.edits`."""
        return bool(self._known()[_WRITTEN] > 0)

    @property
    def num_active_ranks(self) -> int:
        """Number of ranks with a gradient of any parameter: the others had no data."""
        return int(self._known()[_WITH_GRAD])

    @property
    def num_ranks_with_grad(self) -> list[float]:
        """Number of ranks with a gradient of each parameter."""
        found: list[float] = self._known()[_FIRST_PARAM : self._first_unit].tolist()
        return found

    def _known(self) -> Tensor:
        self._wait()
        self._is_known = True
        return self._read

    # ---------------------------------------------------------- on the device

    @property
    def device_square_sum(self) -> Tensor:
        """`square_sum` as it is on the device: 0-dim, float64."""
        return self._total[self._first_sum]

    @property
    def device_is_void(self) -> Tensor:
        """Whether the host has more to do before the update, as on the device: 0-dim, bool.

        That is `has_unreduced`, `is_any_written`, or not `is_hash_agreed`.
        """
        is_late = (self._total[_UNREDUCED] > 0) | (self._total[_WRITTEN] > 0)
        return is_late | ~self._has_one_hash(self._total)

    def _has_one_hash(self, total: Tensor) -> Tensor:
        sums, squares = total[_HASH:_SQUARES], total[_SQUARES:_FIRST_PARAM]
        return (sums.square() == squares * self._communicator.world_size).all()
