"""Tape of operations on tensors without memory, and its replay one tensor at a time.

[Note: recording]
deferred    a tensor on the meta device that stands for one on the CPU
storage     the storage of deferred tensors, by number. Views share one
ref         a tensor's storage, offset, shape, strides and dtype. Views need no recording
tape        the operations that wrote storages, in order, random ones with the generator's state
overwrite   a write after which nothing earlier in the storage matters (``normal_``, ``zero_``)

Any tensor can be computed alone and in any order, bit for bit: `Recording.value` replays the
operations that it depends on, back to the last overwrite, each random one from the state of its
generator. Replay per tensor is the idea of torchdistx's deferred_init.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import DisableTorchFunction, disable_current_modes, pytree, storage_of

_MAPPED_BYTES = 1 << 15
# Private: the system merges neighbours, of which it has a limited number otherwise.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}


@dataclass(frozen=True)
class Ref:
    """Position of a tensor in its storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Ref:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise RuntimeError(
                "deferred_init(): sparse, conjugated and negated views cannot be deferred: call "
                "to_dense() or resolve_conj() first"
            )
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(storage_of(tensor), tensor.dtype, shape, stride, int(tensor.storage_offset()))


@dataclass(frozen=True)
class Entry:
    """Operation of the tape, with refs in place of deferred tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]  # of its results, those that lie in new storages
    reads: frozenset[int]
    overwrites: frozenset[int]
    generator: torch.Generator
    generator_state: Tensor | None
    default_dtype: torch.dtype

    def run(self, memory: _Memory) -> None:
        """Run the operation on ``memory`` and restore the generator."""
        args, kwargs = pytree.tree_map_only(Ref, memory.view, (self.args, self.kwargs))
        before = torch.get_default_dtype()
        now = None if self.generator_state is None else self.generator.get_state()
        try:
            torch.set_default_dtype(self.default_dtype)
            if self.generator_state is not None:
                self.generator.set_state(self.generator_state)
            results = pytree.tree_leaves(self.func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)
            if now is not None:
                self.generator.set_state(now)
        for ref, result in zip(self.made, results, strict=True):
            if ref is not None:
                memory.view(ref).copy_(result)


class _Memory:
    """Real storages during one replay, zeroed when first used."""

    def __init__(self, nbytes: dict[int, int]) -> None:
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def view(self, ref: Ref) -> Tensor:
        if ref.storage not in self._storages:
            self._storages[ref.storage] = zeroed(self._nbytes[ref.storage])
        view = torch.empty(0, dtype=ref.dtype)
        return view.set_(self._storages[ref.storage], ref.offset, ref.shape, ref.stride)


def zeroed(nbytes: int) -> torch.UntypedStorage:
    """Return zeroed memory that is returned to the system when it is freed.

    On the heap, small allocations between two large tensors would fragment the hole of the first,
    and the process would grow to the size of the model.
    """
    if nbytes < _MAPPED_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
    mapped = mmap.mmap(-1, nbytes, **_PRIVATE)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


class Recording:
    """Tape of one `deferred_init` block, as [Note: recording] describes."""

    def __init__(self) -> None:
        self._tape: list[Entry] = []
        self._writers: dict[int, list[int]] = {}  # numbers of entries, by storage
        self._nbytes: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that a number stays that storage's
        self._versions: dict[int, int] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was made within the block."""
        return tensor.is_meta and storage_of(tensor) in self._nbytes

    def is_changed(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was written after the block, where nothing was recorded."""
        return tensor._version != self._versions.get(storage_of(tensor), tensor._version)

    def note_versions(self, module: nn.Module) -> None:
        """Note the versions of a module's tensors, so that later writes are detected."""
        for tensor in (*module.parameters(), *module.buffers()):
            if self.knows(tensor):
                self._versions[storage_of(tensor)] = tensor._version

    @torch.no_grad()
    def value(self, tensor: Tensor) -> Tensor:
        """Return the value that an ordinary construction gives ``tensor``, on the CPU."""
        with DisableTorchFunction(), disable_current_modes():
            ref, memory = Ref.of(tensor), _Memory(self._nbytes)
            for number in sorted(self._needed(ref.storage)):
                self._tape[number].run(memory)
            return memory.view(ref)

    def blank(self, tensor: Tensor) -> Tensor:
        """Return a zeroed CPU tensor like ``tensor``, in memory of its own."""
        return _Memory(self._nbytes).view(Ref.of(tensor))

    def add_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._nbytes[storage_of(tensor)] = storage.nbytes()

    def add(self, entry: Entry, written: Sequence[Tensor]) -> None:
        """Add the next operation, which wrote to ``written`` and to the storages it made."""
        storages = {storage_of(t) for t in written} | {
            r.storage for r in entry.made if r is not None
        }
        for storage in storages:
            self._writers.setdefault(storage, []).append(len(self._tape))
        self._tape.append(entry)

    def _needed(self, storage: int) -> set[int]:
        """Return the operations that the contents of ``storage`` depend on."""
        needed: set[int] = set()
        wanted = [(storage, len(self._tape))]
        while wanted:
            storage, before = wanted.pop()
            for number in reversed(self._writers.get(storage, ())):
                if number >= before:
                    continue
                entry = self._tape[number]
                if number not in needed:
                    needed.add(number)
                    wanted += [(read, number) for read in entry.reads if read != storage]
                if storage in entry.overwrites:
                    break
        return needed
