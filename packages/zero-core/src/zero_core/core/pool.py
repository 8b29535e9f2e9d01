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
from zero_core.layout.arithmetic import Segment, dim_order, flatten, unflatten

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

    def filled_by(self, allocate: Allocate) -> Allocate:
        """Return ``allocate`` for memory that this stream writes to and the current one reads."""

        def act(numel: int, dtype: torch.dtype) -> Tensor:
            tensor = allocate(numel, dtype)
            wait_for_past_users = self.after_readers()  # the memory may have had other users
            if wait_for_past_users is not None:
                wait_for_past_users()
            return tensor

        return act

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Arena:
    """Long-lived memory on one device, allocated once per kind, accounted for by name."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffers: dict[str, list[Tensor]] = {}

    def allocate(
        self, kind: str, wanted: Mapping[int, tuple[torch.dtype, int]]
    ) -> dict[int, Tensor]:
        """Allocate one buffer per dtype. Return a 1-D view of it for each key, uninitialised.

        Args:
            kind: the buffers' name in the report.
            wanted: dtype and number of elements of each view. Views are in this order.
        """
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype for dtype, _ in wanted.values()):
            sizes = {key: numel for key, (of, numel) in wanted.items() if of == dtype}
            buffer = self._allocate(sum(sizes.values()), dtype)
            self._buffers.setdefault(kind, []).append(buffer)
            found |= zip(sizes, torch.split(buffer, list(sizes.values())), strict=True)
        return found

    @property
    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """All buffers, by kind."""
        return self._buffers

    def report(self) -> dict[str, int]:
        """Bytes by kind. An emptied storage has none."""
        return {
            kind: sum(min(b.nbytes, b.untyped_storage().nbytes()) for b in buffers)
            for kind, buffers in self._buffers.items()
        }


class BufferPool:
    """Equally large buffers, borrowed as any dtype and returned.

    A borrower fills a buffer from the stream that its last reader ran on (a collective first waits
    for the stream that launches it). `release` is given what other readers are to be waited for.

    Each user gets the buffer that it had the last time, if that is free. So where steps are alike,
    a user's memory has one address in all of them, as CUDA graphs need it. What is lent depends on
    the order of the calls alone, not on which copies have ended: a plan can count the buffers.
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

        Args:
            allocate: makes a buffer.
            buffer_bytes: bytes of each buffer.
            num_spare: free buffers kept in reserve, so that a pending copy can finish before its
                buffer is reused.
            queue: fills buffers, too, and waits for the stream that released them.
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
        """Allocate a buffer and return its address."""
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
        """Free unused buffers, but keep ``keep`` in all, those used last.

        New ones are allocated when they are needed.
        """
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
        """Bytes that the pool holds, free or not."""
        return len(self._all) * self.buffer_bytes


class RefilledBuffers:
    """One buffer per user, whose storage stays the same object while its bytes are freed.

    For components: a quantizer's kernel may keep a view of a gathered weight from forward to
    backward, where no hook of autograd sees it (bitsandbytes does). In a `BufferPool` it would show
    another unit's values then. Here it shows its own as soon as the unit is gathered again. FSDP2
    refills all storages in this way. On a CPU fresh pages cost time, so the others are pooled.
    """

    def __init__(
        self, device: torch.device, buffer_bytes: int, *, queue: CopyStream | None = None
    ) -> None:
        """Create it without memory. ``buffer_bytes``, ``queue``: as for `BufferPool`."""
        self._device = device
        self._queue = queue
        self._of: dict[Hashable, Tensor] = {}
        self._lent_bytes = 0
        self.buffer_bytes = buffer_bytes
        self.allocated_bytes = 0
        """The most bytes that were lent at a time."""

    def acquire(self, numel: int, dtype: torch.dtype, user: Hashable) -> Tensor:
        """Borrow ``user``'s buffer of ``numel`` elements. Contents undefined."""
        buffer = self._of.get(user)
        if buffer is None:
            with torch.inference_mode(False):  # it serves training too
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._of[user] = buffer
        elif not buffer.untyped_storage().nbytes():
            buffer.untyped_storage().resize_(numel * dtype.itemsize)
        wait = None if self._queue is None else self._queue.after_readers()
        if wait is not None:
            wait()  # the memory may have had other users
        self._lent_bytes += buffer.nbytes
        self.allocated_bytes = max(self.allocated_bytes, self._lent_bytes)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Free the bytes of what was borrowed."""
        self._lent_bytes -= buffer.nbytes
        buffer.untyped_storage().resize_(0)

    def reserve(self, num_buffers: int) -> None:
        """Do nothing: memory is allocated for each use."""

    def free(self, *, keep: int = 0) -> None:
        """Do nothing: what is not lent has no memory."""


class BufferViews(NamedTuple):
    """Views of one buffer.

    Attributes:
        slots: one per parameter, in its shape and with its strides.
        gaps: of what belongs to no parameter.
        addresses: of ``slots``, as they were when the views were made.
    """

    slots: list[Tensor]
    gaps: list[Tensor]
    addresses: list[int]


class SegmentViews:
    """Views of buffers and placeholders, for all segments of equal slots, shapes and strides.

    The units of a model are mostly alike, and use the same few buffers in turn. What they share is
    in the processor's cache when the next one needs it.

    Attributes:
        is_opaque: whether the buffers hold bytes: components of quantized parameters.
        slots: the places of the parameters in a buffer.
        placeholders: what parameters are views of while no buffer holds them.
    """

    def __init__(self, segment: Segment, params: Sequence[Tensor], device: torch.device) -> None:
        """Prepare for buffers of ``segment``'s length, and make the placeholders on ``device``."""
        self.is_opaque = segment.is_opaque
        self.slots = segment.slots
        # What parameters and components look like, as the model knows them.
        self._forms = [(p.dtype, p.shape, dim_order(p)) for p in params]
        self._gaps = list(segment.gaps())
        self._found: dict[tuple[int, torch.dtype], BufferViews] = {}
        dtypes = [p.dtype if self.is_opaque else segment.dtype for p in params]
        hole_of = {dtype: _hole(dtype, device) for dtype in dict.fromkeys(dtypes)}
        holes = [hole_of[d].expand(p.shape) for d, p in zip(dtypes, params, strict=True)]
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
                slots = self._slots_of(full)
                gaps = [full[start:stop] for start, stop in self._gaps]
            addresses = list(map(Tensor.data_ptr, slots))
            found = self._found[key] = BufferViews(slots, gaps, addresses)
        return found

    def _slots_of(self, full: Tensor) -> list[Tensor]:
        return [self.to_values(i, full[s.start : s.stop]) for i, s in enumerate(self.slots)]

    def to_values(self, position: int, elements: Tensor) -> Tensor:
        """Return the ``elements`` of a slot, 1-D, as a view like its parameter."""
        dtype, shape, order = self._forms[position]
        return unflatten(elements.view(dtype) if self.is_opaque else elements, shape, order)

    def to_elements(self, position: int, values: Tensor) -> Tensor:
        """Return ``values`` like a parameter, 1-D as its slot has them: a view where it can be."""
        order = self._forms[position][-1]
        if self.is_opaque:
            return flatten(values.detach(), order).view(torch.uint8)
        return flatten(values, order)


def _hole(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaN, or 0 for integers, as a tensor without dimensions."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    # All bits set are NaN in most 8-bit formats; not all of them can be filled.
    return torch.full((1,), 255, dtype=torch.uint8, device=device).view(dtype)[0]
