"""Construction without memory: what a model's ``__init__`` computes is recorded, and done later.

See [Note: recording] in zero_core.tape. Each random operation is run once while it is recorded,
on memory that is freed at once: so the generator advances as in an ordinary construction, and the
state before each operation is known. What Python wants to see during construction (a number, a
shape that depends on values) is computed at once. Deferred tensors are on the meta device but say
that they are on the CPU while they are under construction, for ``torch.nn.init`` leaves meta
tensors out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from zero_core.tape import Entry, Recording, Ref, storage_of

__all__ = ["deferred_init", "is_recorded_innermost", "recorded", "recordings_of"]

_META = torch.device("meta")
_OVERWRITES = {
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "zero_"),
}
# What deferred tensors say of themselves while they are under construction.
_PRETENDED = {
    Tensor.device.__get__: torch.device("cpu"),
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# The modules made under deferred_init(), each with what was recorded of it.
_recordings: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


@contextmanager
def deferred_init() -> Iterator[None]:
    """Within, modules are made without memory; `zero_core.build` gives them their values.

    Parameters and buffers are on the meta device. Their values will be those of an ordinary
    construction on the CPU from the same seed, bit for bit; the default generator is left as such
    a construction leaves it. It takes the time of the construction and the memory of one tensor;
    values that come from elsewhere (NumPy, files) are kept until the model is gone. Any change of
    values (``init``, ``to(dtype)``, adapters) belongs within. Ranks need not enter it together nor
    agree: `build` takes rank 0's values.

    Raises:
        RuntimeError: within, a tensor was asked for on another device than the CPU, or something
            was done to a deferred tensor that cannot be recorded; it names the operation.
    """
    with recorded() as (recording, modules):
        yield
    for module in modules:
        recording.note_versions(module)
        _recordings[module] = recording


@contextmanager
def recorded() -> Iterator[tuple[Recording, Mapping[nn.Module, None]]]:
    """Within, constructions are recorded: the recording, and the modules in order of making."""
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
        with _Recorder(recording), _OnCpu(recording):
            yield recording, seen
    finally:
        for handle in handles:
            handle.remove()


def is_recorded_innermost() -> bool:
    """Whether `recorded` is the last of torch's modes that was entered, and so can be left now."""
    is_last = isinstance(_get_current_dispatch_mode(), _Recorder)
    return is_last and isinstance(_get_current_function_mode(), _OnCpu)  # type: ignore[no-untyped-call]


def recordings_of(model: nn.Module) -> list[Recording]:
    """What was recorded of ``model`` and its parts."""
    found = {id(r): r for m in model.modules() if (r := _recordings.get(m)) is not None}
    return list(found.values())


class _Recorder(TorchDispatchMode):
    """Puts what is made within on the meta device and writes the tape."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here, what is on the meta device says so
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        has_device = any(a.name == "device" for a in func._schema.arguments)
        is_factory = has_device and not tensors
        if not is_factory and not any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        _check_device(func, kwargs.get("device"))
        if any(t.is_meta and not self._recording.knows(t) for t in tensors):
            raise RuntimeError(
                f"deferred_init(): {func} was given a tensor on the meta device that was not made "
                "within: make the whole model under one deferred_init()"
            )
        written = _written(func, args, kwargs)
        has_result = any("Tensor" in str(r.type) for r in func._schema.returns)
        if not has_result or any(not t.is_meta for t in written):
            return self._run(func, args, kwargs, written)
        on_meta = {}
        if is_factory or kwargs.get("device") is not None:
            kwargs["device"], on_meta = torch.device("cpu"), {"device": _META}
        sizes = [t.untyped_storage().nbytes() for t in written]
        try:
            out = func(*_on_meta(args), **(_on_meta(kwargs) | on_meta))
        except NotImplementedError:  # its shape depends on values
            return self._run(func, args, kwargs, written)
        if sizes != [t.untyped_storage().nbytes() for t in written]:
            raise RuntimeError(
                f"deferred_init(): {func} resizes a tensor, which cannot be deferred"
            )
        self._record(func, args, kwargs, tensors, written, pytree.tree_leaves(out))
        return out

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        written: list[Tensor],
        results: list[Any],
    ) -> None:
        given = {storage_of(t) for t in tensors if t.is_meta}
        made = tuple(
            Ref.of(r) if isinstance(r, Tensor) and storage_of(r) not in given else None
            for r in results
        )
        for ref, result in zip(made, results, strict=True):
            if ref is not None:
                self._recording.add_storage(result)
        name = func._schema.name.removeprefix("aten::")
        if name in _ALLOCATIONS or not (written or any(made)):
            return
        overwritten = [t for t in written if name in _OVERWRITES and _is_whole(t)]
        generator = kwargs.get("generator") or torch.default_generator
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = generator.get_state() if is_random else None
        if is_random:  # on memory of its own: only the generator moves on
            func(*self._real(args, overwritten), **self._real(kwargs, overwritten))
        stored_args, stored_kwargs = pytree.tree_map_only(Tensor, _stored, (args, kwargs))
        overwrites = frozenset(storage_of(t) for t in overwritten)
        entry = Entry(
            func,
            stored_args,
            stored_kwargs,
            made,
            frozenset(given - overwrites),
            overwrites | {r.storage for r in made if r is not None},
            generator,
            state,
            torch.get_default_dtype(),
        )
        self._recording.add(entry, written)

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Run ``func`` for real: its result is needed now."""
        if any(t.is_meta for t in written):
            raise RuntimeError(
                f"deferred_init(): {func} changes a tensor in a way that cannot be deferred: do it "
                "on a tensor made outside, and copy_() the result"
            )
        return func(*self._real(args), **self._real(kwargs))

    def _real(self, tree: Any, overwritten: Sequence[Tensor] = ()) -> Any:
        """``tree`` with values in place of deferred tensors; of those overwritten, any."""

        def real(tensor: Tensor) -> Tensor:
            if any(tensor is t for t in overwritten):
                return self._recording.blank(tensor)
            return self._recording.value(tensor) if tensor.is_meta else tensor

        return pytree.tree_map_only(Tensor, real, tree)


class _OnCpu(TorchFunctionMode):
    """Lets deferred tensors say that they are on the CPU, and gives their values to Python."""

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
                    found.flags.writeable = False  # what NumPy writes is not recorded
                return found
        elif kwargs:
            _check_device(func, kwargs.get("device"))  # before torch looks for the device
        return func(*args, **(kwargs or {}))


def _check_device(func: object, device: Any) -> None:
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"deferred_init(): {getattr(func, '__name__', func)} asks for device {device}; a "
            "deferred model is made on the CPU, and build() moves it: leave the device out"
        )


def _is_whole(tensor: Tensor) -> bool:
    """Whether ``tensor`` is all of its storage."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and nbytes == tensor.untyped_storage().nbytes()


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(_META), tree)


def _stored(tensor: Tensor) -> object:
    return Ref.of(tensor) if tensor.is_meta else tensor.detach().clone()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    leaves = pytree.tree_leaves([given.get(name) for name in changed])
    return [t for t in leaves if isinstance(t, Tensor)]
