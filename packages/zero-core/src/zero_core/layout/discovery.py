"""Discovery of a model's units: which modules are blocks, and which parameters belong to them.

A block is a child of an ``nn.ModuleList`` or ``nn.Sequential`` that has parameters and its own
forward. Blocks are not searched for further blocks. A parameter that only one block uses belongs to
that block. All other parameters belong to the *root* or the tail, two units that stay gathered to
the end of backward. A list of experts outside of a block makes the callable module that contains
the list a block, because a forward may call only some experts. Such a list is a ``ModuleList`` or
``ModuleDict`` of several modules with "experts" in its name. `note_reader` records that a module
reads a parameter of another module.

The *tail* is one more unit after the blocks, if it has at least `MIN_TAIL_NUMEL` elements. It has
the parameters of modules after the last block in the module tree (a final norm, a head), except
quantized parameters and those that other modules hold (tied weights) or read (`note_reader`). If
the order of use differs from that of the tree, this costs time only: [Note: the tail] in
`zero_core.core.units`.

A *leaf* is a module that is one unit with all its submodules, at any depth of the module tree. It
has ``_is_zero_leaf = True``, or ``zero_optimization.leaf_module`` names it. A leaf without a
forward, such as a list of experts, is gathered when a submodule with parameters is called.

[Note: quantized parameters]
A quantized parameter consists of bytes and metadata. Its *components* are the plain tensors that
hold the bytes:
- of a tensor subclass that wraps others (torchao): the tensors that ``__tensor_flatten__`` names,
  recursively
- of a parameter of another class than ``nn.Parameter`` (bitsandbytes): its own memory and the
  tensors in its attributes, such as ``quant_state.absmax``
- of a frozen ``nn.Parameter`` of integers or of 8-bit floats: the parameter itself
- of a frozen parameter in the same module as such a matrix (its scales): the parameter itself
A component keeps its object, shape, strides and bits: the engine only replaces its memory. All
references (the wrapper, a ``QuantState``, a node of autograd) therefore see the same values.
Components are never cast. A unit has one segment of bytes for all of its components. Other metadata
(block sizes, dtypes) is not sharded. A module may repack its weight for a forward (bitsandbytes
does so on CPUs, in evaluation). The weight's memory and metadata are restored after that forward.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zero_core._torch import inner_tensors, storage_of
from zero_core.config import LeafModuleConfig
from zero_core.errors import ConfigError
from zero_core.protocols import PartitionedParam

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_log = logging.getLogger(__name__)

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_CONTAINERS = (nn.ModuleList, nn.Sequential)
MIN_TAIL_NUMEL = 2**16
"""Smallest number of elements in a separate tail unit. The exchange of fewer elements (128 KiB in
16 bits, 3 us at 50 GB/s) takes less time than the launch of one more collective."""
TAIL_NAME = "tail"
_MAX_DEPTH = 4  # levels of attributes to search: Params4bit.quant_state.state2.absmax has 3
_NO_METADATA = (nn.Module, Enum, type, FunctionType, MethodType, ModuleType)
_read: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Quantized:
    """A quantized parameter of the model: see [Note: quantized parameters]."""

    param: nn.Parameter
    name: str
    components: tuple[Tensor, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the parameter's own memory is the only component."""
        return len(self.components) == 1 and self.components[0] is self.param


@dataclass(frozen=True)
class Discovered:
    """Parameters and units of a model, with components instead of quantized parameters."""

    params: tuple[Tensor, ...]  # each parameter once, in the order of the module tree
    names: tuple[tuple[str, ...], ...]  # all names (`plain_name`). Components add attribute paths
    # Name, module and parameter indices of each unit. The root is first. With ``has_tail`` the tail
    # is last. The module of root and tail is the model.
    units: tuple[tuple[str, nn.Module, tuple[int, ...]], ...]
    has_tail: bool
    quantized: tuple[Quantized, ...]
    opaque: frozenset[int]  # indices of all components
    twins: Mapping[int, int]  # index of a component: index of an earlier one with the same memory


def plain_name(name: str) -> str:
    """Return ``name`` without the wrappers of activation checkpointing and `torch.compile`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def note_reader(module: nn.Module, param: nn.Parameter, *, is_reader: bool = True) -> bool:
    """Record whether ``module`` reads another module's ``param``. Return the previous value."""
    noted = _read.setdefault(module, {})
    found = noted.pop(id(param), None)
    if is_reader:
        noted[id(param)] = param
    return found is not None


def _is_expert_list(name: str, module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_list and "experts" in name.lower() and len(module._modules) > 1


def _blocks(
    prefix: str, module: nn.Module, leaves: LeafModuleConfig
) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if next(child.parameters(), None) is None:
            continue
        is_block = is_container or any(
            _is_expert_list(key, inner) and not leaves.is_leaf(f"{path}.{key}", inner)
            for key, inner in child.named_children()
        )
        # A module without its own forward is never called. torch.compile sets `forward` on objects.
        has_forward = type(child).forward is not nn.Module.forward or "forward" in vars(child)
        can_be_called = has_forward and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if leaves.is_leaf(path, child) or (is_block and can_be_called):
            yield path, child
        elif _is_expert_list(name, child):
            # A forward may call only some experts, and no block contains them.
            _log.info("%s belongs to the root, which is gathered from forward to backward", path)
        else:
            yield from _blocks(path + ".", child, leaves)


def _owner(name: str, paths: dict[str, str]) -> str:
    """Return the block that contains the parameter ``name``, or "" for the root."""
    parts = name.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((paths[path] for path in above if path in paths), "")


def discover(model: nn.Module, leaves: LeafModuleConfig | None = None) -> Discovered:
    """Find the parameters, their names, and the units of ``model``.

    ``leaves`` selects leaves in addition to modules that are marked as leaves.
    """
    leaves = leaves or LeafModuleConfig()
    if missing := leaves.missing(model):
        _log.warning("zero_optimization.leaf_module names what the model lacks: %s", missing)
    params, names, quantized = _list_params(model)
    numbers = {id(param): number for number, param in enumerate(params)}
    numbers_of = {id(q.param): [numbers[id(c)] for c in q.components] for q in quantized}

    blocks: dict[int, tuple[str, nn.Module]] = {}
    if not leaves.is_leaf("", model):
        for path, module in _blocks("", model, leaves):
            blocks.setdefault(id(module), (path, module))  # a module with two names is one unit
    # Use all paths to blocks, because a block or a part of it may occur in several places.
    tree = list(model.named_modules(remove_duplicate=False))
    paths = {path: blocks[id(module)][0] for path, module in tree if id(module) in blocks}
    owners = {n: {_owner(name, paths) for name in names[n]} for n in range(len(params))}
    read: set[str] = set()  # names of parameters that other modules read
    for path, module in tree:
        for key in _read.get(module, ()):
            for number in numbers_of.get(key, [numbers[key]] if key in numbers else []):
                owners[number].add(_owner(f"{path}.read", paths))
                read.update(names[number])

    members: dict[str, list[int]] = {"": [], **{path: [] for path, _ in blocks.values()}}
    for number, owned in owners.items():
        members[next(iter(owned)) if len(owned) == 1 else ""].append(number)
    last = max((n for n, (_, m) in enumerate(tree) if id(m) in blocks), default=len(tree) - 1)
    behind = {
        f"{path}.{name}"
        for path, module in tree[last + 1 :]
        if not path.startswith(f"{tree[last][0]}.")
        for name in module._parameters
    } - read
    opaque = frozenset(itertools.chain.from_iterable(numbers_of.values()))
    # Quantized parameters are not in the tail, because their class cannot detect an early read.
    tail = [n for n in members[""] if behind.issuperset(names[n]) and n not in opaque]
    modules = {"": model, **dict(blocks.values())}
    units = [
        (path, modules[path], tuple(numbers_))
        for path, numbers_ in members.items()
        if numbers_ or path == ""
    ]
    numel = sum(params[n].numel() for n in tail)
    has_tail = len(units) > 1 and numel >= MIN_TAIL_NUMEL
    if has_tail:
        units[0] = ("", model, tuple(n for n in members[""] if n not in tail))
        units.append((TAIL_NAME, model, tuple(tail)))
    plain = tuple(tuple(plain_name(name) for name in found) for found in names)
    twins: dict[int, int] = {}  # components that share an earlier one's memory
    for own in numbers_of.values():
        for earlier, number in itertools.combinations(own, 2):
            is_first = earlier not in twins and number not in twins
            if is_first and is_same_memory(params[earlier], params[number]):
                twins[number] = earlier
    return Discovered(tuple(params), plain, tuple(units), has_tail, tuple(quantized), opaque, twins)


def _list_params(model: nn.Module) -> tuple[list[Tensor], list[list[str]], list[Quantized]]:
    """Return parameters or their components, the names of each, and the quantized parameters."""
    params: list[Tensor] = []
    names: list[list[str]] = []
    numbers: dict[int, int] = {}
    found: dict[int, tuple[Component, ...]] = {}
    quantized: list[Quantized] = []
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, param in model.named_parameters(remove_duplicate=False):
        is_new = id(param) not in found
        if is_new:
            own = components(plain_name(name), param)
            # A tensor that is also registered as a buffer counts as a buffer.
            found[id(param)] = tuple(
                c for c in own if c.tensor is param or id(c.tensor) not in buffers
            )
        for path, tensor in found[id(param)]:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(params)
                params.append(tensor)
                names.append([])
            names[numbers[id(tensor)]].append(f"{name}.{path}" if path else name)
        is_stored = is_storage_dtype(param.dtype) and not param.requires_grad
        if is_new and (is_stored or len(found[id(param)]) > 1 or found[id(param)][0].path):
            tensors = tuple(c.tensor for c in found[id(param)])
            quantized.append(Quantized(param, plain_name(name), tensors))
    quantized += _beside_quantized(model, quantized)
    return params, names, quantized


def _beside_quantized(model: nn.Module, quantized: Sequence[Quantized]) -> Iterator[Quantized]:
    """Yield frozen parameters of modules with a quantized matrix, as they may be its scales."""
    known = {id(q.param) for q in quantized}
    # Exclude integer vectors and 64-bit matrices (counters, positions), which have no scales.
    stored = {
        id(q.param)
        for q in quantized
        if type(q.param) is nn.Parameter
        and q.param.dim() >= 2
        and q.param.dtype.itemsize <= 4
        and q.param.dtype is not torch.bool
    }
    for path, module in model.named_modules():
        own = [(name, p) for name, p in module._parameters.items() if p is not None]
        if not any(id(p) in stored for _, p in own):
            continue
        for name, param in own:
            if id(param) not in known and not param.requires_grad:
                known.add(id(param))
                whole = plain_name(f"{path}.{name}" if path else name)
                yield Quantized(param, whole, (param,))


def compute_dtype(param: torch.Tensor, low_precision: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which ``param`` is used in forward: ``low_precision`` or its own."""
    if low_precision is None or param.dtype.is_complex or is_storage_dtype(param.dtype):
        return param.dtype
    return low_precision


class Component(NamedTuple):
    """A plain tensor that holds bytes of a parameter. See [Note: quantized parameters]."""

    path: str  # attribute path from the parameter, "" for its own memory
    tensor: Tensor  # the object that the parameter holds


def is_storage_dtype(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is bool, an integer or an 8-bit float, as in quantized parameters."""
    return not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1


def is_partitioned(tensor: object) -> TypeIs[PartitionedParam]:
    """Whether ``tensor`` is a `PartitionedParam`, whose value is stored elsewhere."""
    # Test plain classes first, because a protocol check takes microseconds.
    is_plain = type(tensor) in (nn.Parameter, Tensor)
    return not is_plain and isinstance(tensor, PartitionedParam)


def components(name: str, param: Tensor) -> tuple[Component, ...]:
    """Return the components of ``param``, or ``param`` itself if it is not quantized.

    Raises ConfigError if they cannot be sharded.
    """
    if is_partitioned(param):
        return (Component("", param),)
    if inner_tensors(param) is not None:
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and isinstance(param, dtensor.DTensor):
            raise ConfigError(
                f"parameter {name} is a DTensor, which other code has sharded: build the engine "
                "from the model before fully_shard() or parallelize_module()"
            )
        if param.requires_grad:
            kind = f"{type(param).__module__}.{type(param).__qualname__}"
            raise ConfigError(
                f"parameter {name} is a {kind}, a tensor subclass, and requires a gradient: "
                "quantized parameters are not trained. Freeze it by requires_grad_(False) and "
                "train adapters, or leave its class out (for torchao.float8: "
                "enable_fsdp_float8_all_gather=False)"
            )
    found = stored_tensors(param)
    for path, tensor in found:
        if tensor.layout is not torch.strided:
            where = f"{name}.{path}" if path else name
            raise ConfigError(
                f"parameter {where} is {tensor.layout}, which has no flat memory to shard: "
                "make it dense"
            )
    return tuple(found)


def stored_tensors(param: Tensor) -> list[Component]:
    """Return the components of ``param``. Does not check that its class can be sharded."""
    if inner_tensors(param) is not None:
        return list(inner_components("", param))
    found = [Component("", param)]
    if type(param) is not nn.Parameter and not param.requires_grad:
        found += _attached("", param, {id(param)}, _MAX_DEPTH)
    return found


def inner_components(path: str, tensor: Tensor) -> Iterator[Component]:
    """Yield the plain tensors that the ``tensor`` at ``path`` consists of."""
    parts = inner_tensors(tensor)
    if parts is None:
        yield Component(path, tensor)
        return
    for attribute, inner in parts[0].items():
        yield from inner_components(f"{path}.{attribute}".lstrip("."), inner)


def _attached(path: str, value: object, seen: set[int], depth: int) -> Iterator[Component]:
    """Yield the tensors in attributes of ``value`` and, up to ``depth`` levels, of objects in them.

    Skips parameters, tensors that require a gradient, and `_NO_METADATA`.
    """
    # foreign: objects of a quantizer
    for attribute, found in getattr(value, "__dict__", {}).items():
        if id(found) in seen or isinstance(found, _NO_METADATA):
            continue
        seen.add(id(found))
        where = f"{path}.{attribute}".lstrip(".")
        if isinstance(found, Tensor):
            if not isinstance(found, nn.Parameter) and not found.requires_grad:
                yield from inner_components(where, found)
        elif depth > 1:
            yield from _attached(where, found, seen, depth - 1)


class Metadata:
    """Copy of the attribute tables of a parameter and of objects in its attributes."""

    def __init__(self, param: Tensor) -> None:
        self._found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # id: (table, old copy)
        values: list[object] = [param]
        for _ in range(_MAX_DEPTH):
            # foreign: objects of a quantizer
            tables = [t for value in values if (t := getattr(value, "__dict__", {}))]
            values = [
                value
                for table in tables
                if id(table) not in self._found
                for value in table.values()
                if not isinstance(value, (*_NO_METADATA, Tensor))
            ]
            self._found |= {id(table): (table, dict(table)) for table in tables}

    def put_back(self) -> None:
        for attributes, before in self._found.values():
            attributes.clear()
            attributes.update(before)


def is_same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    if first is second:
        return True
    views = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (first, second)]
    return views[0] == views[1] and storage_of(first) == storage_of(second)
