"""The units that hold the parameters of any module of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from zero_core.core.passes import Passes
from zero_core.core.unit import Unit


class ModuleUnits:
    """Finds and gathers the units of modules, and sets when they are gathered and released."""

    def __init__(self, passes: Passes) -> None:
        self._units = passes.units
        self._forward = passes.forward
        self._units_of = {
            id(p): {unit.index}
            for unit in passes.units.units
            for flat in unit.params
            for p in flat.params
        }
        for whole in passes.units.quantized:
            own = [self._units_of[id(component)] for component in whole.components]
            self._units_of[id(whole.param)] = set().union(*own)

    def of(self, module: nn.Module, *, recurse: bool = True) -> list[Unit]:
        """Return the units of the parameters of ``module``, with or without those of its parts.

        Raises:
            ValueError: the engine does not have one of them.
        """
        try:
            indices = set().union(*(self._units_of[id(p)] for p in module.parameters(recurse)))
        except KeyError:
            raise ValueError(f"{type(module).__name__} is not a module of this engine") from None
        return [self._units.units[index] for index in sorted(indices)]

    def gather(self, module: nn.Module) -> None:
        """Gather the units of ``module``, of which a part may be called by itself."""
        for unit in self.of(module):
            if unit.index not in self._units.ready:
                self._forward.enter_part(unit)

    def is_gathered(self, module: nn.Module) -> bool:
        """Whether the parameters of ``module`` hold the current values."""
        return all(unit.index in self._units.ready for unit in self.of(module))

    def version(self, module: nn.Module) -> int:
        """Return a number that grows when the parameters of ``module`` get new values."""
        return sum(flat.version for unit in self.of(module) for flat in unit.params)

    def set_resharded(self, modules: Iterable[nn.Module], *, is_resharded: bool) -> None:
        """Set whether a forward releases the units of ``modules`` when they have been used."""
        indices = {unit.index for module in modules for unit in self.of(module)}
        before = self._units.unsharded
        self._units.set_unsharded(before - indices if is_resharded else before | indices)

    @contextmanager
    def keeping(self, max_numel: int) -> Iterator[None]:
        """Keep what forwards gather within, up to ``max_numel`` elements. Every rank must enter it.

        The root and the tail come first, which others may wait for, then blocks in their order.
        """
        kept, numel = set(), 0
        for unit in sorted(self._units.units, key=lambda unit: unit.is_block):
            numel += sum(flat.segment.padded_numel for flat in unit.params)
            if numel > max_numel:
                break
            kept.add(unit.index)
        before = self._units.unsharded
        self._units.set_unsharded(before | kept)
        try:
            yield
        finally:
            self._units.set_unsharded(before)

    def set_prefetched(
        self, module: nn.Module, modules: Iterable[nn.Module], *, backward: bool
    ) -> None:
        """Set which units are gathered ahead while that of ``module`` is in use.

        Raises:
            ValueError: ``module`` is in several units, or ``modules`` are not those that follow it.
        """
        units = self.of(module)
        if len(units) != 1:
            raise ValueError(
                f"{type(module).__name__} is in units {units}: name a module of a single one"
            )
        (unit,) = units
        found = [index for m in modules for index in sorted(u.index for u in self.of(m))]
        found = list(dict.fromkeys(found))
        step = -1 if backward else 1
        expected = [unit.index + step * (n + 1) for n in range(len(found))]
        if found != expected:
            order = "backward" if backward else "forward"
            raise ValueError(
                f"units {found} cannot be gathered ahead of {unit!r}: units are gathered in one "
                f"order on all ranks, so name those that follow it in {order}, which begin with "
                f"unit {unit.index + step}"
            )
        self._units.prefetch.set_depth(unit.index, len(found) or 1, backward=backward)
