"""Parameters that are partitioned over the ranks before their model has an engine.

They are ZeRO-3's partitioned parameters (Rajbhandari et al., arXiv 1910.02054, section 5.3).

[Note: partitioned parameters]
    partitioned  a parameter without its value: its class is `Partitioned`, and its ``data`` is one
                 NaN on the CPU, expanded to its shape. Reads give NaN. Writes are refused
    value        the tensor that the parameter represents: at first a recording of its construction,
                 which rank 0 replays at the first gather. Then the value is split into parts
    part         this rank's slice of the flat value, [ceil(numel / world size)], on the CPU. After
                 an engine has ended: this rank's elements of the parameter's shard
    gathered     an ordinary parameter with the whole value on the CPU of every rank, within
                 `gathered_params`

Gathering is collective. Drawing new values for a partitioned parameter (`torch.nn.init`) is
collective too, and rank 0's draw is used. Draws are refused while any parameter is gathered,
because the surrounding code may run on one rank only.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core import RankMismatchError, ShardedModel, adapters, engine_of
from zero_core.errors import ConfigError

_CASTS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "xpu"}
_DESCRIBES = {"dim", "dtype", "element_size", "ndim", "nelement", "numel", "shape", "size"}
_DRAWS = {"fill_", "normal_", "uniform_", "zero_"}
_WRITES = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
}
_VALUE = "_partitioned_value"
"""Name of the parameter attribute that holds its `PartitionedValue`."""

_num_gathered = 0
"""Number of `gathered_params` blocks that this process is in."""


@dataclass
class PartitionedValue:
    """Location of a partitioned parameter's value. See [Note: partitioned parameters].

    Attributes:
        recorded: recording that computes the value, and the deferred tensor within the recording.
        spans: range of elements that each rank's part covers; None: slices of equal length.
        spec: set with ``spans``. Converts the elements to the parameter's value.
        shape: shape of the kept value while the parameter is gathered.
        number: position in the order of partitioning, which is the same on every rank.
    """

    control: adapters.ControlGroup
    device: torch.device
    recorded: tuple[adapters.Recording, Tensor] | None = None
    spans: Sequence[tuple[int, int]] | None = None
    spec: adapters.ParamSpec | None = None
    part: Tensor | None = None
    casts: list[torch.dtype] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)

    def gather(self, param: Tensor) -> Tensor:
        """Return the whole value of ``param``, on the CPU. Every rank must call it."""
        if param.dtype.is_floating_point and not bool(param.data.reshape(-1)[:1].isnan().all()):
            _refuse("written to", param)  # torch itself refuses writes to several elements
        if self.recorded is not None:
            is_mine = self.control.rank == 0
            value = self.computed() if is_mine else _empty_off_heap(param.numel(), param.dtype)
            value = value.view(param.shape)
            self.send(value, source=0)
            return value
        assert self.part is not None, "a value is either recorded or in parts"
        if self.spec is not None:
            return self.spec.to_values(self.joined(param.numel(), param.dtype))
        rows = _empty_off_heap(self.part.numel() * self.control.world_size, param.dtype)
        if param.numel() > 0:
            self.control.gather_into(rows.view(torch.uint8), self.part.view(torch.uint8))
        return rows[: param.numel()].view(param.shape)

    def joined(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self.spans is not None
        assert self.part is not None
        value = _empty_off_heap(numel, dtype)
        for rank, (low, high) in enumerate(self.spans):
            if rank == self.control.rank:
                value[low:high].copy_(self.part)
            self.send(value[low:high], source=rank)
        return value

    @torch.no_grad()
    def computed(self) -> Tensor:
        assert self.recorded is not None, "only recorded values are computed"
        recording, tensor = self.recorded
        value = recording.value(tensor)
        for dtype in self.casts:
            value = value.to(dtype)
        return value.contiguous()

    def send(self, value: Tensor, *, source: int) -> None:
        """Broadcast the contiguous ``value`` of rank ``source`` into ``value`` of the others."""
        if value.numel() == 0:
            return
        flat = value.detach().view(-1).view(torch.uint8)
        staged = flat.to(self.device)
        self.control.broadcast(staged, source=source)
        if staged is not flat and self.control.rank != source:
            flat.copy_(staged)

    def keep(self, value: Tensor) -> None:
        numel = -(-value.numel() // self.control.world_size)
        if self.part is None or self.part.numel() != numel or self.part.dtype != value.dtype:
            self.part = _empty_off_heap(numel, value.dtype)
        low = self.control.rank * numel
        mine = value.detach().reshape(-1)[low : low + numel]
        self.part[: mine.numel()].copy_(mine)
        self.recorded, self.casts, self.spans, self.spec = None, [], None, None

    def cast(self, dtype: torch.dtype) -> None:
        if self.part is not None:
            self.part = _copy_off_heap(self.part, dtype)
        else:
            self.casts.append(dtype)

    def copied(self) -> PartitionedValue:
        part = None if self.part is None else _copy_off_heap(self.part, self.part.dtype)
        return PartitionedValue(
            self.control, self.device, self.recorded, self.spans, self.spec, part, list(self.casts)
        )


class Partitioned(nn.Parameter):
    """Class of a parameter while it is partitioned. See [Note: partitioned parameters]."""

    _partitioned_value: PartitionedValue

    @property
    def is_deferred(self) -> bool:
        return self._partitioned_value.recorded is not None

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's part, which may end with padding. A `_RecordedPart` if `is_deferred`."""
        value = self._partitioned_value
        if value.part is not None:
            return value.part
        numel = -(-self.numel() // value.control.world_size)
        part = torch.empty(numel, dtype=self.dtype, device="meta").as_subclass(_RecordedPart)
        part.param = self
        return part

    def partition_numel(self) -> int:
        return self.ds_tensor.numel()

    def full_value(self) -> Tensor:
        value = self._partitioned_value
        return value.computed() if self.is_deferred else value.gather(self)

    def free_value(self) -> None:
        self._partitioned_value.part = None

    def set_value(self, value: Tensor) -> None:
        self._partitioned_value.keep(value.to(self.dtype))

    def make_ordinary(self) -> None:
        del self._partitioned_value
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(_placeholder(self.shape, self.dtype), self.requires_grad)
            partition(copied, self._partitioned_value.copied())
            memo[id(self)] = copied
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("pickled", self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")  # foreign: torch's functions and descriptors
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes "tensor"
        with torch._C.DisableTorchFunctionSubclass():
            if is_partitioned(kwargs.get("out")):
                _refuse(f"changed by {name}", kwargs["out"])
            if not is_partitioned(target):
                return func(*args, **kwargs)
            # foreign: torch's functions. A draw overwrites the value without reading it.
            is_draw = name in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init"
            if is_draw and not _num_gathered:
                with gathered_params([target], modifier_rank=0):
                    func(*args, **kwargs)
                return target
            is_in_place = name.endswith("_") and not name.endswith("__")
            if (is_in_place and name != "requires_grad_") or name in _WRITES:
                _refuse(f"changed by {name}", target)
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                return _assign(target, args[1])
            if name == "full_like":  # torch's Adagrad makes a state that the engine does not use
                return _small(func, args, kwargs).expand(target.shape)
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return func(*args).as_subclass(_Absent)
            return _cast(func, args, kwargs) if name in _CASTS else func(*args, **kwargs)


class _RecordedPart(Tensor):
    """This rank's part of a value that is only recorded.

    Every use except reading its shape or dtype computes and splits the value, which is collective.
    """

    param: Partitioned

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # foreign: torch's functions and descriptors
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
        if name not in _DESCRIBES:
            args, kwargs = pytree.tree_map_only(cls, _computed_part, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _computed_part(part: _RecordedPart) -> Tensor:
    with gathered_params([part.param]):
        computed = _value(part.param).part
    assert computed is not None, "a gathered value is in parts"
    return computed


class _Absent(Tensor):
    """Stand-in for ``data`` of a partitioned parameter, or for a cast of it. It reads as NaN."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_cast = getattr(func, "__name__", "") in _CASTS  # foreign: torch's functions
        with torch._C.DisableTorchFunctionSubclass():
            if is_cast and isinstance(args[0], _Absent):
                return _cast(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def is_partitioned(tensor: object) -> TypeGuard[Partitioned]:
    return type(tensor) is Partitioned


def value_of(param: object) -> PartitionedValue | None:
    """Return ``param``'s value, or None unless it is partitioned or gathered without an engine."""
    if not isinstance(param, nn.Parameter):
        return None
    found: PartitionedValue | None = vars(param).get(_VALUE)
    is_taken = found is not None and not is_partitioned(param) and engine_of(param) is not None
    return None if is_taken else found


def can_partition(param: object) -> TypeGuard[nn.Parameter]:
    """Whether ``param`` is an ``nn.Parameter``, of no subclass, and its dtype has a NaN."""
    return type(param) is nn.Parameter and (param.is_floating_point() or param.is_complex())


def partition(param: nn.Parameter, value: PartitionedValue) -> None:
    """Replace the value of ``param`` by a placeholder. ``value`` describes where the value is."""
    assert can_partition(param), "other classes may do more than hold a value"
    hole = _placeholder(param.shape, param.dtype)
    if param.is_meta:  # its ``data`` cannot be set to a CPU tensor
        torch._C._swap_tensor_impl(param, nn.Parameter(hole, param.requires_grad))
    else:
        param.data = hole
    param.__class__ = Partitioned
    vars(param)[_VALUE] = value


@torch.no_grad()
def leave_partitioned(engine: ShardedModel) -> None:
    """Close ``engine`` and leave the current values in its model.

    At stages 0 to 2 parameters keep their values. At stage 3, or if an exchange of values has
    failed, they become partitioned: each rank keeps its elements in host memory. Parameters that
    cannot be partitioned are gathered, so every rank must call it. Raises RuntimeError after an
    interrupted ``step()``.
    """
    for param, spec, control, spans, local in engine.leave_shards():
        part = _copy_off_heap(local, local.dtype)
        value = PartitionedValue(control, engine.device, spans=spans, spec=spec, part=part)
        if isinstance(param, nn.Parameter) and can_partition(param):
            partition(param, value)
        else:
            param.data = spec.to_values(value.joined(spec.slot_numel, spec.segment_dtype))


@contextmanager
def gathered_params(
    params: Iterable[object], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Gather the partitioned parameters among ``params`` within this context.

    Each of them holds its whole value on the CPU of every rank. At the end all ranks keep the value
    of rank ``modifier_rank``. By default, and when the body raises, changes are lost. Other objects
    among ``params`` are ignored. Every rank must enter it with the same parameters.

    Raises:
        ValueError: there is no rank ``modifier_rank``.
        RankMismatchError: at the end, ranks hold different shapes or dtypes.
    """
    global _num_gathered
    unique = {id(p): p for p in params}.values()  # by id, because tensors' == is elementwise
    found = [p for p in unique if isinstance(p, nn.Parameter) and value_of(p) is not None]
    found.sort(key=lambda p: _value(p).number)
    for world_size in {_value(param).control.world_size for param in found}:
        if modifier_rank is not None and not 0 <= modifier_rank < world_size:
            raise ValueError(f"modifier_rank = {modifier_rank}: expected a rank below {world_size}")
    gathered: list[nn.Parameter] = []
    _num_gathered += 1
    try:
        for param in found:
            if not is_partitioned(param):
                continue
            with torch.no_grad():
                value = _value(param)
                full = value.gather(param)
                if value.recorded is not None:
                    value.keep(full)
                value.shape = full.shape
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                param.data = full
            gathered.append(param)
        yield
        if modifier_rank is not None:
            _publish([param for param in found if value_of(param) is not None], modifier_rank)
    finally:
        _num_gathered -= 1
        for param in gathered:
            _release(param)


def _value(param: nn.Parameter) -> PartitionedValue:
    value: PartitionedValue = vars(param)[_VALUE]
    return value


@torch.no_grad()
def _publish(params: Sequence[nn.Parameter], source: int) -> None:
    if not params:
        return
    control = _value(params[0]).control
    described = zlib.crc32(repr([(tuple(p.shape), p.dtype) for p in params]).encode())
    if len(set(control.gather(torch.tensor([described])).tolist())) > 1:
        raise RankMismatchError(
            f"rank {control.rank}: at the end of a gather, ranks hold parameters of different "
            f"shapes or dtypes (here {[tuple(p.shape) for p in params]}): gather the same "
            "parameters on every rank, and change shapes and dtypes on all of them"
        )
    for param in params:
        value = _value(param)
        full = param.data.contiguous()
        value.send(full, source=source)
        param.data = full
        value.keep(full)
        value.shape = full.shape


@torch.no_grad()
def _release(param: nn.Parameter) -> None:
    if is_partitioned(param):
        return  # an engine was made and has ended within the block
    value = value_of(param)
    if value is None:  # an engine was made within the block and owns the parameter
        vars(param).pop(_VALUE, None)
        return
    assert value.part is not None, "a gathered value is in parts"
    param.data = _placeholder(value.shape, value.part.dtype)
    param.__class__ = Partitioned


def _refuse(what: str, param: Tensor) -> NoReturn:
    raise RuntimeError(
        f"a parameter of shape {tuple(param.shape)} was {what} while it is sharded over the ranks: "
        "do it within deepspeed.zero.GatheredParameters([param], modifier_rank=...), or after the "
        "engine was made"
    )


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.tensor(fill).to(dtype).expand(shape)


def _empty_off_heap(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor outside the heap, whose memory the system reclaims when it is freed.

    On the heap, parts would fill the holes of freed whole values and keep that memory in use.
    """
    storage = adapters.zeroed(numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]


def _copy_off_heap(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_off_heap(tensor.numel(), dtype).copy_(tensor)


def _assign(param: Partitioned, value: Tensor) -> None:
    """Accept ``param.data = value`` for a cast. Refuse other values, which would be lost."""
    if value is param:
        return
    if not isinstance(value, _Absent):
        _refuse("given other data", param)
    if value.dtype != param.dtype:
        _value(param).cast(value.dtype)
        param.data = value.as_subclass(Tensor)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _small(func, args, kwargs)
    if not isinstance(result, Tensor):
        return result
    shape = args[0].shape
    if result.is_meta:
        return result.expand(shape)
    return _placeholder(shape, result.dtype).as_subclass(_Absent)


def _small(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    others = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return func(_placeholder((), args[0].dtype), *args[1:], **others)


@dataclass(frozen=True)
class Made:
    """Modules made by a `partitioned_init` block and, after it, their partitioned parameters."""

    modules: Mapping[nn.Module, None]
    params: list[nn.Parameter]


@contextmanager
def partitioned_init(
    process_group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[Made]:
    """Make modules without memory in this context, and partition their parameters at its end.

    Unlike under `zero_core.deferred_init`, parameters can be read and changed before there is an
    engine, within `gathered_params`. Their values are rank 0's. Integer parameters and subclasses
    of ``nn.Parameter`` are not partitioned. At the end every rank computes its own buffers and
    other tensors. Every rank must enter it and make the same modules. Raises ConfigError if several
    ranks were started and torch.distributed is not initialised, and the errors of
    `zero_core.deferred_init`.

    Args:
        process_group: ranks that share the parameters. Default: all ranks.
        dtype: dtype to which floating parameters are cast at the end. Default: no cast.
    """
    ranks = adapters.find_ranks(process_group, None)
    control = ranks.connect()
    with adapters.recorded() as (recording, modules):
        made = Made(modules, [])
        yield made
    for module in modules:
        for param in module._parameters.values():
            if can_partition(param) and recording.knows(param):
                tape = (recording, param.detach())
                partition(param, PartitionedValue(control, ranks.device, recorded=tape))
                if dtype is not None and param.is_floating_point():
                    param.data = param.to(dtype)
                made.params.append(param)
    _give_the_rest(recording, modules)


@torch.no_grad()
def partition_module(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Partition the parameters of ``module`` that `can_partition` allows, and return them.

    The values are rank 0's, floating ones cast to ``dtype``. Every rank must call it.
    """
    ranks = adapters.find_ranks(process_group, None)
    control = ranks.connect()
    partitioned = []
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no value to shard: make the module within "
                "deepspeed.zero.Init()"
            )
        if not can_partition(param):
            continue
        value = PartitionedValue(control, ranks.device)
        full = param.detach().cpu().contiguous()
        value.send(full, source=0)
        full = full.to(dtype) if dtype is not None and full.is_floating_point() else full
        value.keep(full)
        param.data = torch.empty((), dtype=full.dtype).expand(param.shape)
        partition(param, value)
        partitioned.append(param)
    return partitioned


def _give_the_rest(recording: adapters.Recording, modules: Mapping[nn.Module, None]) -> None:
    storages: dict[int, torch.UntypedStorage] = {}
    for module in modules:
        kept = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules")}
        for tensor in pytree.tree_leaves([kept, *module._parameters.values()]):
            if isinstance(tensor, Tensor) and recording.knows(tensor):
                number = adapters.storage_of(tensor)
                value = recording.value(tensor)
                shared = storages.setdefault(number, value.untyped_storage())
                value.set_(shared, value.storage_offset(), value.shape, value.stride())
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                torch._C._swap_tensor_impl(tensor, value)
