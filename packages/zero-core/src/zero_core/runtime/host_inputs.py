"""Tensors of an accelerator that wait in host memory: inputs of blocks from forward to backward.

The vertical schedule has gradients of tied weights wait there as well.

[Note: two streams and one call ahead]
An input is copied down beside the block that computes with it, and up beside the block before which
it is needed: each direction has a stream of its own, and the host waits for neither. When backward
asks for the inputs of a call, those of the call that it needs next are fetched, too. That is the
call before it. With the vertical schedule (`zero_core.vertical.schedule`) it is the same block's
call for the next micro-batch, and after the last one the block before for the first.
Device memory of an input that a stream still reads is noted with ``record_stream``, as is that of
one that was fetched in vain. A host buffer is lent again when nothing holds what was packed any
more. The copy down into it waits for the last copy up.

[Note: page-locked memory]
Torch page-locks powers of two of bytes. Buffers are cut out of larger pieces, of as many buffers as
fill a power of two best: three of 84 MB in 256 MiB.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

MAX_IN_PIECE = 8
"""Buffers that are page-locked at a time, at most."""
_MAX_IDLE = 1024
"""Calls after which the buffers of a size are dropped that none of them asked for."""
_ALIGNMENT = 256
"""Bytes to which buffers are aligned."""


class HostCopy:
    """A tensor's values on the host. It returns its buffer when it is dropped."""

    def __init__(
        self, copies: HostCopies, buffer: Tensor, values: Tensor, copied: torch.Event
    ) -> None:
        self._copies = copies
        self._buffer = buffer
        self.values = values  # in the buffer, in the tensor's shape and dtype
        self.last_copy = copied  # the copy down, or the last copy up
        self.fetched: Tensor | None = None  # the values on the device, until they are used
        self.is_fetched = False  # whether they were fetched at all

    def __del__(self) -> None:
        self._copies.release(self._buffer, self.last_copy, self.fetched)


def page_locked_bytes(nbytes: int, number: int, most: int = MAX_IN_PIECE) -> int:
    """Return the bytes that torch page-locks for ``number`` buffers, ``most`` at a time."""
    if not nbytes:
        return 0
    size = _aligned(nbytes)
    count = _num_in_piece(size, most)
    return -(-number // count) * _power_of_two(count * size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _num_in_piece(size: int, most: int) -> int:
    """Return how many buffers of ``size`` fill a power of two best."""
    return max(range(1, most + 1), key=lambda n: n * size / _power_of_two(n * size))


def _power_of_two(nbytes: int) -> int:
    """Return the next power of two."""
    return 1 << (nbytes - 1).bit_length()


class HostCopies:
    """Copies tensors of an accelerator to page-locked host memory and back, on two streams."""

    def __init__(self, device: torch.device) -> None:
        """For tensors on ``device``, an accelerator."""
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        # Page-locked buffers of the sizes that were asked for lately.
        self._free: dict[int, list[tuple[Tensor, torch.Event | None]]] = {}  # by bytes
        self._last_use: dict[int, int] = {}  # by bytes, as a number of the call
        self._num_calls = 0

    def _acquire(self, nbytes: int, most: int) -> tuple[Tensor, torch.Event | None]:
        """Borrow a buffer of ``nbytes``, of ``most`` in a piece, and the copy to wait for."""
        size = _aligned(nbytes)
        self._num_calls += 1
        self._last_use[size] = self._num_calls
        free = self._free.setdefault(size, [])
        if not free:
            # Sizes that nobody asks for any more are dropped. Torch waits for their copies under
            # way. A list, as autograd's threads return buffers at any time.
            last_use = list(self._last_use.items())
            for idle, call in last_use:
                if self._num_calls - call > _MAX_IDLE:
                    del self._last_use[idle]
                    self._free.pop(idle, None)
            count = _num_in_piece(size, most)
            with torch.inference_mode(False):  # it serves training too
                piece = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
            free += [(piece[n * size : (n + 1) * size], None) for n in range(count)]
        return free.pop()

    def store(self, tensor: Tensor, most: int = MAX_IN_PIECE) -> HostCopy | None:
        """Begin to copy ``tensor`` down. None for one that is elsewhere, sparse or empty.

        The caller keeps its memory until `wait`, or until `record` takes care of that. ``most``:
        buffers of this size that are page-locked at a time, at most.
        """
        is_moved = tensor.device == self._device and tensor.layout is torch.strided
        if not is_moved or not tensor.numel():
            return None
        given = tensor.detach()
        buffer, last_copy = self._acquire(given.nbytes, min(most, MAX_IN_PIECE))
        values = buffer[: given.nbytes].view(given.dtype).view(given.shape)
        if last_copy is not None:
            self._down.wait_event(last_copy)
        self._down.wait_stream(torch.accelerator.current_stream(self._device))
        with self._down:
            values.copy_(given, non_blocking=True)
        return HostCopy(self, buffer, values, self._down.record_event())

    def record(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is stored until its copy has ended."""
        tensor.record_stream(self._down)

    def wait(self, stored: HostCopy) -> None:
        """Have the current stream wait for the last copy."""
        torch.accelerator.current_stream(self._device).wait_event(stored.last_copy)

    def fetch(self, stored: HostCopy) -> None:
        """Begin to copy the values up, unless that was begun before."""
        if not stored.is_fetched:
            stored.fetched, stored.is_fetched = self._copy_up(stored), True

    def take(self, stored: HostCopy) -> Tensor:
        """Return the values on the device. The current stream may read them."""
        found, stored.fetched = stored.fetched, None
        if found is None:
            found, stored.is_fetched = self._copy_up(stored), True
        self.wait(stored)
        return found

    def release(self, buffer: Tensor, last_copy: torch.Event, unused: Tensor | None) -> None:
        """Take a buffer back after its ``last_copy``. ``unused``: what was fetched in vain."""
        if unused is not None:
            unused.record_stream(self._up)
        # Its size may have been dropped while the buffer was lent.
        self._last_use.setdefault(buffer.nbytes, self._num_calls)
        self._free.setdefault(buffer.nbytes, []).append((buffer, last_copy))

    def _copy_up(self, stored: HostCopy) -> Tensor:
        fetched = torch.empty_like(stored.values, device=self._device)
        self._up.wait_event(stored.last_copy)
        # Its memory may have had other users.
        self._up.wait_stream(torch.accelerator.current_stream(self._device))
        with self._up:
            fetched.copy_(stored.values, non_blocking=True)
        stored.last_copy = self._up.record_event()
        return fetched


class _Call:
    """A block's call, whose ``stored`` inputs are fetched together."""

    def __init__(self, number: int) -> None:
        self.number = number  # among all calls, from 0 on
        self._stored: list[weakref.ref[HostCopy]] = []

    def add(self, stored: HostCopy) -> None:
        self._stored.append(weakref.ref(stored))

    @property
    def stored(self) -> list[HostCopy]:
        return [stored for ref in self._stored if (stored := ref()) is not None]


class HostInputs:
    """Moves what is saved within `context` to the host, and back. [Note: two streams ...]."""

    def __init__(self, device: torch.device) -> None:
        """For inputs on ``device``, an accelerator. Others stay where they are."""
        self.copies = HostCopies(device)
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
        self._num_calls = 0
        # The micro-batches of a vertical step, and the number of its first call.
        self._num_together, self._first = 1, 0

    def begin_turns(self, num_micro_batches: int) -> None:
        """Expect calls of each block for so many micro-batches, block by block."""
        self._num_together, self._first = num_micro_batches, self._num_calls

    def end_turns(self) -> None:
        """Expect backward in the opposite order of forward from now on."""
        self._num_together = 1

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of one call of a block."""
        call = self._calls[self._num_calls] = _Call(self._num_calls)
        self._num_calls += 1

        def pack(tensor: Tensor) -> tuple[HostCopy, _Call] | Tensor:
            stored = self.copies.store(tensor)
            if stored is None:
                return tensor
            self.copies.record(tensor)
            call.add(stored)
            return stored, call

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: tuple[HostCopy, _Call] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        found = self.copies.take(packed[0])
        for call in (packed[1], self._following(packed[1])):
            for stored in () if call is None else call.stored:
                self.copies.fetch(stored)
        return found

    def _following(self, call: _Call) -> _Call | None:
        """Return the call whose inputs backward needs next, if anything of it is still held."""
        if self._num_together == 1:
            return self._calls.get(call.number - 1)
        block, turn = divmod(call.number - self._first, self._num_together)
        if turn + 1 < self._num_together:
            return self._calls.get(call.number + 1)
        return self._calls.get(call.number + 1 - 2 * self._num_together) if block > 0 else None
