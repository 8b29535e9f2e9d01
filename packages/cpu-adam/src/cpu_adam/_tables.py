"""Columns of the slots of many parameters, compared at every step and passed to the kernel.

A step over many small parameters is bound by Python, not by memory. So everything that is done for
each of them at every step is done a column at a time, by `map` and similar functions, without a
line of Python per parameter.

[Note: checks of a step]
A `Slot` is one parameter's verified memory. A `Snapshot` of slots checks that everything they were
verified for is unchanged. A `Table` of slots has the kernel's arguments in columns, and checks the
gradients, which are new at every step. A `Roster` has a group's slots, with a snapshot of them all
and a table of those that have a gradient. All are kept until something is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import add, attrgetter, floordiv, gt, is_, le
from typing import Any

import torch
from torch import Tensor

from cpu_adam._memory import ITEM_BYTES
from cpu_adam._slots import TYPES, Slot, check_param, extents_of, fill_state, local_of

States = Mapping[Tensor, dict[str, Any]]
Settings = tuple[str, str | None]

_dtype = attrgetter("dtype")
_kind = attrgetter("__class__", "dtype", "layout", "is_cpu")

# Kinds of gradients that can be checked in columns.
_PLAIN = frozenset((Tensor, dtype, torch.strided, True) for dtype in TYPES)


def _are_same(found: Iterable[object], expected: Sequence[object]) -> bool:
    """Whether the objects are identical, one by one: ``==`` compares tensors by element."""
    return all(map(is_, found, expected))


class Snapshot:
    """Record of parameters and their states when they were verified."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        watched = [entry for slot in slots for entry in slot.watched]
        self._params = [slot.param for slot in slots]
        self._is_local = all(type(param) is torch.nn.Parameter for param in self._params)
        self._states = [slot.state for slot in slots]
        self._owners = [slot.state for slot in slots for _ in slot.watched]
        self._names = [entry.name for entry in watched]
        self._values = [entry.value for entry in watched]
        self._parts = [entry.part for entry in watched]
        # Extents at verification: by now they may differ.
        extents = [entry.extent for entry in watched] + [slot.extent for slot in slots]
        self._extents = list(zip(*extents, strict=True))
        self._strides = [slot.stride for slot in slots]

    def is_current(self, states: States) -> bool:
        """Whether nothing changed. ``states`` has the dictionary of every parameter."""
        local = self._params if self._is_local else list(map(local_of, self._params))
        return (
            _are_same(map(states.__getitem__, self._params), self._states)
            and _are_same(map(dict.get, self._owners, self._names), self._values)
            and extents_of(self._parts + local) == self._extents
            and list(map(Tensor.stride, local)) == self._strides
        )


class Table:
    """The kernel's arguments for some parameters, a list for each argument.

    Attributes:
        local: the parameters, or the local parts of DTensors.
        masters, others: the addresses of `Slot.addresses`: the first, and a list for each other.
        numels: numbers of elements.
        out_types: as `Slot.out_type`.
        step_addresses: as `Slot.step_address`.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.local = [slot.local for slot in slots]
        addresses = zip(*(slot.addresses for slot in slots), strict=True)
        self.masters, *self.others = map(list, addresses)
        self.numels = [slot.numel for slot in slots]
        self.out_types = [slot.out_type for slot in slots]
        self.step_addresses = [slot.step_address for slot in slots]
        self._shapes = [slot.shape for slot in slots]
        self._strides = [slot.stride for slot in slots]
        self._is_contiguous = all(slot.is_contiguous for slot in slots)
        self._num_empty = self.numels.count(0)

    def gradient_memory(self, grads: list[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
        """Return the gradients in their parameters' layout, their addresses and element types."""
        grads = [grad if type(grad) is Tensor else local_of(grad) for grad in grads]
        if _PLAIN.issuperset(map(_kind, grads)):
            types = list(map(TYPES.__getitem__, map(_dtype, grads)))
            addresses = list(map(Tensor.data_ptr, grads))
            if self._are_ready(grads, types, addresses):
                return grads, addresses, types
        with torch.no_grad():
            found = [slot.grad_memory(grad) for slot, grad in zip(self._slots, grads, strict=True)]
        return [grad for grad, _, _ in found], [at for _, at, _ in found], [t for *_, t in found]

    def _are_ready(self, grads: list[Tensor], types: list[int], addresses: list[int]) -> bool:
        """Whether no gradient has to be converted or refused on its own."""
        if list(map(Tensor.numel, grads)) != self.numels:
            return False
        if self._is_contiguous:
            are_laid_out = all(map(Tensor.is_contiguous, grads))
        else:
            are_laid_out = (
                list(map(Tensor.stride, grads)) == self._strides
                and list(map(attrgetter("shape"), grads)) == self._shapes
            )
        if not are_laid_out or any(map(Tensor.is_neg, grads)):
            return False
        # A storage can be freed under its tensor.
        stops = map(add, map(Tensor.storage_offset, grads), self.numels)
        sizes = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, grads))
        are_inside = map(le, stops, map(floordiv, sizes, map(ITEM_BYTES.__getitem__, types)))
        return addresses.count(0) == self._num_empty and all(are_inside)


class Roster:
    """The parameters of a group, and the slots of those that ever had a gradient.

    Verifies the parameters that have a gradient, and fills their states.

    Args:
        params: of the group.
        settings: the group's ``state_dtype`` and ``master_dtype``.
        states: has a dictionary for every parameter.
        has_grad: for each parameter, whether it has a gradient.
        known: an earlier roster, whose current slots need not be verified again.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        settings: Settings,
        states: States,
        has_grad: Sequence[bool],
        known: Roster | None,
    ) -> None:
        self._params = list(params)
        self._settings = settings
        self._slots: list[Slot | None] = []
        old = {} if known is None else {s.param: s for s in known._slots if s is not None}
        for param, is_wanted in zip(params, has_grad, strict=True):
            slot = old.get(param)
            # Usually the parameter has new memory, which its address shows without a snapshot.
            if not (
                slot is not None
                and slot.settings == settings
                and local_of(param).data_ptr() == slot.local_address
                and Snapshot([slot]).is_current(states)
            ):
                slot = None
                if is_wanted:
                    check_param(param, settings[1])
                    fill_state(param, states[param], *settings)
                    slot = Slot(param, states[param], settings)
            self._slots.append(slot)
        self._has_slot = [slot is not None for slot in self._slots]
        self._snapshot = Snapshot([slot for slot in self._slots if slot is not None])
        self._table: Table | None = None
        self._has_row: list[bool] = []

    def is_current(
        self, params: Sequence[Tensor], settings: Settings, states: States, has_grad: Sequence[bool]
    ) -> bool:
        """Whether it has every parameter with a gradient, and nothing changed since."""
        return (
            settings == self._settings
            and len(params) == len(self._params)
            and _are_same(params, self._params)
            and not any(map(gt, has_grad, self._has_slot))
            and self._snapshot.is_current(states)
        )

    def table_of(self, has_grad: list[bool]) -> Table:
        """Return the table of the parameters that have a gradient, usually the last step's."""
        if self._table is None or self._has_row != has_grad:
            slots = compress(self._slots, has_grad)
            self._table = Table([slot for slot in slots if slot is not None])
            self._has_row = has_grad
        return self._table
