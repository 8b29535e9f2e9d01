"""The gradient of a step as ``param.grad``: at stage 0 itself, elsewhere why it is None.

[Note: param.grad]
Between the end of a step's last backward and `step`, ``param.grad`` is the reduced gradient, with
the numbers of DDP: averaged over the ranks, multiplied by fp16's loss scale, as it was before
`Engine.clip_grad_norm_`, in the parameter's shape and dtype. Where the state tier reads the
gradient in that dtype it is a view of that memory, else a copy. What is done to it counts in the
step: changes in place, another tensor, and None, which leaves the parameter and its state alone.
Elsewhere ``param.grad`` is None, or what was assigned: a backward adds to that, and `step` takes it
as it is.

At stages 1 to 3, and where units are updated in backward, a read between backward and `step`
returns None and logs a warning, once: `torch.nn.utils.clip_grad_norm_` would clip nothing,
silently. An assignment is an error.

``grad`` is a property of the parameters' class, and costs nothing unless it is read or set. Torch's
AccumulateGrad reads torch's own attribute below it, which is None, so a further backward of the
same step adds nothing to the tensors that were given out.

A late rank may still gather the gradient from its peers' shards. So a view is given out only of
memory that no peer reads, and a shard is changed only after the sum of the step's facts, which ends
those reads. That sum is of the gradient as it was reduced. After it every rank has the whole
gradient, and computes the norm of the changed one by itself.

Changes are found by a checksum of each view that was given out, and by comparison of copies. (A
permutation may keep the checksum. It keeps the norm too.) A segment that was only read keeps its
statistics. Every rank must make the same changes, as with DDP. The facts say which segments were
changed: where ranks differ the step is refused on all of them, and after `Engine.clip_grad_norm_`
the next one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero_core._torch import allow_foreach, get_grad, set_grad
from zero_core.comm.communicator import Communicator
from zero_core.core import access
from zero_core.core.grads import FlatGrads, SummedShard
from zero_core.lifecycle import EngineParameter
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)
UPDATED_IN_BACKWARD = (
    "param.grad is not kept where units are updated during backward: set "
    "zero_optimization.offload_optimizer.update_in_backward to false"
)
SHARDED = (
    "param.grad is None at stages 1 to 3, where no rank has the whole gradient, so "
    "torch.nn.utils.clip_grad_norm_ clips nothing: set gradient_clipping in the configuration, or "
    "call engine.clip_grad_norm_(); engine.states reads and sets gradients, engine.zero_grad() "
    "drops them"
)


class TrainedParameter(EngineParameter):
    """Class of a parameter that an engine trains."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient: see [Note: param.grad]."""
        own: Tensor | None = get_grad(self)
        if own is not None:
            return own
        served = _serving.get(id(self))
        return None if served is None else served.read(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        served = _serving.get(id(self))
        if served is None or not served.write(self, value):
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


allow_foreach(TrainedParameter)


@dataclass(slots=True)
class _Complete:
    """A segment's gradient that may be read, and what was given out of it, by position."""

    grads: FlatGrads
    given: dict[int, Tensor | None] = field(default_factory=dict)  # None: to have no gradient
    checksums: dict[int, Tensor] = field(default_factory=dict)  # of views, with changes so far


class ParamGrads:
    """The gradient of a step by parameter, and the changes that scripts make to it."""

    def __init__(self, state: ShardedState, params_with_grad: set[int], why_none: str) -> None:
        """Prepare. Reads return None before `serve`.

        ``params_with_grad``, by number, are those with a gradient on this rank. ``why_none``: why
        no gradient is given out, empty where it is.
        """
        self._state = state
        self._with_grad = params_with_grad
        self._why_none = why_none
        self._params = [
            param
            for param in state.trained_params
            if isinstance(param, nn.Parameter) and access.own_class(param) is nn.Parameter
        ]
        self._complete: dict[int, _Complete] = {}  # by segment
        self._given: dict[int, _Complete] = {}  # those of which something was given out or set
        self.set_params: set[int] = set()  # numbers, since the facts were summed
        self._assigned: dict[int, nn.Parameter] = {}  # while no gradient was there, by id
        # Segments that were changed in this step: before the sum of the facts, and after it; and
        # after that of the step before.
        self._changed: set[int] = set()
        self._changed_late: set[int] = set()
        self._changed_before: set[int] = set()
        self._has_warned = False

    def serve(self) -> ParamGrads:
        """Serve reads and changes of ``param.grad`` until `remove`."""
        access.use_class(self._params, TrainedParameter)
        _serving.update((id(param), self) for param in self._params)
        return self

    def remove(self) -> None:
        self.clear()
        for param in self._params:
            _serving.pop(id(param), None)
        access.use_class(self._params, nn.Parameter)

    def read(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of ``param``, the same tensor each time. None if it has none now."""
        flat, position = self._state.places[id(param)]
        index = flat.segment.index
        found = self._complete.get(index)
        if found is None:
            return None
        if self._why_none:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s", self._why_none)
            return None
        grads, given = found.grads, found.given
        if position not in given:
            grad = _of_param(grads, position)
            if not grad.untyped_storage().nbytes():
                return None  # states are offloaded
            if grads.param_numbers[position] not in self._with_grad and not grad.any():
                return None  # nor have other ranks one
            # Not the memory itself where the tier would not see what is done to it, or peers would.
            is_read = grads.segment.world_size > 1 and not grads.plan.is_sum_in_full
            is_copy = self._state.tier.owns_grads or is_read
            given[position] = grad.to(param.dtype, copy=is_copy)
            self._given[index] = found
            if given[position] is grad:
                found.checksums[position] = _checksum(grad)
        return given[position]

    def write(self, param: nn.Parameter, grad: Tensor | None) -> bool:
        """Have the step use ``grad``. Return whether it does, or torch's own attribute has it."""
        flat, position = self._state.places[id(param)]
        index = flat.segment.index
        found = self._complete.get(index)
        if found is None or get_grad(param) is not None:
            if grad is not None:
                self._assigned[id(param)] = param
            return False
        if self._why_none:
            raise RuntimeError(self._why_none)
        set_grad(param, grad)  # it checks shape, dtype and device
        set_grad(param, None)
        found.given[position] = grad
        self._given[index] = found
        number = found.grads.param_numbers[position]
        self.set_params.add(number)
        if grad is None:
            self._with_grad.discard(number)
        else:
            self._with_grad.add(number)
        return True

    def open(self, grads: FlatGrads) -> None:
        """Allow the gradient of a segment to be read: it is complete."""
        self._complete[grads.segment.index] = _Complete(grads)
        self._given.pop(grads.segment.index, None)

    def close(self) -> None:
        self._complete.clear()
        self._given.clear()

    def clear(self) -> None:
        self.close()
        self.set_params.clear()
        self._changed.clear()
        self._changed_late.clear()
        for param in self._assigned.values():
            set_grad(param, None)
        self._assigned.clear()

    def is_assigned(self, param: nn.Parameter) -> bool:
        """Whether a script gave ``param`` a gradient while the step had none."""
        return id(param) in self._assigned

    def take_assigned(self) -> None:
        """Take what was assigned before the gradient was complete."""
        assigned, self._assigned = self._assigned, {}
        for param in assigned.values():
            grad = get_grad(param)
            if grad is not None:  # else a backward has added to it, and the engine has the sum
                set_grad(param, None)
                is_taken = self.write(param, grad)
                assert is_taken, "the gradient is complete now"

    @torch.no_grad()
    def note_changes(self, *, is_agreed: bool) -> dict[int, dict[int, Tensor]]:
        """Return what was changed, by segment and position of the parameter, and write nothing.

        Changes of views are in the gradient already: their segment is there, perhaps with nothing.
        ``is_agreed``: the sum of the facts does not have them.
        """
        found = {}
        for index, one in self._given.items():
            own = {}
            for position, grad in one.given.items():
                home = _of_param(one.grads, position)
                wanted = torch.zeros_like(home) if grad is None else grad
                owns_grads = self._state.tier.owns_grads
                is_view = not owns_grads and wanted.data_ptr() == home.data_ptr()
                if not (is_view or _are_same(home.to(wanted.dtype), wanted)):
                    own[position] = wanted
            before = one.checksums.items()
            if own or any(
                not torch.equal(_checksum(_of_param(one.grads, p)), s) for p, s in before
            ):
                found[index] = own
        (self._changed_late if is_agreed else self._changed).update(found)
        return found

    @torch.no_grad()
    def take_changes(self, changes: Mapping[int, Mapping[int, Tensor]]) -> list[FlatGrads]:
        """Write ``changes`` into the gradients that ranks agreed on. Return those changed."""
        for index, one in self._given.items():
            if index in changes or one.checksums:  # a change may keep a checksum
                one.grads.change(_elements(one.grads, changes.get(index, {})))
        for index in changes:
            one = self._complete[index]
            one.checksums.update((p, _checksum(_of_param(one.grads, p))) for p in one.checksums)
        return [self._complete[index].grads for index in sorted(changes)]

    @torch.no_grad()
    def keep_changes(self, changes: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Have the next reductions add to the gradients with ``changes``."""
        for index, one in self._given.items():
            if index in changes or one.checksums:
                one.grads.wait()
                assert isinstance(one.grads.shard, SummedShard), "changes are made at stage 0"
                one.grads.shard.keep(_elements(one.grads, changes.get(index, {})))

    def begin_agreement(self, communicator: Communicator) -> list[str]:
        """Name the segments that were changed, for the sum of the facts, which begins."""
        self._changed |= self._changed_late
        self._changed_late = set()
        self.set_params.clear()
        name_of = communicator.name_of
        changed = [name_of("param.grad", i) for i in sorted(self._changed)]
        before = [name_of("the last step's param.grad", i) for i in sorted(self._changed_before)]
        return changed + before

    def forget_last_changes(self) -> None:
        self._changed_before = set()

    def decided(self) -> None:
        self.close()
        self._changed_before, self._changed_late = self._changed_late, set()


_serving: weakref.WeakValueDictionary[int, ParamGrads] = weakref.WeakValueDictionary()
"""By ``id`` of the parameter."""


def _of_param(grads: FlatGrads, position: int) -> Tensor:
    """Return the reduced gradient of parameter ``position``, in its shape.

    A view of what the state tier was offered, or a copy if it owns gradients.
    """
    slot = grads.segment.slots[position]
    with torch.inference_mode(False), torch.no_grad():
        return grads.views.to_values(position, grads.covered()[slot.start : slot.stop])


def _elements(grads: FlatGrads, changes: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
    """Return ``changes`` by position as elements of the segment, each from a start on."""
    slots, to_elements = grads.segment.slots, grads.views.to_elements
    return [(slots[at].start, to_elements(at, grad)) for at, grad in changes.items()]


def _checksum(values: Tensor) -> Tensor:
    """Return a sum of the bits: the same on any hardware. Only permutations keep it for certain."""
    integer = torch.int16 if values.itemsize == 2 else torch.int32
    return values.reshape(-1).view(integer).sum(dtype=torch.int64)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits, NaN included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
