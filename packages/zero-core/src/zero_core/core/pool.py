"""Two kinds of memory that never interleave, so that there is nothing to fragment.

Long-lived memory (parameter shards, gradient shards, master weights, states) is laid out once, one
contiguous buffer per kind (`Arena`). Short-lived memory (gathered units, gradients before their
reduction) is borrowed from buffers that are all as large as the largest request (`BufferPool`).
This is the contiguous memory of ZeRO (arXiv 1910.02054, section 6.3) by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_core._torch import storage_of
from zero_core.layout.arithmetic import ParamSpec, Segment

Allocate = Callable[[int, torch.dtype], Tensor]
"""Allocates a 1-D tensor of a number of elements, uninitialised."""
Wait = Callable[[], object]
"""Waits until memory may be written to again."""


def allocator(device: torch.device) -> Allocate:
    """Return what allocates ordinary memory of ``device``."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


class CopyStream:
    """Stream of copies to a device, as a context: [Note: the copy stream] in `param_offload`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        has_streams = device.type not in ("cpu", "meta")
        self._stream = torch.Stream(device, priority=-1) if has_streams else None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)

    def after_readers(self) -> Wait | None:
        """Return what makes this stream wait for what the current stream holds by now."""
        if self._stream is None:
            return None
        event = torch.accelerator.current_stream(self._device).record_event()
        return partial(self._stream.wait_event, event)

    def follow(self) -> None:
        """Have this stream wait for what the current stream holds by now."""
        wait = self.after_readers()
        if wait is not None:
            wait()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory that this stream writes to and the current one reads."""
        tensor = torch.empty(numel, dtype=dtype, device=self._device)
        self.follow()  # the memory may have had other users
        return tensor

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Arena:
    """Long-lived memory on one device, allocated once: ``buffers`` by kind."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.buffers: dict[str, list[Tensor]] = {}

    def allocate(
        self, kind: str, wanted: Mapping[int, tuple[torch.dtype, int]]
    ) -> dict[int, Tensor]:
        """Allocate a buffer per dtype. Return 1-D views of ``wanted`` dtypes and lengths."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype for dtype, _ in wanted.values()):
            sizes = {key: numel for key, (of, numel) in wanted.items() if of == dtype}
            buffer = self._allocate(sum(sizes.values()), dtype)
            self.buffers.setdefault(kind, []).append(buffer)
            found |= zip(sizes, torch.split(buffer, list(sizes.values())), strict=True)
        return found

    def report(self) -> dict[str, int]:
        """Bytes by kind. An emptied storage has none."""
        return {
            kind: sum(min(b.nbytes, b.untyped_storage().nbytes()) for b in buffers)
            for kind, buffers in self.buffers.items()
        }


class BufferPool:
    """Equally large buffers, borrowed as any dtype and returned.

    A borrower fills a buffer from the stream that its last reader ran on (a collective first waits
    for the stream that launches it). `release` is given what other readers are to be waited for.

    Each user gets the buffer that it had the last time, if that is free: where steps are alike, a
    user's memory has one address, as CUDA graphs need it. What is lent depends on the order of the
    calls alone, not on which copies have ended: a plan can count the buffers.
    """

    def __init__(
        self,
        allocate: Allocate,
        buffer_bytes: int,
        *,
        num_spare: int = 0,
        queue: CopyStream | None = None,
    ) -> None:
        """Make a pool. Buffers are allocated when first needed.

        ``num_spare`` free buffers are kept in reserve, so that a pending copy can finish before its
        buffer is reused. ``queue`` fills buffers, too, and waits for the stream that released them.
        """
        self._queue = queue
        self._num_spare = num_spare
        self._allocate = allocate
        self.buffer_bytes = buffer_bytes
        self._all: dict[int, Tensor] = {}  # by address
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by address, elements, dtype
        self._free: dict[int, Wait | None] = {}  # by address; first what has been free longest
        self._last: dict[Hashable, int] = {}  # address by user

    def acquire(self, numel: int, dtype: torch.dtype, user: Hashable) -> Tensor:
        """Borrow a 1-D view of ``numel`` elements of a free buffer. Contents undefined.

        ``user`` stands for what is kept in it, the same in each step.
        """
        if len(self._free) > self._num_spare:
            address = self._last.get(user, 0)
            if address not in self._free:
                address = next(iter(self._free))
            readers = self._free.pop(address)
            if readers is not None:
                readers()
        else:
            address = self._add_buffer()
        self._last[user] = address
        view = self._views.get((address, numel, dtype))
        if view is None:
            nbytes = numel * dtype.itemsize
            assert nbytes <= self.buffer_bytes, "the pool was made for smaller requests"
            with torch.inference_mode(False):
                view = self._all[address][:nbytes].view(dtype)
            self._views[address, numel, dtype] = view
        return view

    def _add_buffer(self) -> int:
        with torch.inference_mode(False):  # it serves training too
            buffer = self._allocate(self.buffer_bytes, torch.uint8)
        address = buffer.data_ptr()
        self._all[address] = buffer
        return address

    def reserve(self, num_buffers: int) -> None:
        """Allocate buffers now, until there are ``num_buffers``."""
        while len(self._all) < num_buffers and self.buffer_bytes:
            self._free[self._add_buffer()] = None

    def free(self, *, keep: int = 0) -> None:
        """Free unused buffers, but keep ``keep`` in all, those used last."""
        for address, readers in list(self._free.items()):
            if len(self._all) <= keep:
                return
            if not self._all[address].untyped_storage().resizable():
                continue  # held by the collectives, for other ranks too
            if readers is not None:
                readers()
            del self._all[address], self._free[address]
            for key in [key for key in self._views if key[0] == address]:
                del self._views[key]

    def release(self, view: Tensor, readers: Wait | None = None) -> None:
        """Return what was borrowed. Before it is lent again, ``readers`` are waited for."""
        address = view.data_ptr()
        assert address in self._all, "it was borrowed from another pool"
        if self._queue is not None:
            assert readers is None, "the queue waits for what the current stream holds by now"
            readers = self._queue.after_readers()
        self._free[address] = readers

    @property
    def allocated_bytes(self) -> int:
        return len(self._all) * self.buffer_bytes


class BufferViews(NamedTuple):
    """Views of one buffer."""

    slots: list[Tensor]  # one per parameter, in its shape and with its strides
    gaps: list[Tensor]  # what belongs to no parameter
    addresses: list[int]  # of ``slots``, as they were when the views were made


class SegmentViews:
    """Views of buffers and placeholders, for all segments of equal slots, shapes and strides.

    The units of a model are mostly alike, and use the same few buffers in turn. What they share is
    in the processor's cache when the next one needs it.

    Attributes:
        is_opaque: whether the buffers hold bytes: components of quantized parameters.
        forms: what the parameters of the slots look like; their names are another segment's.
        placeholders: what parameters are views of while no buffer holds them.
    """

    def __init__(self, segment: Segment, forms: Sequence[ParamSpec], device: torch.device) -> None:
        self.is_opaque = segment.is_opaque
        self.slots = segment.slots
        self.forms = forms
        self._gaps = list(segment.gaps())
        self._found: dict[tuple[int, torch.dtype], BufferViews] = {}
        hole_of = {dtype: _hole(dtype, device) for dtype in {form.dtype for form in forms}}
        holes = [hole_of[form.dtype].expand(form.shape) for form in forms]
        self.placeholders = BufferViews(holes, [], list(map(Tensor.data_ptr, holes)))

    def forget(self) -> None:
        """Forget the views of all buffers, which are gone or have moved."""
        self._found.clear()

    def of(self, full: Tensor) -> BufferViews:
        """Return the views of ``full``, [padded_numel] of a buffer that lives as long as this."""
        # A storage that is refilled has other addresses; its views stay what they are.
        key = (storage_of(full) if self.is_opaque else full.data_ptr(), full.dtype)
        found = self._found.get(key)
        if found is None:
            with torch.inference_mode(False):  # they serve training too
                slots = [
                    form.to_values(full[slot.start : slot.stop])
                    for form, slot in zip(self.forms, self.slots, strict=True)
                ]
                gaps = [full[start:stop] for start, stop in self._gaps]
            addresses = list(map(Tensor.data_ptr, slots))
            found = self._found[key] = BufferViews(slots, gaps, addresses)
        return found


def _hole(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaN, or 0 for integers, as a tensor without dimensions."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    # All bits set are NaN in most 8-bit formats; not all of them can be filled.
    return torch.full((1,), 255, dtype=torch.uint8, device=device).view(dtype)[0]
