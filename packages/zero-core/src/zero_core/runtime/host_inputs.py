"""Inputs of blocks that are computed again in backward, and host memory in which they may wait.

The vertical schedule has gradients of tied weights wait there as well.

[Note: recomputed blocks]
With ``activation_checkpointing`` each block keeps its inputs alone and is computed again in
backward (Chen et al., arXiv 1604.06174), by torch's non-reentrant `torch.utils.checkpoint`. With
``cpu_checkpointing`` the positional inputs wait in host memory. Only the block's ``forward`` is
wrapped, on the object: names, class and hooks stay.

[Note: two streams and one call ahead]
Inputs are copied down and up beside the blocks, on a stream for each direction; the host waits for
neither. When backward asks for the inputs of a call, those of the call that it needs next are
fetched, too: the call before it, or, with the vertical schedule, the same block's for the next
micro-batch, and after the last one the block before for the first. A host buffer is lent again when
nothing holds what was packed any more. The copy down into it waits for the last copy up.

[Note: page-locked memory]
Torch page-locks powers of two of bytes. Buffers are cut out of larger pieces, of as many buffers as
fill a power of two best: three of 84 MB in 256 MiB.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.object_methods import ObjectMethods

MAX_IN_PIECE = 8  # buffers that are page-locked at a time, at most
_MAX_IDLE = 1024  # calls after which the buffers of a size are dropped that none asked for
_ALIGNMENT = 256  # bytes, of buffers


@dataclass(eq=False)
class HostCopy:
    """A tensor's values on the host. It returns its buffer when it is dropped."""

    copies: HostCopies
    buffer: Tensor
    values: Tensor  # in the buffer, in the tensor's shape and dtype
    last_copy: torch.Event  # the copy down, or the last copy up
    fetched: Tensor | None = None  # the values on the device, until they are used
    is_fetched: bool = False  # whether they were fetched at all

    def __del__(self) -> None:
        self.copies.release(self)


def page_locked_bytes(nbytes: int, number: int, most: int = MAX_IN_PIECE) -> int:
    """Return the bytes that torch page-locks for ``number`` buffers, ``most`` at a time."""
    if not nbytes:
        return 0
    size, count = _piece(nbytes, most)
    return -(-number // count) * _next_power_of_two(count * size)


def _piece(nbytes: int, most: int) -> tuple[int, int]:
    """Return the size of a buffer of ``nbytes``, and how many fill a power of two best."""
    size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return size, max(range(1, most + 1), key=lambda n: n * size / _next_power_of_two(n * size))


def _next_power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


class HostCopies:
    """Copies tensors of an accelerator to page-locked host memory and back, on two streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        # Page-locked buffers of the sizes that were asked for lately.
        self._free: dict[int, list[tuple[Tensor, torch.Event | None]]] = {}  # by bytes
        self._last_use: dict[int, int] = {}  # by bytes, as a number of the call
        self._num_calls = 0

    def store(self, tensor: Tensor, most: int = MAX_IN_PIECE) -> HostCopy | None:
        """Begin to copy ``tensor`` down. None for one that is elsewhere, sparse or empty.

        The caller keeps its memory until `wait`, or calls `record`. ``most``: buffers of this size
        that are page-locked at a time, at most.
        """
        is_moved = tensor.device == self._device and tensor.layout is torch.strided
        if not is_moved or not tensor.numel():
            return None
        given = tensor.detach()
        size, count = _piece(given.nbytes, min(most, MAX_IN_PIECE))
        self._num_calls += 1
        self._last_use[size] = self._num_calls
        free = self._free.setdefault(size, [])
        if not free:
            # Sizes that nobody asks for any more are dropped. Torch waits for their copies under
            # way. A list, as autograd's threads return buffers at any time.
            for idle, call in list(self._last_use.items()):
                if self._num_calls - call > _MAX_IDLE:
                    del self._last_use[idle]
                    self._free.pop(idle, None)
            with torch.inference_mode(False):  # it serves training too
                piece = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
            free += [(piece[n * size : (n + 1) * size], None) for n in range(count)]
        buffer, last_copy = free.pop()
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
        torch.accelerator.current_stream(self._device).wait_event(stored.last_copy)

    def fetch(self, stored: HostCopy) -> None:
        """Begin to copy the values up, unless that was begun before."""
        if stored.is_fetched:
            return
        fetched = torch.empty_like(stored.values, device=self._device)
        self._up.wait_event(stored.last_copy)
        # Its memory may have had other users.
        self._up.wait_stream(torch.accelerator.current_stream(self._device))
        with self._up:
            fetched.copy_(stored.values, non_blocking=True)
        stored.last_copy = self._up.record_event()
        stored.fetched, stored.is_fetched = fetched, True

    def take(self, stored: HostCopy) -> Tensor:
        """Return the values on the device. The current stream may read them."""
        if stored.fetched is None:  # not fetched, or taken before
            stored.is_fetched = False
            self.fetch(stored)
        found, stored.fetched = stored.fetched, None
        assert found is not None
        self.wait(stored)
        return found

    def release(self, stored: HostCopy) -> None:
        """Take the buffer back after its last copy."""
        if stored.fetched is not None:  # in vain
            stored.fetched.record_stream(self._up)
        # Its size may have been dropped while the buffer was lent.
        nbytes = stored.buffer.nbytes
        self._last_use.setdefault(nbytes, self._num_calls)
        self._free.setdefault(nbytes, []).append((stored.buffer, stored.last_copy))


class _Call(list[weakref.ref[HostCopy]]):
    """Inputs of one call of a block, which are fetched together."""

    number = 0  # among all calls


class HostInputs:
    """Moves what is saved on an accelerator within `context` to the host, and back."""

    def __init__(self, device: torch.device) -> None:
        self.copies = HostCopies(device)
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
        self._num_calls = 0
        # The micro-batches of a vertical step, and the number of its first call.
        self._num_together, self._first = 1, 0

    def expect(self, num_micro_batches: int) -> None:
        """Expect calls of each block for so many micro-batches from now on, block by block."""
        self._num_together, self._first = num_micro_batches, self._num_calls

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of one call of a block."""
        call = self._calls[self._num_calls] = _Call()
        call.number = self._num_calls
        self._num_calls += 1

        def pack(tensor: Tensor) -> tuple[HostCopy, _Call] | Tensor:
            stored = self.copies.store(tensor)
            if stored is None:
                return tensor
            self.copies.record(tensor)
            call.append(weakref.ref(stored))
            return stored, call

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: tuple[HostCopy, _Call] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        stored, call = packed
        found = self.copies.take(stored)
        # The call whose inputs backward needs next. There is none of number -1.
        together, following = self._num_together, call.number - 1
        if together > 1:
            block, turn = divmod(call.number - self._first, together)
            following = call.number + 1
            if turn + 1 == together:
                following = following - 2 * together if block > 0 else -1
        for ref in (*call, *self._calls.get(following, ())):
            if (other := ref()) is not None:
                self.copies.fetch(other)
        return found


def recompute_blocks(
    blocks: Sequence[nn.Module], passes: Passes, host_inputs: HostInputs | None, *, is_on_cpu: bool
) -> ObjectMethods:
    """Wrap the forwards of ``blocks``, in the passes' order. See [Note: recomputed blocks].

    ``is_on_cpu``: a block's inputs wait in host memory, where ``host_inputs`` move those on an
    accelerator.
    """

    def wrap(unit: Unit, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        @contextmanager
        def recomputing() -> Iterator[None]:
            passes.backward.enter_recompute(unit)
            yield

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if torch.compiler.is_compiling() and not is_on_cpu:
                # The compiled backward recomputes; the weights that it saved tell when it begins.
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            kwargs |= {"use_reentrant": False, "context_fn": lambda: (nullcontext(), recomputing())}
            with nullcontext() if host_inputs is None else host_inputs.context():
                return checkpoint(forward, *args, **kwargs)

        return wrapped

    pairs = zip(passes.units.blocks, blocks, strict=True)
    return ObjectMethods("forward", [(block, wrap(unit, block)) for unit, block in pairs])
