"""Experts of a mixture: modules of which a forward calls those that its tokens are routed to.

They are the children of a ``ModuleList`` or ``ModuleDict`` with "experts" in its name. Nothing else
in a module tree says that not all children of a list are called. Experts that are one parameter
together, [experts, ...], cannot be told apart and count as any other parameter.

Experts within a block belong to its unit. The large ones have segments of their own, so that the
unit can be gathered without those that no rank needs: see `zero_core.sharded.experts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

MIN_EXPERT_SHARD_NUMEL = 2**20
"""Elements of each rank's shard from which on an expert has segments of its own. The exchange of a
smaller one (2 MiB in 16 bits, 40 us on a link of 50 GB/s) takes no longer than its launch and the
agreement on whether it is needed."""


@dataclass(frozen=True)
class Expert:
    """An expert with segments of its own.

    Attributes:
        unit: index of its unit.
        name: path of its module.
        module: what is called, or of which parts are called.
        params: numbers of its parameters that nothing else has.
    """

    unit: int
    name: str
    module: nn.Module
    params: tuple[int, ...]


@dataclass(frozen=True)
class ExpertList:
    """A list of experts with segments of their own.

    Attributes:
        unit: index of its unit.
        numbers: of its experts, in its order, in the unit.
        beside: the modules beside it, one of which may choose among the experts.
    """

    unit: int
    numbers: tuple[int, ...]
    beside: tuple[nn.Module, ...]


def is_expert_list(name: str, module: nn.Module) -> bool:
    """Return whether ``module``, the child ``name`` of another one, is a list of experts."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_list and "experts" in name.lower() and len(module._modules) > 1


def expert_lists(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of ``module`` that are lists of experts, with their names."""
    return (named for named in module.named_children() if is_expert_list(*named))


def expert_modules(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of the experts in ``module``, the outermost where they nest."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if is_expert_list(name, child):
            yield from ((f"{path}.{key}", expert) for key, expert in child.named_children())
        else:
            yield from expert_modules(path, child)


def find_experts(
    units: Sequence[tuple[str, nn.Module, tuple[int, ...]]],
    names: Sequence[Sequence[str]],
    params: Sequence[Tensor],
    min_numel: int | None,
) -> Iterator[Expert]:
    """Yield the experts of ``min_numel`` elements or more in blocks.

    Args:
        units: name, module and parameters of each unit, the root first.
        names: all names of each parameter.
        params: the parameters.
        min_numel: elements from which on an expert has segments of its own; None: none has.
    """
    if min_numel is None:
        return
    root = units[0][1]
    for unit, (path, module, members) in enumerate(units):
        experts = {} if module is root else dict(expert_modules(path, module))
        own: dict[str, list[int]] = {}
        for number in members if experts else ():
            holders = {_prefix_in(name, experts) for name in names[number]}
            if len(holders) == 1:
                own.setdefault(holders.pop(), []).append(number)
        for name, expert in experts.items():
            found = tuple(own.get(name, ()))
            if found and sum(params[n].numel() for n in found) >= min_numel:
                yield Expert(unit, name, expert, found)


def expert_lists_of(model: nn.Module, experts: Iterable[Expert]) -> Iterator[ExpertList]:
    """Yield the lists of ``experts``, those of ``model`` with segments of their own."""
    num_found: Counter[int] = Counter()
    for (unit, _), own in groupby(experts, lambda e: (e.unit, e.name.rpartition(".")[0])):
        modules = {expert.module for expert in own}
        first = num_found[unit]
        num_found[unit] += len(modules)
        for holder in model.modules():
            lists = [found for _, found in expert_lists(holder)]
            if any(modules.issubset(found.children()) for found in lists):
                beside = tuple(m for m in holder.children() if m not in lists)
                yield ExpertList(unit, tuple(range(first, num_found[unit])), beside)
                break


def _prefix_in(name: str, paths: Container[str]) -> str:
    """Return which of ``paths`` a parameter's name begins with, or an empty string."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in paths), "")
