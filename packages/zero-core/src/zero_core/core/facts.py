"""Facts of a step: numbers that one all-reduce sums over the ranks.

[Note: one synchronisation]
The facts are one vector on the device, made of named slots. The last slot holds the sums of the
gradient's squares. On an accelerator, the host uploads its facts from pinned memory. One all-reduce
sums the vectors of all ranks, and the sum is copied back to pinned memory, followed by an event.
None of these operations blocks the host, which waits for the event only when it reads the sum.
Kernels on the device may read the sum earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zero_core.comm.communicator import Communicator
from zero_core.comm.meter import FACTS, Meter
from zero_core.core.grads import Arithmetic

NUM_WORDS = 3
"""Number of 16-bit words in a hash."""
_HASH, _SQUARED_HASH, _SUMS, _DAMAGED = "hash", "squares of the hash", "sums", "damaged"
_VOIDING = "unreduced", "written", _DAMAGED


def _sizes(num_params: int, num_units: int, arithmetic: Arithmetic) -> dict[str, int]:
    numbers = dict.fromkeys((*_VOIDING, "with gradient"), 1)
    hashed = {_HASH: NUM_WORDS, _SQUARED_HASH: NUM_WORDS}
    marks = {"used": num_params, "left out": num_units}
    return {**numbers, **hashed, **marks, _SUMS: arithmetic.num_sums}


def facts_nbytes(num_params: int, num_units: int, arithmetic: Arithmetic) -> int:
    """Return the size in bytes of a step's facts, which one all-reduce sums over the ranks."""
    return sum(_sizes(num_params, num_units, arithmetic).values()) * torch.float64.itemsize


class Facts:
    """One float64 vector per step. See [Note: one synchronisation]."""

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        num_params: int,
        num_units: int,
        meter: Meter,
        arithmetic: Arithmetic,
    ) -> None:
        self._communicator = communicator
        self._device = device
        self._meter = meter
        self._arithmetic = arithmetic
        self._slots: dict[str, slice] = {}
        numel = 0
        for name, size in _sizes(num_params, num_units, arithmetic).items():
            self._slots[name] = slice(numel, numel := numel + size)
        self._slots["voiding"] = slice(0, len(_VOIDING))
        self._has_stream = device.type != "cpu"
        self._sent = torch.zeros(numel, dtype=torch.float64, pin_memory=self._has_stream)
        self._total = torch.zeros(numel, dtype=torch.float64, device=device)
        self._read = self._sent.clone().pin_memory() if self._has_stream else self._total
        self._event: torch.Event | None = None  # end of a copy to the host not yet awaited
        self.is_known = False  # whether the host has read the sum

    def begin(self) -> None:
        """Set all slots to 0 for a new step."""
        self._wait()  # an earlier upload may still read ``_sent``
        self._sent.zero_()

    def put(self, name: str, number: float) -> None:
        """Set a slot of one element."""
        self._sent[self._slots[name]] = float(number)

    def mark(self, name: str, positions: Collection[int]) -> None:
        """Set the elements at ``positions`` of a slot to 1."""
        if positions:
            self._sent[self._slots[name]][torch.tensor(sorted(positions))] = 1.0

    def put_hash(self, words: Sequence[float]) -> None:
        """Set a hash of data that must be equal on all ranks: see `zero_core.step.update`."""
        hashed = torch.tensor(words, dtype=torch.float64)
        self._sent[self._slots[_HASH]] = hashed
        self._sent[self._slots[_SQUARED_HASH]] = hashed.square()

    def start_sum(self, square_sums: Tensor) -> None:
        """Start the all-reduce of the facts. All ranks must call it.

        ``square_sums``: as returned by `Arithmetic.add_squares`.
        """
        total = self._total
        total.copy_(self._sent, non_blocking=True)
        total[self._slots[_SUMS]] = square_sums
        checks = self._communicator.checks
        if checks is not None and (damaged := checks.num_damaged()) is not None:
            total[self._slots[_DAMAGED]] = damaged
        self._meter.add("all_reduce", FACTS, self._meter.links.all_reduce(total.nbytes))
        self._communicator.sum_statistics(total)
        self._arithmetic.finish(total[self._slots[_SUMS]])
        if self._has_stream:
            self._read.copy_(total, non_blocking=True)
            self._event = torch.accelerator.current_stream(self._device).record_event()
        self.is_known = False

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None  # not earlier, because Ctrl-C may interrupt the wait

    def counts(self, name: str) -> list[float]:
        """Return each element of a slot, summed over the ranks."""
        found: list[float] = self._known(name).tolist()
        return found

    def is_any(self, name: str) -> bool:
        """Return whether some rank has put a number > 0 into a slot of one element."""
        return bool(self._known(name) > 0)

    def is_unanimous(self, name: str) -> bool:
        counts = self._known(name)
        return bool(((counts == 0) | (counts == self._communicator.world_size)).all())

    @property
    def is_void(self) -> bool:
        """Whether the step cannot be applied as it is: see `device_is_void`."""
        self._known("voiding")  # waits for the sum
        return bool(self._is_void_in(self._read))

    @property
    def is_hash_agreed(self) -> bool:
        return bool(self._has_one_hash(self._known(_HASH), self._known(_SQUARED_HASH)))

    @property
    def square_sum(self) -> float:
        """Square of the gradient's 2-norm, with the gradient still multiplied by the loss scale."""
        return float(self._known(_SUMS)[0])

    def _known(self, name: str) -> Tensor:
        self._wait()
        self.is_known = True
        return self._read[self._slots[name]]

    @property
    def device_square_sum(self) -> Tensor:
        """`square_sum` on the device: 0-dim, float64."""
        return self._total[self._slots[_SUMS].start]

    @property
    def device_is_void(self) -> Tensor:
        """Whether the step cannot be applied as it is, computed on the device: 0-dim, bool.

        True for unreduced gradients, written parameters, damaged messages, or different hashes.
        """
        return self._is_void_in(self._total)

    def _is_void_in(self, total: Tensor) -> Tensor:
        slots = self._slots
        has_one_hash = self._has_one_hash(total[slots[_HASH]], total[slots[_SQUARED_HASH]])
        return total[slots["voiding"]].any() | ~has_one_hash

    def _has_one_hash(self, sums: Tensor, squares: Tensor) -> Tensor:
        return (sums.square() == squares * self._communicator.world_size).all()
