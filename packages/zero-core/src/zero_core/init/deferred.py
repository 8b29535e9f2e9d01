"""Construction without memory: a model's ``__init__`` is recorded and replayed later.

[Note: recording]
A *deferred* tensor is on the meta device and represents a CPU tensor. A storage is identified by
its number (`storage_of`). An *alias* is another meta tensor over the same storage. The *tape* has
the operations that wrote storages, in order, each random operation with its generator's state. An
*overwrite* is a write that makes a storage's earlier content irrelevant (``normal_``, ``zero_``).

Each tensor can be computed alone and in any order, bit for bit. `Recording.value` replays the
operations that the tensor depends on, back to the last overwrite. Each random operation starts from
its recorded generator state. The method is that of torchdistx's deferred_init.

Recording also executes each random operation on temporary memory. The generator thus advances as in
an ordinary construction, and the state before each operation is known. Values that Python reads
during construction (a number, a shape that depends on values) are computed immediately. During
construction deferred tensors report the CPU as their device, because ``torch.nn.init`` skips meta
tensors.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode

from zero_core._torch import (
    DisableTorchFunction,
    current_dispatch_mode,
    disable_current_modes,
    pytree,
    storage_of,
)

_MAPPED_BYTES = 1 << 15
# The system merges adjacent private mappings, which matters because their number is limited.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
_META = torch.device("meta")
_OVERWRITES = {
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "zero_"),
}
# Attributes that deferred tensors report during construction.
_PRETENDED = {
    Tensor.device.__get__: torch.device("cpu"),
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Entry(NamedTuple):
    """Operation of the tape, with aliases instead of deferred tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor | None]  # results in new storages, None for others
    reads: set[int]
    overwrites: set[int]
    generator: torch.Generator
    generator_state: Tensor | None
    default_dtype: torch.dtype


def _alias(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise RuntimeError(
            "deferred_init(): sparse, conjugated and negated views cannot be deferred: call "
            "to_dense() or resolve_conj() first"
        )
    return tensor.detach()


def zeroed(nbytes: int) -> torch.UntypedStorage:
    """Return zeroed memory. Freeing a block of `_MAPPED_BYTES` or more returns it to the system.

    On the heap, small allocations between two large tensors would fragment freed memory, and the
    process could grow to the size of the model.
    """
    if nbytes < _MAPPED_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
    mapped = mmap.mmap(-1, nbytes, **_PRIVATE)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


class Recording(TorchDispatchMode):
    """Mode that makes deferred tensors, and records the tape of one `recorded` context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape: list[Entry] = []
        self._writers: dict[int, list[int]] = {}  # indices of entries, by storage
        # By number. Storages are kept alive, so that no number is reused.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._versions: dict[int, int] = {}

    def knows(self, tensor: Tensor) -> bool:
        return tensor.is_meta and storage_of(tensor) in self._storages

    def is_changed(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was written after `note_versions`."""
        return tensor._version != self._versions.get(storage_of(tensor), tensor._version)

    def note_versions(self, module: nn.Module) -> None:
        """Record the versions of a module's tensors, to detect later writes."""
        for tensor in (*module.parameters(), *module.buffers()):
            if self.knows(tensor):
                self._versions[storage_of(tensor)] = tensor._version

    @torch.no_grad()
    def value(self, tensor: Tensor) -> Tensor:
        """Return the value on the CPU that the operations recorded so far give ``tensor``."""
        with DisableTorchFunction(), disable_current_modes():
            target, storages = _alias(tensor), dict[int, torch.UntypedStorage]()

            def view(given: Tensor) -> Tensor:
                return self._view(storages, given) if given.is_meta else given

            for number in sorted(self._needed(storage_of(target))):
                entry = self._tape[number]
                args, kwargs = pytree.tree_map_only(Tensor, view, (entry.args, entry.kwargs))
                state, before = entry.generator_state, torch.get_default_dtype()
                now = None if state is None else entry.generator.get_state()
                try:
                    torch.set_default_dtype(entry.default_dtype)
                    if state is not None:
                        entry.generator.set_state(state)
                    results = pytree.tree_leaves(entry.func(*args, **kwargs))
                finally:
                    torch.set_default_dtype(before)
                    if now is not None:
                        entry.generator.set_state(now)
                for made, result in zip(entry.made, results, strict=True):
                    if made is not None:
                        view(made).copy_(result)
            return view(target)

    def _view(self, storages: dict[int, torch.UntypedStorage], alias: Tensor) -> Tensor:
        number = storage_of(alias)
        if number not in storages:
            storages[number] = zeroed(alias.untyped_storage().nbytes())
        view = torch.empty(0, dtype=alias.dtype)
        return view.set_(storages[number], alias.storage_offset(), alias.shape, alias.stride())

    def _needed(self, storage: int) -> set[int]:
        """Return indices in the tape of the operations that the content of ``storage`` needs."""
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunction():  # deferred tensors then report "meta"
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        arguments = func._schema.arguments
        is_factory = not tensors and any(a.name == "device" for a in arguments)
        if not is_factory and not any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        _check_device(func, kwargs.get("device"))
        if any(t.is_meta and not self.knows(t) for t in tensors):
            raise RuntimeError(
                f"deferred_init(): {func} was given a tensor on the meta device that was not made "
                "within: make the whole model under one deferred_init()"
            )
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        changed = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        written = [t for t in pytree.tree_leaves(changed) if isinstance(t, Tensor)]
        has_result = any("Tensor" in str(r.type) for r in func._schema.returns)
        if not has_result or any(not t.is_meta for t in written):
            return self._run(func, args, kwargs, written)
        meta_args, meta_kwargs = pytree.tree_map_only(
            Tensor, lambda t: t if t.is_meta else t.to(_META), (args, kwargs)
        )
        if is_factory or kwargs.get("device") is not None:
            kwargs["device"], meta_kwargs["device"] = torch.device("cpu"), _META
        sizes = [t.untyped_storage().nbytes() for t in written]
        try:
            out = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # the result's shape depends on values
            return self._run(func, args, kwargs, written)
        if sizes != [t.untyped_storage().nbytes() for t in written]:
            raise RuntimeError(
                f"deferred_init(): {func} resizes a tensor, which cannot be deferred"
            )
        used = {storage_of(t) for t in tensors if t.is_meta}
        made = [
            _alias(r) if isinstance(r, Tensor) and storage_of(r) not in used else None
            for r in pytree.tree_leaves(out)
        ]
        new = {storage_of(t): t.untyped_storage() for t in made if t is not None}
        self._storages |= new
        name = func._schema.name.removeprefix("aten::")
        if name not in _ALLOCATIONS and (written or new):
            whole = [
                t for t in written if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()
            ]
            overwritten = whole if name in _OVERWRITES else []
            generator = kwargs.get("generator") or torch.default_generator
            state = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                state = generator.get_state()
                # Run on temporary memory, only to advance the generator.
                func(*self._real(args, overwritten), **self._real(kwargs, overwritten))
            stored_args, stored_kwargs = pytree.tree_map_only(
                Tensor, lambda t: _alias(t) if t.is_meta else t.detach().clone(), (args, kwargs)
            )
            ends = {storage_of(t) for t in overwritten}
            for number in {*new, *map(storage_of, written)}:
                self._writers.setdefault(number, []).append(len(self._tape))
            self._tape.append(
                Entry(
                    *(func, stored_args, stored_kwargs, made),
                    reads=used - ends,
                    overwrites=ends | new.keys(),
                    generator=generator,
                    generator_state=state,
                    default_dtype=torch.get_default_dtype(),
                )
            )
        return out

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Run ``func`` on real values, because it cannot be deferred."""
        if any(t.is_meta for t in written):
            raise RuntimeError(
                f"deferred_init(): {func} changes a tensor in a way that cannot be deferred: do it "
                "on a tensor made outside, and copy_() the result"
            )
        return func(*self._real(args), **self._real(kwargs))

    def _real(self, tree: Any, overwritten: Sequence[Tensor] = ()) -> Any:
        """Replace deferred tensors by their values, and overwritten ones by zeros."""

        def real(tensor: Tensor) -> Tensor:
            if any(tensor is t for t in overwritten):
                return self._view({}, tensor)
            return self.value(tensor) if tensor.is_meta else tensor

        return pytree.tree_map_only(Tensor, real, tree)


recordings: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()
"""Recording of each module that was given a tensor or submodule under `deferred_init`."""


@contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules without memory in this context. `zero_core.build` computes their values.

    Parameters and buffers are on the meta device. Their values will equal those of an ordinary
    construction on the CPU from the same seed, bit for bit. The default generator ends in the same
    state, too. This takes the time of the construction, and memory for one operation at a time.
    Values from elsewhere (NumPy, files) are kept as long as the model. Changes of values (``init``,
    ``to(dtype)``, adapters) must be made in the context. Ranks may enter the context independently
    and with different values. `build` uses the values of rank 0.

    Raises:
        RuntimeError: a tensor was requested on an accelerator, or an operation on a deferred tensor
            (for example, a read of its address) cannot be recorded.
    """
    with recorded() as (recording, modules):
        yield
    for module in modules:
        recording.note_versions(module)
        recordings[module] = recording


@contextmanager
def recorded() -> Iterator[tuple[Recording, Mapping[nn.Module, None]]]:
    """Record constructions in this context. Yield the recording and the constructed modules."""
    recording = Recording()
    seen: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()

    def note(module: nn.Module, name: str, value: object) -> None:
        seen[module] = None

    handles = [
        register(note)
        for register in (
            module_hooks.register_module_parameter_registration_hook,
            module_hooks.register_module_buffer_registration_hook,
            module_hooks.register_module_module_registration_hook,
        )
    ]
    try:
        with recording, _OnCpu(recording):
            yield recording, seen
    finally:
        for handle in handles:
            handle.remove()


def is_recorded_innermost() -> bool:
    """Return whether torch's innermost modes are those of `recorded`. Only then may it end."""
    is_last = isinstance(current_dispatch_mode(), Recording)
    return is_last and isinstance(_get_current_function_mode(), _OnCpu)  # type: ignore[no-untyped-call]


class _OnCpu(TorchFunctionMode):
    """Mode in which deferred tensors report the CPU, and Python and NumPy can read their values."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and self._recording.knows(args[0]):
            if func in _PRETENDED:
                return _PRETENDED[func]
            if func is Tensor.data_ptr:
                raise RuntimeError(
                    "deferred_init(): a deferred tensor has no address: compare tensors by `is`"
                )
            if func in _READS:
                found = func(self._recording.value(args[0]), *args[1:], **(kwargs or {}))
                if func is not Tensor.tolist:
                    found.flags.writeable = False  # writes by NumPy could not be recorded
                return found
        elif kwargs:
            _check_device(func, kwargs.get("device"))  # checked before torch initializes the device
        return func(*args, **(kwargs or {}))


def _check_device(func: object, device: Any) -> None:
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        name = getattr(func, "__name__", func)  # foreign: functions of torch
        raise RuntimeError(
            f"deferred_init(): {name} asks for device {device}; a "
            "deferred model is made on the CPU, and build() moves it: leave the device out"
        )
