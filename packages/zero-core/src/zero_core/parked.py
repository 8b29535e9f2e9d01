"""Parameters of a model that has no engine yet, sharded over the ranks.

[Note: parked parameters]
parked      the parameter's ``data`` is one NaN expanded to its shape, on the CPU, so that reading
            it is loud; its class is `Parked` meanwhile, which refuses what would get lost. The
            parameter stays the same object throughout
value       what the parameter would hold. At first it may be only *recorded*, and rank 0 computes
            it when it is asked for; from then on it lies in parts
part        [ceil(numel / world size)], CPU: this rank's slice of the flat value; of one that an
            engine has left, what lay in this rank's shard
open        within `unparked` the parameter is an ordinary one that holds the whole value, on the
            CPU of every rank

Opening is collective: ranks open the same parameters at the same place. So is drawing new values
for a parked parameter (by `torch.nn.init`, mostly), as modules do for their children's: rank 0's
values count. Where anything is open that is refused: what surrounds it may be for one rank alone.

A copy (``deepcopy``) of a parked parameter is another parked one. What `zero_core.build` finds
parked it takes one parameter at a time. These are the partitioned parameters of ZeRO-3 (Rajbhandari
et al., arXiv 1910.02054, section 5.3), before there is an engine.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from zero_core.collectives import ControlGroup
from zero_core.errors import RankMismatchError
from zero_core.tape import Recording, zeroed

__all__ = [
    "Held",
    "Parked",
    "apart",
    "can_park",
    "held_of",
    "is_parked",
    "make_ordinary",
    "park",
    "unparked",
]

_CASTS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "xpu"}
_DRAWS = {"fill_", "normal_", "uniform_", "zero_"}
_WRITES = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
}

_num_open = 0
"""In how many `unparked` this process is."""


@dataclass
class Held:
    """Where the value of a parked parameter is; see [Note: parked parameters].

    Attributes:
        control: the ranks that share it.
        device: where their collectives run.
        recorded: what computes the value, and the deferred tensor that it is the value of.
        spans: which elements of the flat value each rank's part has; None: slices of one length.
        part: this rank's slice.
        casts: dtypes that what is recorded goes through, in order.
        shape: while open, that of the value that is kept, whatever shape the parameter is given.
        number: in the order of parking, which is that of every rank.
    """

    control: ControlGroup
    device: torch.device
    recorded: tuple[Recording, Tensor] | None = None
    spans: Sequence[tuple[int, int]] | None = None
    part: Tensor | None = None
    casts: list[torch.dtype] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)

    def whole(self, param: Tensor) -> Tensor:
        """The value of ``param``, on the CPU; every rank must call it."""
        self._check_unwritten(param)
        if self.recorded is not None:
            is_mine = self.control.rank == 0
            value = self.computed() if is_mine else apart(param.numel(), param.dtype)
            value = value.view(param.shape)
            self.send(value, source=0)
            return value
        assert self.part is not None, "it is recorded or lies in parts"
        if self.spans is not None:
            return self.joined(param, self.spans, self.part)
        rows = apart(self.part.numel() * self.control.world_size, param.dtype)
        if param.numel() > 0:
            self.control.gather_into(rows.view(torch.uint8), self.part.view(torch.uint8))
        return rows[: param.numel()].view(param.shape)

    def joined(self, param: Tensor, spans: Sequence[tuple[int, int]], part: Tensor) -> Tensor:
        """The value of which each rank has a part; they differ in length, many are empty."""
        value = apart(param.numel(), param.dtype)
        for rank, (low, high) in enumerate(spans):
            if rank == self.control.rank:
                value[low:high].copy_(part)
            self.send(value[low:high], source=rank)
        return value.view(param.shape)

    @torch.no_grad()
    def computed(self) -> Tensor:
        """The recorded value, computed on this rank alone."""
        assert self.recorded is not None, "only what is recorded is computed"
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
        """``value`` is the parameter's from now on; of it this rank's slice is kept."""
        numel = -(-value.numel() // self.control.world_size)
        if self.part is None or self.part.numel() != numel or self.part.dtype != value.dtype:
            self.part = apart(numel, value.dtype)
        low = self.control.rank * numel
        mine = value.detach().reshape(-1)[low : low + numel]
        self.part[: mine.numel()].copy_(mine)
        self.recorded, self.casts, self.spans = None, [], None

    def cast(self, dtype: torch.dtype) -> None:
        """The value goes to ``dtype``."""
        if self.part is not None:
            self.part = apart(self.part.numel(), dtype).copy_(self.part)
        else:
            self.casts.append(dtype)

    def copied(self) -> Held:
        """The same value for another parameter."""
        part = None
        if self.part is not None:
            part = apart(self.part.numel(), self.part.dtype).copy_(self.part)
        return Held(self.control, self.device, self.recorded, self.spans, part, list(self.casts))

    def _check_unwritten(self, param: Tensor) -> None:
        if param.dtype.is_floating_point and not bool(param.data.reshape(-1)[:1].isnan().all()):
            refuse("written to", param)  # of one element: torch refuses to write to the others


class Parked(nn.Parameter):
    """The class of a parameter while it is parked; see [Note: parked parameters]."""

    _held: Held

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Another parked parameter: each rank copies its part."""
        if id(self) not in memo:
            copied = nn.Parameter(_placeholder(self.shape, self.dtype), self.requires_grad)
            park(copied, self._held.copied())
            memo[id(self)] = copied
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickled", self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")  # so torch.nn.init names it
        with torch._C.DisableTorchFunctionSubclass():
            if is_parked(kwargs.get("out")):
                refuse(f"changed by {name}", kwargs["out"])
            if not is_parked(target):
                return func(*args, **kwargs)
            if _is_draw(func, name) and not _num_open:
                return _initialize(func, target, args, kwargs)
            if _is_write(name):
                refuse(f"changed by {name}", target)
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                return _assign(target, args[1])
            if name == "full_like":  # Adagrad, when it is made: its state is not what is used
                return _small(func, args, kwargs).expand(target.shape)
            return _cast(func, args, kwargs) if name in _CASTS else func(*args, **kwargs)


def _initialize(func: Any, param: nn.Parameter, args: tuple[Any, ...], kwargs: Any) -> nn.Parameter:
    """Draw the parameter's values on every rank, and take rank 0's."""
    with unparked([param], modifier_rank=0):
        func(*args, **kwargs)
    return param


class _Absent(Tensor):
    """What a cast of a parked parameter gives: a dtype and a shape, and NaN."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def is_parked(tensor: object) -> bool:
    """Whether ``tensor`` is a parameter that is parked, and not open."""
    return type(tensor) is Parked


def held_of(param: object) -> Held | None:
    """Where the value of ``param`` is, if it is parked or open."""
    return getattr(param, "_held", None) if isinstance(param, nn.Parameter) else None


def can_park(param: object) -> TypeGuard[nn.Parameter]:
    """Whether ``param`` is of torch's own class, not parked, and has a NaN to be replaced by."""
    return type(param) is nn.Parameter and (param.is_floating_point() or param.is_complex())


def park(param: nn.Parameter, held: Held) -> None:
    """Take the value out of ``param``, which can be parked; ``held`` says where it is."""
    assert can_park(param), "what a class of its own does is not known"
    hole = _placeholder(param.shape, param.dtype)
    if param.is_meta:  # it does not take the data of another device
        torch._C._swap_tensor_impl(param, nn.Parameter(hole, param.requires_grad))
    else:
        param.data = hole
    param.__class__ = Parked
    param._held = held  # type: ignore[attr-defined]


def make_ordinary(param: nn.Parameter) -> None:
    """Make ``param``, the same object, an ordinary CPU tensor of its shape without memory.

    Nothing to do where it has memory of its own.
    """
    held = held_of(param)
    if held is not None:
        param.__class__ = nn.Parameter
        del param._held  # type: ignore[attr-defined]
    if param.is_meta:
        stand_in = torch.empty((), dtype=param.dtype).expand(param.shape)
        torch._C._swap_tensor_impl(param, nn.Parameter(stand_in, param.requires_grad))


@contextmanager
def unparked(params: Iterable[object], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Within, parked parameters among ``params`` are ordinary ones that hold their values whole.

    On the CPU of every rank, those parameters alone. At the end they have the values that rank
    ``modifier_rank`` holds; by default they are read only: what was changed in them is lost, as
    it is when the body raises. May be nested: what an inner one brought to all ranks stays. Every
    rank must enter it with the same parameters; what is not parked is left alone.

    Raises:
        ValueError: there is no rank ``modifier_rank``.
        RankMismatchError: at the end, ranks hold different shapes or dtypes.
    """
    global _num_open
    unique = {id(p): p for p in params}.values()  # tensors compare by value
    found = [p for p in unique if isinstance(p, nn.Parameter) and held_of(p) is not None]
    found.sort(key=lambda p: p._held.number)  # type: ignore[attr-defined]
    _check_rank(found, modifier_rank)
    opened: list[nn.Parameter] = []
    _num_open += 1
    try:
        for param in found:
            if is_parked(param):
                _open(param)
                opened.append(param)
        yield
        if modifier_rank is not None:
            _publish([param for param in found if held_of(param) is not None], modifier_rank)
    finally:
        _num_open -= 1
        for param in opened:
            _close(param)


def _check_rank(params: Sequence[nn.Parameter], rank: int | None) -> None:
    for param in params:
        world_size = param._held.control.world_size  # type: ignore[attr-defined]
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"modifier_rank = {rank}: expected a rank below {world_size}")


@torch.no_grad()
def _open(param: nn.Parameter) -> None:
    held = param._held  # type: ignore[attr-defined]
    value = held.whole(param)
    if held.recorded is not None:
        held.keep(value)
    held.shape = value.shape
    param.__class__ = nn.Parameter
    param.data = value


@torch.no_grad()
def _publish(params: Sequence[nn.Parameter], source: int) -> None:
    """Bring rank ``source``'s values of open ``params`` to all ranks."""
    if not params:
        return
    control = params[0]._held.control  # type: ignore[attr-defined]
    described = zlib.crc32(repr([(tuple(p.shape), p.dtype) for p in params]).encode())
    if len(set(control.gather(torch.tensor([described])).tolist())) > 1:
        raise RankMismatchError(
            f"rank {control.rank}: at the end of a gather, ranks hold parameters of different "
            f"shapes or dtypes (here {[tuple(p.shape) for p in params]}): gather the same "
            "parameters on every rank, and change shapes and dtypes on all of them"
        )
    for param in params:
        held = param._held  # type: ignore[attr-defined]
        value = param.data.contiguous()
        held.send(value, source=source)
        param.data = value
        held.keep(value)
        held.shape = value.shape


@torch.no_grad()
def _close(param: nn.Parameter) -> None:
    held = held_of(param)
    if held is None:
        return  # an engine has taken it meanwhile
    assert held.part is not None, "what was open lies in parts"
    param.data = _placeholder(held.shape, held.part.dtype)
    param.__class__ = Parked


def refuse(what: str, param: Tensor) -> NoReturn:
    """Raise: ``param`` was used as if it held its value."""
    raise RuntimeError(
        f"a parameter of shape {tuple(param.shape)} was {what} while it is sharded over the ranks: "
        "do it within zero_core.parked.unparked([param], modifier_rank=...) (for scripts of "
        "DeepSpeed: deepspeed.zero.GatheredParameters), or after the engine was made"
    )


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.tensor(fill).to(dtype).expand(shape)


def apart(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory apart from the heap: it is the system's again when it is freed.

    Parts would settle in the holes that whole values leave there, and each gather take new memory.
    """
    storage = zeroed(numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]


def _is_draw(func: Any, name: str) -> bool:
    """Whether ``func`` gives a parameter values that owe nothing to those of before."""
    return name in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init"


def _is_write(name: str) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_in_place or name in _WRITES


def _assign(param: nn.Parameter, value: Tensor) -> None:
    """``param.data = value``: a cast is taken over, anything else would get lost."""
    if value is param:
        return
    if not isinstance(value, _Absent):
        refuse("given other data", param)
    if value.dtype != param.dtype:
        param._held.cast(value.dtype)  # type: ignore[attr-defined]
        param.data = value.as_subclass(Tensor)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A cast or move of a parked parameter; it stays on the CPU until there is an engine."""
    result = _small(func, args, kwargs)
    if not isinstance(result, Tensor):
        return result
    shape = args[0].shape
    if result.is_meta:
        return result.expand(shape)
    return _placeholder(shape, result.dtype).as_subclass(_Absent)


def _small(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of one element in place of the parameter that is the first argument."""
    others = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return func(_placeholder((), args[0].dtype), *args[1:], **others)
