"""Inputs of recomputed blocks, optionally kept in host memory.

The vertical schedule also uses `HostInputs`, for gradients of tied weights.

[Note: recomputed blocks]
With ``activation_checkpointing`` each block saves only its inputs and is recomputed in backward
(Chen et al., arXiv 1604.06174), by torch's non-reentrant `torch.utils.checkpoint`. With
``cpu_checkpointing`` the positional inputs are kept in host memory. Only the ``forward`` attribute
of the block object is wrapped. Names, class and hooks do not change.

[Note: two streams and one call ahead]
One stream per direction copies inputs to the host and back, in parallel with the blocks. The host
does not wait. When backward requests the inputs of a call, the inputs that backward needs next are
prefetched: those of the previous call. With the vertical schedule they are the same block's inputs
of the next micro-batch or, after the last, the previous block's inputs of the first micro-batch. A
host buffer is reused when nothing references its `HostCopy`. The next copy into the buffer waits
for the last copy out of it.

[Note: pinned memory]
Torch rounds pinned allocations up to powers of two. So several buffers are views of one allocation,
as many as fill a power of two best: three buffers of 84 MB in 256 MiB, for example.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.object_methods import ObjectMethods

MAX_IN_PIECE = 8  # maximum number of buffers in one pinned allocation
_MAX_IDLE = 1024  # number of `store` calls after which unused buffers of a size are dropped
_ALIGNMENT = 256  # alignment of buffers in bytes


@dataclass(eq=False)
class HostCopy:
    """A tensor's values in a host buffer, which is returned when this object is deleted."""

    copies: HostInputs
    buffer: Tensor
    values: Tensor  # view of the buffer, in the tensor's shape and dtype
    last_copy: torch.Event  # end of the copy to the host, or of the last copy back
    given: Tensor | None  # the tensor on the device, until `HostInputs.free`
    stream: torch.Stream  # the stream on which `store` was called
    fetched: Tensor | None = None  # the values on the device, until `take`
    is_fetched: bool = False  # whether a copy back has started

    def __del__(self) -> None:
        self.copies.release(self)


def page_locked_bytes(nbytes: int, number: int, most: int = MAX_IN_PIECE) -> int:
    """Return pinned bytes of ``number`` buffers of ``nbytes``, up to ``most`` per allocation."""
    if not nbytes:
        return 0
    size, count = _piece(nbytes, most)
    return -(-number // count) * _next_power_of_two(count * size)


def _piece(nbytes: int, most: int) -> tuple[int, int]:
    """Return a buffer's size, and how many buffers (up to ``most``) fill a power of two best."""
    size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return size, max(range(1, most + 1), key=lambda n: n * size / _next_power_of_two(n * size))


def _next_power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


class _Call(list[weakref.ref[HostCopy]]):
    number = 0


class HostInputs:
    """Copies of accelerator tensors in pinned host memory. A stream per direction copies.

    Within `context`, tensors that autograd saves are moved to the host and back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        # Free pinned buffers by size in bytes, with the end of their last copy.
        self._free: dict[int, list[tuple[Tensor, torch.Event | None]]] = {}
        self._last_use: dict[int, int] = {}  # by size: number of the last `store`
        self._num_stores = 0
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
        self._num_calls = 0  # calls of blocks
        # Number of micro-batches of a vertical step, and the number of its first call.
        self._num_together, self._first = 1, 0

    def store(self, tensor: Tensor, most: int = MAX_IN_PIECE) -> HostCopy | None:
        """Start to copy ``tensor`` to the host. Return None if empty, sparse or on another device.

        ``most``: maximum number of buffers in one allocation.
        """
        is_moved = tensor.device == self._device and tensor.layout is torch.strided
        if not is_moved or not tensor.numel():
            return None
        given = tensor.detach()
        size, count = _piece(given.nbytes, min(most, MAX_IN_PIECE))
        self._num_stores += 1
        self._last_use[size] = self._num_stores
        free = self._free.setdefault(size, [])
        if not free:
            # Drop sizes that are no longer requested. Torch reuses memory only after its pending
            # copies. Iterate over a list, because autograd's threads may add sizes at any time.
            for idle, call in list(self._last_use.items()):
                if self._num_stores - call > _MAX_IDLE:
                    del self._last_use[idle]
                    self._free.pop(idle, None)
            with torch.inference_mode(False):  # so that training can use the memory
                piece = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
            free += [(piece[n * size : (n + 1) * size], None) for n in range(count)]
        buffer, last_copy = free.pop()
        values = buffer[: given.nbytes].view(given.dtype).view(given.shape)
        if last_copy is not None:
            self._down.wait_event(last_copy)
        stream = torch.accelerator.current_stream(self._device)
        self._down.wait_stream(stream)
        with self._down:
            values.copy_(given, non_blocking=True)
        return HostCopy(self, buffer, values, self._down.record_event(), given, stream)

    def free(self, stored: HostCopy) -> None:
        """Drop the tensor on the device. Its memory is reused after the copy to the host.

        If `store` was called on the current stream, the stream waits for the copy. Otherwise uses
        ``record_stream``, which frees the memory later if the host is several blocks ahead.
        """
        if stored.given is not None:
            if torch.accelerator.current_stream(self._device) == stored.stream:
                self._wait(stored)
            else:
                stored.given.record_stream(self._down)
            stored.given = None

    def _wait(self, stored: HostCopy) -> None:
        torch.accelerator.current_stream(self._device).wait_event(stored.last_copy)

    def fetch(self, stored: HostCopy) -> None:
        """Start to copy the values back to the device, unless already started."""
        if stored.is_fetched:
            return
        self.free(stored)
        fetched = torch.empty_like(stored.values, device=self._device)
        self._up.wait_event(stored.last_copy)
        # Earlier work may still use the new memory.
        self._up.wait_stream(torch.accelerator.current_stream(self._device))
        with self._up:
            fetched.copy_(stored.values, non_blocking=True)
        stored.last_copy = self._up.record_event()
        stored.fetched, stored.is_fetched = fetched, True

    def take(self, stored: HostCopy) -> Tensor:
        """Return the values on the device, ready for use on the current stream."""
        if stored.fetched is None:  # not fetched, or `take` was called before
            stored.is_fetched = False
            self.fetch(stored)
        found, stored.fetched = stored.fetched, None
        assert found is not None
        self._wait(stored)
        return found

    def release(self, stored: HostCopy) -> None:
        """Return the buffer for reuse after its last copy."""
        if stored.given is not None:
            stored.given.record_stream(self._down)
        if stored.fetched is not None:  # fetched but never used
            stored.fetched.record_stream(self._up)
        # The size may have been dropped while the buffer was in use.
        nbytes = stored.buffer.nbytes
        self._last_use.setdefault(nbytes, self._num_stores)
        self._free.setdefault(nbytes, []).append((stored.buffer, stored.last_copy))

    def expect(self, num_micro_batches: int) -> None:
        """Announce that each block will be called once per micro-batch, block by block."""
        self._num_together, self._first = num_micro_batches, self._num_calls

    def context(self) -> AbstractContextManager[Any]:
        """Return the context manager for one call of a block."""
        call = self._calls[self._num_calls] = _Call()
        call.number = self._num_calls
        self._num_calls += 1
        for ref in self._calls.get(call.number - 2, ()):  # copies of the last call may be pending
            if (stored := ref()) is not None:
                self.free(stored)

        def pack(tensor: Tensor) -> tuple[HostCopy, _Call] | Tensor:
            stored = self.store(tensor)
            if stored is None:
                return tensor
            call.append(weakref.ref(stored))
            return stored, call

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: tuple[HostCopy, _Call] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        stored, call = packed
        found = self.take(stored)
        # The call whose inputs backward needs next. -1 stands for none.
        together, following = self._num_together, call.number - 1
        if together > 1:
            block, turn = divmod(call.number - self._first, together)
            following = call.number + 1
            if turn + 1 == together:
                following = following - 2 * together if block > 0 else -1
        for ref in (*call, *self._calls.get(following, ())):
            if (other := ref()) is not None:
                self.fetch(other)
        return found


def recompute_blocks(
    blocks: Sequence[nn.Module], passes: Passes, host_inputs: HostInputs | None, *, is_on_cpu: bool
) -> ObjectMethods:
    """Make ``blocks`` recompute their forwards in backward. See [Note: recomputed blocks].

    ``is_on_cpu``: ``cpu_checkpointing`` is on. ``host_inputs`` moves inputs to the host and back.
    """

    def wrap(unit: Unit, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        class Recomputing(nullcontext[None]):  # entered again by each backward of the same graph
            def __enter__(self) -> None:
                passes.backward.enter_recompute(unit)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), Recomputing()

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if torch.compiler.is_compiling() and not is_on_cpu:
                # A compiled backward recomputes by itself. `recomputing` is not needed, because
                # unpacking the saved weights marks the start of that backward.
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            with nullcontext() if host_inputs is None else host_inputs.context():
                return checkpoint(
                    forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
                )

        return wrapped

    pairs = zip(passes.units.blocks, blocks, strict=True)
    return ObjectMethods("forward", [(block, wrap(unit, block)) for unit, block in pairs])
