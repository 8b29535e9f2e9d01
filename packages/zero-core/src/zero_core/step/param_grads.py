"""The gradient of a step as ``param.grad`` at stage 0, and errors and warnings at other stages.

[Note: param.grad]
From the end of a step's last backward to `step`, ``param.grad`` is the reduced gradient with the
same values as in DDP: averaged over the ranks, multiplied by the fp16 loss scale, not clipped by
`Engine.clip_grad_norm_`, in the parameter's shape and dtype. ``param.grad`` is a view of the
state tier's input if that has the parameter's dtype, is not owned by the tier, and is read by no
other rank. Otherwise it is a copy. The step uses changes made to ``param.grad``: in-place changes,
assignment of a tensor, and assignment of None, which leaves the parameter and its state unchanged.
At other times ``param.grad`` is None or a tensor assigned by the user. A backward adds to that
tensor. Without a backward, `step` uses the tensor itself.

At stages 1 to 3, and if updates in backward are final, reading ``param.grad`` before `step`
returns None and logs one warning, because `torch.nn.utils.clip_grad_norm_` would silently clip
nothing. Assigning a gradient raises an error.

``grad`` is a property of the parameters' class. It costs nothing unless read or set. Torch's
AccumulateGrad uses torch's own attribute. So a further backward of the same step does not change
copies that were read from ``param.grad``. It may overwrite views.

A slow rank may still gather the gradient from its peers' shards. A shard is changed only after the
all-reduce of the step's facts, which ends those reads. The facts describe the gradient as it was
reduced. After the all-reduce every rank has the whole gradient, and computes the norm of the
changed gradient locally.

Changes are detected by a checksum of each view, and by comparing copies. (A permutation keeps the
checksum, but also the norm.) A segment that was only read keeps its statistics. Every rank must
make the same changes, as with DDP. The hash of the facts covers the names of changed segments. If
the names differ, all ranks refuse the step. Changes after `Engine.clip_grad_norm_` are too late for
the hash of their step, so the hash of the next step covers them, too.
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
    "torch.nn.utils.clip_grad_norm_ clips nothing and a GradScaler scales nothing: set "
    "gradient_clipping or fp16 in the configuration, or call engine.clip_grad_norm_(); "
    "engine.states reads and sets gradients, engine.zero_grad() drops them"
)


class TrainedParameter(EngineParameter):
    """Class of parameters that an engine trains."""

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
class _Given:
    """A segment's complete gradient, with the tensors that users read or set."""

    grads: FlatGrads
    # By position in the segment. None: set to None by the user.
    given: dict[int, Tensor | None] = field(default_factory=dict)
    checksums: dict[int, Tensor] = field(default_factory=dict)  # of views, at their last check


class ParamGrads:
    """The gradient of a step by parameter, and the changes that user code makes to it.

    Attributes:
        complete: complete gradients of the step, by segment. `StepGradient` adds and removes them.
        given: by segment, those of ``complete`` that user code has read or set.
        is_used: whether user code has ever read or set a gradient. If not, there are no changes.
        set_params: numbers of parameters whose gradient was set after the facts were summed.
    """

    def __init__(self, state: ShardedState, params_with_grad: set[int], why_none: str) -> None:
        """Create without effect on the parameters until `serve` is called.

        ``params_with_grad``: numbers of the parameters with a gradient on this rank. ``why_none``:
        the reason why ``param.grad`` is unavailable, or "" if available.
        """
        self._state = state
        self._with_grad = params_with_grad
        self._why_none = why_none
        self._params = [
            param
            for param in state.trained_params
            if isinstance(param, nn.Parameter) and access.own_class(param) is nn.Parameter
        ]
        self.complete: dict[int, FlatGrads] = {}
        self.given: dict[int, _Given] = {}
        self.is_used = False
        self.set_params: set[int] = set()
        # By id: parameters whose gradient user code assigned before the gradient was complete.
        self._assigned: dict[int, nn.Parameter] = {}
        # Segments changed before the all-reduce of this step's facts, after this all-reduce, and
        # after the all-reduce of the previous step.
        self._changed: set[int] = set()
        self._changed_late: set[int] = set()
        self._changed_before: set[int] = set()
        self._has_warned = False

    def serve(self) -> ParamGrads:
        """Handle reads and changes of ``param.grad`` until `remove`."""
        access.use_class(self._params, TrainedParameter)
        _serving.update((id(param), self) for param in self._params)
        return self

    def remove(self) -> None:
        self.clear()
        self.given.clear()
        for param in self._params:
            _serving.pop(id(param), None)
        access.use_class(self._params, nn.Parameter)

    def read(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of ``param``, the same tensor each time, or None if unavailable."""
        flat, position = self._state.places[id(param)]
        index = flat.segment.index
        grads = self.complete.get(index)
        if grads is None:
            return None
        if self._why_none:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s", self._why_none)
            return None
        found = self.given.get(index) or _Given(grads)
        given = found.given
        if position not in given:
            grad = _of_param(grads, position)
            if not grad.untyped_storage().nbytes():
                return None  # the gradient is offloaded
            if grads.param_numbers[position] not in self._with_grad and not grad.any():
                return None  # no rank has a gradient, or all elements are 0
            # Copy if the tier would not see changes of the view, or if peers may read the memory.
            is_read = grads.segment.world_size > 1 and not grads.plan.is_sum_in_full
            is_copy = self._state.tier.owns_grads or is_read
            given[position] = grad.to(param.dtype, copy=is_copy)
            self.given[index], self.is_used = found, True
            if given[position] is grad:
                found.checksums[position] = _checksum(grad)
        return given[position]

    def write(self, param: nn.Parameter, grad: Tensor | None) -> bool:
        """Set the step's gradient of ``param``. Return False if torch's ``grad`` must hold it."""
        flat, position = self._state.places[id(param)]
        index = flat.segment.index
        grads = self.complete.get(index)
        if grads is None or get_grad(param) is not None:
            if grad is not None:
                self._assigned[id(param)], self.is_used = param, True
            return False
        if self._why_none:
            raise RuntimeError(self._why_none)
        set_grad(param, grad)  # torch checks shape, dtype and device
        set_grad(param, None)
        found = self.given.get(index) or _Given(grads)
        found.given[position] = grad
        self.given[index], self.is_used = found, True
        number = grads.param_numbers[position]
        self.set_params.add(number)
        if grad is None:
            self._with_grad.discard(number)
        else:
            self._with_grad.add(number)
        return True

    def clear(self) -> None:
        self.set_params.clear()
        self._changed.clear()
        self._changed_late.clear()
        for param in self._assigned.values():
            set_grad(param, None)
        self._assigned.clear()

    def drop_untaken(self) -> bool:
        """Drop gradients left in torch's ``grad`` by a backward. Return whether there were any."""
        left = [
            param
            for flat in self._state.params
            if flat.segment.is_trainable
            for param in flat.shown.read_params
            if get_grad(param) is not None and id(param) not in self._assigned
        ]
        for param in left:
            set_grad(param, None)
        return bool(left)

    def take_assigned(self) -> None:
        """Use gradients that were assigned before the gradient was complete."""
        assigned, self._assigned = self._assigned, {}
        for param in assigned.values():
            grad = get_grad(param)
            if grad is not None:  # None if a backward has added to the assigned gradient
                set_grad(param, None)
                is_taken = self.write(param, grad)
                assert is_taken, "the gradient is complete now"

    @torch.no_grad()
    def note_changes(self, *, is_agreed: bool) -> dict[int, dict[int, Tensor]]:
        """Return the user's changes by segment and position, without applying them.

        In-place changes of views are already in the gradient. Their segments are keys of the result
        without positions. ``is_agreed``: the facts were summed before these changes.
        """
        found = {}
        for index, one in self.given.items():
            own = {}
            for position, grad in one.given.items():
                home = _of_param(one.grads, position)
                wanted = torch.zeros_like(home) if grad is None else grad
                owns_grads = self._state.tier.owns_grads
                is_view = not owns_grads and wanted.data_ptr() == home.data_ptr()
                if is_view:
                    continue
                bits = [t.reshape(-1).view(torch.uint8) for t in (home.to(wanted.dtype), wanted)]
                if not torch.equal(*bits):  # bits, because no NaN equals another
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
        """Write ``changes`` into the gradients. Return those of the changed segments.

        With several ranks, call it after the all-reduce of the step's facts: [Note: param.grad].
        """
        for index, one in self.given.items():
            if index in changes or one.checksums:  # a change may leave the checksum equal
                one.grads.change(_elements(one.grads, changes.get(index, {})))
        for index in changes:
            one = self.given[index]
            one.checksums.update((p, _checksum(_of_param(one.grads, p))) for p in one.checksums)
        return [self.given[index].grads for index in sorted(changes)]

    @torch.no_grad()
    def keep_changes(self, changes: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Save ``changes`` so that the next reductions add to the changed gradients."""
        for index, one in self.given.items():
            if index in changes or one.checksums:
                one.grads.wait()
                assert isinstance(one.grads.shard, SummedShard), "changes are made at stage 0"
                one.grads.shard.keep(_elements(one.grads, changes.get(index, {})))

    def begin_agreement(self, communicator: Communicator) -> list[str]:
        """Return the names of segments changed in this step, or after the last step's hash."""
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
        self._changed_before, self._changed_late = self._changed_late, set()


_serving: weakref.WeakValueDictionary[int, ParamGrads] = weakref.WeakValueDictionary()
"""Object that serves ``param.grad`` of each parameter, by the parameter's ``id``."""


def _of_param(grads: FlatGrads, position: int) -> Tensor:
    """Return the reduced gradient of parameter ``position``, in its shape."""
    slot = grads.segment.slots[position]
    with torch.inference_mode(False), torch.no_grad():
        return grads.views.forms[position].to_values(grads.covered()[slot.start : slot.stop])


def _elements(grads: FlatGrads, changes: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
    """Return the start in the segment and the new gradient, flat, of each changed parameter."""
    slots, forms = grads.segment.slots, grads.views.forms
    return [(slots[at].start, forms[at].to_elements(grad)) for at, grad in changes.items()]


def _checksum(values: Tensor) -> Tensor:
    """Return the sum of ``values`` viewed as integers, which has no rounding."""
    integer = torch.int16 if values.itemsize == 2 else torch.int32
    return values.reshape(-1).view(integer).sum(dtype=torch.int64)
