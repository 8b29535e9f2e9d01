"""Long-lived and short-lived memory, kept apart so that memory does not fragment.

Long-lived memory (parameters and gradients that are kept) is allocated first, in one contiguous
buffer per kind and dtype (`Arena`). Short-lived memory (gathered units, gradients before reduction)
is borrowed from buffers of the size of the largest request (`BufferPool`). ZeRO (arXiv 1910.02054,
section 6.3) introduces contiguous memory for this purpose.
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
"""Function that allocates an uninitialized 1-D tensor of the given number of elements and dtype."""
Wait = Callable[[], object]
"""Function that waits until memory may be written to again."""


def allocator(device: torch.device) -> Allocate:
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


class CopyStream:
    """Context manager of a side stream, if any: [Note: the copy stream] in `param_offload`."""

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
        """Return a function that makes this stream wait for the current one, or None on a CPU."""
        if self._stream is None:
            return None
        event = torch.accelerator.current_stream(self._device).record_event()
        return partial(self._stream.wait_event, event)

    def follow(self) -> None:
        """Make this stream wait for the work now queued on the current stream."""
        wait = self.after_readers()
        if wait is not None:
            wait()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory that this stream writes and the current stream reads."""
        tensor = torch.empty(numel, dtype=dtype, device=self._device)
        self.follow()  # queued work may still use the memory
        return tensor

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Arena:
    """Long-lived memory on one device, allocated up front. ``buffers``: buffers by kind."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.buffers: dict[str, list[Tensor]] = {}

    def allocate(
        self, kind: str, wanted: Mapping[int, tuple[torch.dtype, int]]
    ) -> dict[int, Tensor]:
        """Allocate a buffer per dtype. Return a 1-D view for each (dtype, numel) in ``wanted``."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype for dtype, _ in wanted.values()):
            sizes = {key: numel for key, (of, numel) in wanted.items() if of == dtype}
            buffer = self._allocate(sum(sizes.values()), dtype)
            self.buffers.setdefault(kind, []).append(buffer)
            found |= zip(sizes, torch.split(buffer, list(sizes.values())), strict=True)
        return found

    def report(self) -> dict[str, int]:
        """Return the size in bytes of each kind. Storages that were freed count as 0."""
        return {
            kind: sum(min(b.nbytes, b.untyped_storage().nbytes()) for b in buffers)
            for kind, buffers in self.buffers.items()
        }


class BufferPool:
    """Equally large buffers, which are lent as tensors of any dtype and then returned.

    Reads of a returned buffer may still be queued. So it must be filled on their stream, or by a
    collective launched on that stream, unless `release` got a function that waits for the reads.

    A reused buffer is the one that ``user`` had last, if free. So in identical steps, once the pool
    has stopped growing, addresses stay, as CUDA graphs require. The choice depends on the order of
    calls only, not on the progress of copies, so the number of buffers can be computed in advance.
    """

    def __init__(
        self,
        allocate: Allocate,
        buffer_bytes: int,
        *,
        num_spare: int = 0,
        queue: CopyStream | None = None,
    ) -> None:
        """Create an empty pool. Buffers are allocated when first needed.

        The pool keeps ``num_spare`` free buffers in reserve so that a pending copy can finish
        before its buffer is reused. ``queue``, if given, is the stream that fills the buffers. It
        waits for the stream that released a buffer before the buffer is reused.
        """
        self._queue = queue
        self._num_spare = num_spare
        self._allocate = allocate
        self.buffer_bytes = buffer_bytes
        self._all: dict[int, Tensor] = {}  # buffer by address
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by address, numel, dtype
        self._free: dict[int, Wait | None] = {}  # by address, longest free first
        self._last: dict[Hashable, int] = {}  # last address by user

    def acquire(self, numel: int, dtype: torch.dtype, user: Hashable) -> Tensor:
        """Borrow a 1-D view of ``numel`` elements of a free or new buffer, uninitialized.

        ``user`` identifies the content. The class describes when its address stays the same.
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
        with torch.inference_mode(False):  # so that training can use the buffer
            buffer = self._allocate(self.buffer_bytes, torch.uint8)
        address = buffer.data_ptr()
        self._all[address] = buffer
        return address

    def reserve(self, num_buffers: int) -> None:
        """Allocate buffers until the pool has ``num_buffers``."""
        while len(self._all) < num_buffers and self.buffer_bytes:
            self._free[self._add_buffer()] = None

    def free(self, *, keep: int = 0) -> None:
        """Free unused buffers, those unused for longest first, until ``keep`` buffers remain."""
        for address, readers in list(self._free.items()):
            if len(self._all) <= keep:
                return
            if not self._all[address].untyped_storage().resizable():
                continue  # other ranks may access the buffer
            if readers is not None:
                readers()
            del self._all[address], self._free[address]
            for key in [key for key in self._views if key[0] == address]:
                del self._views[key]

    def release(self, view: Tensor, readers: Wait | None = None) -> None:
        """Return a borrowed buffer. ``readers`` is called before its reuse or deallocation."""
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

    slots: list[Tensor]  # one per parameter, with its shape and strides
    gaps: list[Tensor]  # padding between and after parameters
    addresses: list[int]  # addresses of ``slots`` when the views were made


class SegmentViews:
    """Views of buffers and placeholders, shared by segments with equal slots and shapes.

    Most units of a model are alike and use the same few buffers in turn. Sharing the views keeps
    them in the processor's cache.

    Attributes:
        is_opaque: whether the buffers hold the bytes of quantized parameters.
        forms: specs of the parameters. Their names may be those of another segment.
        placeholders: views that parameters use while no buffer holds their values.
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
        """Drop the cached views of all buffers, which were freed or moved."""
        self._found.clear()

    def of(self, full: Tensor) -> BufferViews:
        """Return the views of ``full``, [padded_numel], whose buffer must exist until `forget`."""
        # Opaque buffers are freed and refilled: the address changes, the storage's views do not.
        key = (storage_of(full) if self.is_opaque else full.data_ptr(), full.dtype)
        found = self._found.get(key)
        if found is None:
            with torch.inference_mode(False):  # so that training can use the views
                slots = [
                    form.to_values(full[slot.start : slot.stop])
                    for form, slot in zip(self.forms, self.slots, strict=True)
                ]
                gaps = [full[start:stop] for start, stop in self._gaps]
            addresses = list(map(Tensor.data_ptr, slots))
            found = self._found[key] = BufferViews(slots, gaps, addresses)
        return found


def _hole(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 0-dim tensor: NaN (8-bit floats: all bits set), or 0 if not floating-point."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    # All bits set is NaN in OCP's 8-bit formats. Some 8-bit formats do not support `fill_`.
    return torch.full((1,), 255, dtype=torch.uint8, device=device).view(dtype)[0]
