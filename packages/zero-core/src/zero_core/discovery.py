"""Find the units of a model: which modules are blocks, and which parameters belong to which.

A block is a child of an ``nn.ModuleList`` or ``nn.Sequential`` that has parameters and a forward
of its own; blocks are not searched for further blocks. A parameter that only one block uses
belongs to that block; everything else (embeddings, heads, weights tied across blocks) belongs to
the root unit, which stays gathered from the start of forward to the end of backward. A module that
reads a parameter of another one says so by `note_reader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["Discovered", "discover", "note_reader"]

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_read: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Discovered:
    """What a model is made of.

    Attributes:
        params: each parameter once, in the order of the module tree.
        names: all names of each parameter, the first one first.
        units: ``(name, module, parameter numbers)``; number 0 is the root.
    """

    params: tuple[nn.Parameter, ...]
    names: tuple[tuple[str, ...], ...]
    units: tuple[tuple[str, nn.Module, tuple[int, ...]], ...]


def note_reader(module: nn.Module, param: nn.Parameter, *, is_reader: bool = True) -> bool:
    """Note that ``module`` reads ``param``, which belongs to another module, or that it doesn't.

    Returns:
        Whether that was noted before.
    """
    noted = _read.setdefault(module, {})
    found = noted.pop(id(param), None)
    if is_reader:
        noted[id(param)] = param
    return found is not None


def _can_be_called(module: nn.Module) -> bool:
    # A ModuleList or ModuleDict has no forward: hooks on it would never fire. What torch.compile
    # makes of a module has its forward on the object.
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return has_forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if next(child.parameters(), None) is None:
            continue
        if is_container and _can_be_called(child):
            yield path, child
        else:
            yield from _blocks(path + ".", child)


def _owner(name: str, paths: dict[str, str]) -> str:
    """The block that the parameter ``name`` is in, or "" for the root."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        block = paths.get(".".join(parts[:length]))
        if block is not None:
            return block
    return ""


def discover(model: nn.Module) -> Discovered:
    """Find parameters, their names, and the units of ``model``; see the module's text."""
    numbers: dict[int, int] = {}
    params: list[nn.Parameter] = []
    names: list[list[str]] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in numbers:
            numbers[id(param)] = len(params)
            params.append(param)
            names.append([])
        names[numbers[id(param)]].append(name)

    blocks: dict[int, tuple[str, nn.Module]] = {}
    for path, module in _blocks("", model):
        blocks.setdefault(id(module), (path, module))  # the same block twice in a list: one unit
    # Every path to a block, for a block or a part of it may stand in several places.
    paths = {
        path: blocks[id(module)][0]
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) in blocks
    }
    owners = {n: {_owner(name, paths) for name in names[n]} for n in range(len(params))}
    for path, module in model.named_modules(remove_duplicate=False):
        for key in _read.get(module, ()):
            if key in numbers:
                owners[numbers[key]].add(_owner(f"{path}.read", paths))

    members: dict[str, list[int]] = {"": [], **{path: [] for path, _ in blocks.values()}}
    for number, owned in owners.items():
        members[next(iter(owned)) if len(owned) == 1 else ""].append(number)
    modules = {"": model, **dict(blocks.values())}
    units = tuple(
        (path, modules[path], tuple(numbers_))
        for path, numbers_ in members.items()
        if numbers_ or path == ""
    )
    return Discovered(tuple(params), tuple(tuple(n) for n in names), units)


def compute_dtype(param: torch.Tensor, low_precision: torch.dtype | None) -> torch.dtype:
    """The dtype that ``param`` is computed in when floating parameters go to ``low_precision``."""
    if low_precision is not None and param.is_floating_point():
        return low_precision
    return param.dtype
