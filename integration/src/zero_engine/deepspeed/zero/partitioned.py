"""Parameters of a model that has no engine yet, partitioned over the ranks.

[Note: partitioned parameters]
partitioned  the parameter's ``data`` is one NaN expanded to its shape, on the CPU, so that a read
             is noticed. Its class is `Partitioned` meanwhile, which refuses writes that would get
             lost. The parameter stays the same object throughout
value        the tensor that the parameter stands for. At first it may be only *recorded*: rank 0
             computes it at the first request. From then on it is split into parts
part         [ceil(numel / world size)], CPU: this rank's slice of the flat value. After an engine
             has ended: this rank's elements of the parameter's shard
gathered     within `gathered_params` the parameter is an ordinary one that holds the whole value,
             on the CPU of every rank

Gathering is collective: ranks gather the same parameters at the same place. So is drawing new
values for a partitioned parameter (by `torch.nn.init`, mostly), as modules do for their children's:
rank 0's values count. Draws are refused while any parameter is gathered, because the code around
them may run on one rank alone.

A copy (``deepcopy``) of a partitioned parameter is partitioned too. `zero_core.build` takes the
values one parameter at a time, by way of `zero_core.protocols.PartitionedParam`. These are the
partitioned parameters of ZeRO-3 (Rajbhandari et al., arXiv 1910.02054, section 5.3), before there
is an engine.
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

from zero_core import RankMismatchError, ShardedModel, engine_of
from zero_core.adapters import (
    ControlGroup,
    ParamSpec,
    Recording,
    find_ranks,
    recorded,
    storage_of,
    zeroed,
)
from zero_core.errors import ConfigError

_CASTS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "xpu"}
_DESCRIBES = {"dim", "dtype", "element_size", "ndim", "nelement", "numel", "shape", "size"}
_DRAWS = {"fill_", "normal_", "uniform_", "zero_"}
_WRITES = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
}
_VALUE = "_partitioned_value"
"""The attribute in which a parameter keeps its `PartitionedValue`."""

_num_gathered = 0
"""How many `gathered_params` blocks this process is in."""


@dataclass
class PartitionedValue:
    """Location of a partitioned parameter's value. See [Note: partitioned parameters].

    Attributes:
        control: the ranks that share it.
        device: where their collectives run.
        recorded: the recording that computes the value, and the deferred tensor it is the value of.
        spans: which elements of its slot each rank's part has; None: slices of one length.
        spec: with ``spans``, which makes the value of the slot's elements.
        part: this rank's slice.
        casts: dtypes that the recorded value is cast to, in order.
        shape: while gathered, that of the value that is kept, whatever shape the parameter gets.
        number: in the order of partitioning, which is the same on every rank.
    """

    control: ControlGroup
    device: torch.device
    recorded: tuple[Recording, Tensor] | None = None
    spans: Sequence[tuple[int, int]] | None = None
    spec: ParamSpec | None = None
    part: Tensor | None = None
    casts: list[torch.dtype] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)

    def gather(self, param: Tensor) -> Tensor:
        """Return the whole value of ``param``, on the CPU. Every rank must call it."""
        if param.dtype.is_floating_point and not bool(param.data.reshape(-1)[:1].isnan().all()):
            _refuse("written to", param)  # of one element: torch refuses other writes
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
        """Return the elements of ``spans``, 1-D. Many of the parts may be empty."""
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
        """Overwrite the contiguous ``value`` with rank ``source``'s."""
        if value.numel() == 0:
            return
        flat = value.detach().view(-1).view(torch.uint8)
        staged = flat.to(self.device)
        self.control.broadcast(staged, source=source)
        if staged is not flat and self.control.rank != source:
            flat.copy_(staged)

    def keep(self, value: Tensor) -> None:
        """Replace the value by ``value``, and keep this rank's slice of it."""
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
        """Whether the value is only recorded: rank 0 alone computes it."""
        return self._partitioned_value.recorded is not None

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's part, which may end with padding. While only recorded: a `_RecordedPart`."""
        value = self._partitioned_value
        if value.part is not None:
            return value.part
        numel = -(-self.numel() // value.control.world_size)
        part = torch.empty(numel, dtype=self.dtype, device="meta").as_subclass(_RecordedPart)
        part.param = self
        return part

    def partition_numel(self) -> int:
        """Return the number of elements of this rank's part. Lightning's summary asks for it."""
        return self.ds_tensor.numel()

    def full_value(self) -> Tensor:
        """Return the whole value on the CPU. Unless `is_deferred`, every rank must call it."""
        value = self._partitioned_value
        return value.computed() if self.is_deferred else value.gather(self)

    def free_value(self) -> None:
        """Free this rank's part, of a value that a build has moved to its engine."""
        self._partitioned_value.part = None

    def set_value(self, value: Tensor) -> None:
        """Keep this rank's part of ``value``, as the build has failed."""
        self._partitioned_value.keep(value.to(self.dtype))

    def make_ordinary(self) -> None:
        """Forget the value: become an ``nn.Parameter`` on the CPU without memory."""
        del self._partitioned_value
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return another partitioned parameter: each rank copies its part."""
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
        target = args[0] if args else kwargs.get("tensor")  # so torch.nn.init names it
        with torch._C.DisableTorchFunctionSubclass():
            if is_partitioned(kwargs.get("out")):
                _refuse(f"changed by {name}", kwargs["out"])
            if not is_partitioned(target):
                return func(*args, **kwargs)
            # foreign: torch's functions. New values do not depend on the earlier ones.
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
            if name == "full_like":  # Adagrad, when it is made: its state is not what is used
                return _small(func, args, kwargs).expand(target.shape)
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return func(*args).as_subclass(_Absent)
            return _cast(func, args, kwargs) if name in _CASTS else func(*args, **kwargs)


class _RecordedPart(Tensor):
    """This rank's part of a value that is only recorded: without memory until it is read.

    Its length and dtype are there. Whatever else is done with it has the value computed and split,
    so every rank must do it.
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
    """``data`` of a partitioned parameter, or a cast of it: a dtype and a shape, and NaN."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_cast = getattr(func, "__name__", "") in _CASTS  # foreign: functions and descriptors
        with torch._C.DisableTorchFunctionSubclass():
            if is_cast and isinstance(args[0], _Absent):
                return _cast(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def is_partitioned(tensor: object) -> TypeGuard[Partitioned]:
    """Whether ``tensor`` is a parameter that is partitioned, and not gathered."""
    return type(tensor) is Partitioned


def value_of(param: object) -> PartitionedValue | None:
    """Return the value of ``param`` if it is partitioned or gathered, and no engine has it."""
    if not isinstance(param, nn.Parameter):
        return None
    found: PartitionedValue | None = vars(param).get(_VALUE)
    is_taken = found is not None and not is_partitioned(param) and engine_of(param) is not None
    return None if is_taken else found


def can_partition(param: object) -> TypeGuard[nn.Parameter]:
    """Whether ``param`` is of torch's own class, not partitioned, and of a dtype that has a NaN."""
    return type(param) is nn.Parameter and (param.is_floating_point() or param.is_complex())


def partition(param: nn.Parameter, value: PartitionedValue) -> None:
    """Take the value out of ``param``, for which `can_partition` holds. ``value`` locates it."""
    assert can_partition(param), "other classes may do more than hold a value"
    hole = _placeholder(param.shape, param.dtype)
    if param.is_meta:  # it does not take the data of another device
        torch._C._swap_tensor_impl(param, nn.Parameter(hole, param.requires_grad))
    else:
        param.data = hole
    param.__class__ = Partitioned
    vars(param)[_VALUE] = value


@torch.no_grad()
def leave_partitioned(engine: ShardedModel) -> None:
    """Close ``engine`` and leave its model the current values, for what follows it.

    At stages 0 to 2 parameters keep their values, as every rank has them all. At stage 3, or where
    a step was broken off, they are partitioned: each rank keeps in host memory what it has of
    them. As `Engine.close`, it starts no exchange with other ranks. But parameters that can't be
    partitioned (integers and those of a class of their own) are gathered, and every rank must call
    it.
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
    """Give partitioned parameters among ``params`` their whole values in this context.

    On the CPU of every rank, those parameters alone. At the end they have the values that rank
    ``modifier_rank`` holds. By default they are read only: changes are lost, as they are when the
    body raises. It may be nested: what an inner one brought to all ranks stays. Every rank must
    enter it with the same parameters. Other objects among ``params`` are left alone.

    Raises:
        ValueError: there is no rank ``modifier_rank``.
        RankMismatchError: at the end, ranks hold different shapes or dtypes.
    """
    global _num_gathered
    unique = {id(p): p for p in params}.values()  # tensors compare by value
    found = [p for p in unique if isinstance(p, nn.Parameter) and value_of(p) is not None]
    found.sort(key=lambda p: _value(p).number)
    for world_size in {_value(param).control.world_size for param in found}:
        if modifier_rank is not None and not 0 <= modifier_rank < world_size:
            raise ValueError(f"modifier_rank = {modifier_rank}: expected a rank below {world_size}")
    gathered: list[nn.Parameter] = []
    _num_gathered += 1
    try:
        for param in found:
            if is_partitioned(param):
                _gather(param)
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
def _gather(param: nn.Parameter) -> None:
    value = _value(param)
    full = value.gather(param)
    if value.recorded is not None:
        value.keep(full)
    value.shape = full.shape
    param.__class__ = nn.Parameter
    param.data = full


@torch.no_grad()
def _publish(params: Sequence[nn.Parameter], source: int) -> None:
    """Bring rank ``source``'s values of gathered ``params`` to all ranks."""
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
        return  # left by an engine meanwhile
    value = value_of(param)
    if value is None:  # an engine has taken it meanwhile
        vars(param).pop(_VALUE, None)
        return
    assert value.part is not None, "a gathered value is in parts"
    param.data = _placeholder(value.shape, value.part.dtype)
    param.__class__ = Partitioned


def _refuse(what: str, param: Tensor) -> NoReturn:
    """Raise: ``param`` was used as if it held its value."""
    raise RuntimeError(
        f"a parameter of shape {tuple(param.shape)} was {what} while it is sharded over the ranks: "
        "do it within deepspeed.zero.GatheredParameters([param], modifier_rank=...), or after the "
        "engine was made"
    )


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.tensor(fill).to(dtype).expand(shape)


def _empty_off_heap(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory apart from the heap, which the system has again once it is freed.

    On the heap, parts would settle in the holes that whole values leave, and each gather would need
    new memory.
    """
    storage = zeroed(numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]


def _copy_off_heap(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_off_heap(tensor.numel(), dtype).copy_(tensor)


def _assign(param: Partitioned, value: Tensor) -> None:
    """Do ``param.data = value`` for a cast, and refuse any other value, which would get lost."""
    if value is param:
        return
    if not isinstance(value, _Absent):
        _refuse("given other data", param)
    if value.dtype != param.dtype:
        _value(param).cast(value.dtype)
        param.data = value.as_subclass(Tensor)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast or move a partitioned parameter, which stays on the CPU until there is an engine."""
    result = _small(func, args, kwargs)
    if not isinstance(result, Tensor):
        return result
    shape = args[0].shape
    if result.is_meta:
        return result.expand(shape)
    return _placeholder(shape, result.dtype).as_subclass(_Absent)


def _small(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with one element in place of the parameter that is its first argument."""
    others = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return func(_placeholder((), args[0].dtype), *args[1:], **others)


@dataclass(frozen=True)
class Made:
    """Modules and parameters made within `partitioned_init`.

    Attributes:
        modules: in order of making; those that are gone are left out.
        params: those that are partitioned, in that order; empty before the end.
    """

    modules: Mapping[nn.Module, None]
    params: list[nn.Parameter]


@contextmanager
def partitioned_init(
    process_group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[Made]:
    """Make modules without memory in this context, and partition their parameters at its end.

    As `zero_core.deferred_init`, but parameters can be read and changed before the engine is made,
    within `gathered_params`. Their values are rank 0's. Buffers and other tensors get their values
    at the end, each rank its own (`zero_core.build` takes rank 0's). Every rank must enter it and
    make the same modules. Parameters of a class of their own stay whole, and so do integers, which
    have no NaN by which a read would be noticed.

    Args:
        process_group: the ranks to share parameters among; default: all, or one rank alone.
        dtype: floating parameters are cast to it at the end; default: they are left as made.

    Yields:
        The modules and parameters made so far.

    Raises:
        ConfigError: torch.distributed is not initialised where several ranks were started.
        RuntimeError: as `zero_core.deferred_init`.
    """
    ranks = find_ranks(process_group, None)
    control = ranks.connect()
    with recorded() as (recording, modules):
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
    """Partition the parameters of ``module``, which have values. Returns the partitioned ones.

    They get rank 0's values, cast to ``dtype`` if they are floating; their own memory is freed.
    Every rank must call it.
    """
    ranks = find_ranks(process_group, None)
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


def _give_the_rest(recording: Recording, modules: Mapping[nn.Module, None]) -> None:
    """Give tensors that are still deferred their values: the same objects, sharing as before."""
    storages: dict[int, torch.UntypedStorage] = {}
    for module in modules:
        kept = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules")}
        for tensor in pytree.tree_leaves([kept, *module._parameters.values()]):
            if isinstance(tensor, Tensor) and recording.knows(tensor):
                number = storage_of(tensor)
                value = recording.value(tensor)
                shared = storages.setdefault(number, value.untyped_storage())
                value.set_(shared, value.storage_offset(), value.shape, value.stride())
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                torch._C._swap_tensor_impl(tensor, value)
