"""The gradient of a step as ``param.grad``, at stage 0.

[Note: param.grad]
Between the end of a step's last backward and `step`, ``param.grad`` is the reduced gradient, with
the numbers of DDP: averaged over the ranks, multiplied by fp16's loss scale, as it was before
`Engine.clip_grad_norm_`, in the parameter's shape and dtype. Where the state tier reads the
gradient in that dtype it is a view of that memory, else a copy. What is done to it counts in the
step: changes in place, another tensor, and None, which leaves the parameter and its state alone.
Elsewhere ``param.grad`` is None, or what was assigned: a backward adds to that, and `step` takes it
as it is.

Nothing of this costs anything unless ``grad`` is read or set: it is a property of the parameters'
class. Torch's AccumulateGrad reads torch's own attribute below it, which is None, so a further
backward of the same step adds nothing to the tensors that were given out.

Changes are found when the gradient's statistics are agreed on: by the norm of each segment of which
something was given out, by comparison where that was a copy. A segment that was only read keeps its
statistics. Every rank must make the same changes, as with DDP; reading is each rank's own affair.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import allow_foreach, get_grad, set_grad
from zero_core.sharded.grads import FlatGrads
from zero_core.sharded.params import FlatParams

_log = logging.getLogger(__name__)
_UPDATED_IN_BACKWARD = (
    "param.grad is not kept where units are updated during backward: set "
    "zero_optimization.offload_optimizer.update_in_backward to false"
)


class TrainedParameter(nn.Parameter):
    """Class of a parameter that an engine of stage 0 trains."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient: see [Note: param.grad]."""
        own: Tensor | None = get_grad(self)
        if own is not None:
            return own
        served = _served(self)
        return None if served is None else served.read(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        served = _served(self)
        if served is None or not served.write(self, value):
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter of torch's own class, which belongs to no engine."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


allow_foreach(TrainedParameter)

_serving: dict[int, weakref.ref[ParamGrads]] = {}  # by id of the parameter


def _served(param: nn.Parameter) -> ParamGrads | None:
    found = _serving.get(id(param))
    return None if found is None else found()


class ParamGrads:
    """Gives out the gradient of a step by parameter, and finds what was changed."""

    def __init__(
        self,
        params: Collection[FlatParams],
        params_with_grad: set[int],
        *,
        owns_grads: bool,
        is_updated_in_backward: bool,
    ) -> None:
        """Know the trainable parameters among ``params``. Nothing is given out before `serve`.

        ``params_with_grad`` are the numbers of those that have a gradient on this rank. It is kept
        up to date. ``owns_grads``: whether the state tier copies gradients.
        """
        self._with_grad = params_with_grad
        self._owns_grads = owns_grads
        self._is_updated_in_backward = is_updated_in_backward
        self._params = [
            (param, flat.segment.index, position)
            for flat in params
            if flat.segment.is_trainable
            for position, param in enumerate(flat.params)
            if type(param) is nn.Parameter
        ]
        self._places = {id(param): place for param, *place in self._params}
        self._complete: dict[int, FlatGrads] = {}  # by segment, while they may be read
        # By segment and position: what reads return, None where there is to be no gradient.
        self._given: dict[int, dict[int, Tensor | None]] = {}
        self._set: set[int] = set()  # segments of which gradients were set
        self._norms: dict[int, Tensor] = {}  # by segment, when something was first given out
        self._assigned: dict[int, nn.Parameter] = {}  # while no gradient was there, by id
        self._has_warned = False

    def serve(self) -> ParamGrads:
        """Give out gradients until `remove`."""
        for param, _, _ in self._params:
            param.__class__ = TrainedParameter
            _serving[id(param)] = weakref.ref(self)
        return self

    def remove(self) -> None:
        self.clear()
        for param, _, _ in self._params:
            _serving.pop(id(param), None)
            param.__class__ = nn.Parameter

    # ------------------------------------------------------------- of scripts

    def read(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of ``param``, the same tensor each time. None if it has none now."""
        index, position = self._places[id(param)]
        grads = self._complete.get(index)
        if grads is None:
            return None
        given = self._given.setdefault(index, {})
        if position not in given:
            if self._is_updated_in_backward:
                self._warn()
                return None
            grad = grads.of_param(position)
            if not grad.untyped_storage().nbytes():
                return None  # states are offloaded
            if grads.param_numbers[position] not in self._with_grad and not grad.any():
                return None  # nor have other ranks one
            self._remember_norm(grads)
            # Not the memory itself where the tier would not see what is done to it.
            given[position] = grad.to(param.dtype, copy=self._owns_grads)
        return given[position]

    def write(self, param: nn.Parameter, grad: Tensor | None) -> bool:
        """Have the step use ``grad``. Return whether it does: else it is torch's own attribute."""
        index, position = self._places[id(param)]
        grads = self._complete.get(index)
        if grads is None or get_grad(param) is not None:
            if grad is not None:
                self._assigned[id(param)] = param
            return False
        if self._is_updated_in_backward:
            raise RuntimeError(_UPDATED_IN_BACKWARD)
        set_grad(param, grad)  # it checks shape, dtype and device
        set_grad(param, None)
        self._remember_norm(grads)
        self._given.setdefault(index, {})[position] = grad
        self._set.add(index)
        number = grads.param_numbers[position]
        if grad is None:
            self._with_grad.discard(number)
        else:
            self._with_grad.add(number)
        return True

    def _remember_norm(self, grads: FlatGrads) -> None:
        if not self._owns_grads and grads.segment.index not in self._norms:
            self._norms[grads.segment.index] = grads.retake_norm()

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", _UPDATED_IN_BACKWARD)

    # --------------------------------------------------------------- of a step

    def open(self, grads: FlatGrads) -> None:
        """Allow the gradient of a segment to be read: it is complete."""
        index = grads.segment.index
        self._complete[index] = grads
        self._given.pop(index, None)
        self._norms.pop(index, None)

    def close(self) -> None:
        """Allow no more reads and changes."""
        self._complete.clear()
        self._given.clear()
        self._set.clear()
        self._norms.clear()

    def clear(self) -> None:
        """Drop what was assigned, too."""
        self.close()
        for param in self._assigned.values():
            set_grad(param, None)
        self._assigned.clear()

    def take_assigned(self) -> None:
        """Count what was assigned before the gradient was complete. `take_changes` follows."""
        assigned, self._assigned = self._assigned, {}
        for param in assigned.values():
            grad = get_grad(param)
            if grad is not None:  # else a backward has added to it, and the engine has the sum
                set_grad(param, None)
                self.write(param, grad)

    @torch.no_grad()
    def take_changes(self) -> list[FlatGrads]:
        """Return the gradients that were changed. Their shards hold the changes.

        The state tier must be offered what it is to copy again, else it has the new values.
        """
        if not self._given:
            return []
        take = self._take_from_copies if self._owns_grads else self._take_in_place
        given = [(self._complete[index], given) for index, given in self._given.items() if given]
        are_set, self._set = self._set, set()
        # All of them are taken, whether or not something was set.
        return [g for g, own in given if take(g, own) or g.segment.index in are_set]

    def _take_in_place(self, grads: FlatGrads, given: dict[int, Tensor | None]) -> bool:
        """Write what is not a view of the gradient. Return whether the norm is another one."""
        for position, grad in given.items():
            home = grads.of_param(position)
            if grad is None:
                home.zero_()
            elif grad.data_ptr() != home.data_ptr() and not _are_same(home.to(grad.dtype), grad):
                home.copy_(grad)
        index = grads.segment.index
        before, after = self._norms[index], grads.take_sum()
        self._norms[index] = after
        return not _are_same(before, after)

    def _take_from_copies(self, grads: FlatGrads, given: dict[int, Tensor | None]) -> bool:
        """Write copies that were changed into the shard. Return whether there are any."""
        is_changed = False
        for position, grad in given.items():
            home = grads.of_param(position)
            wanted = torch.zeros_like(home) if grad is None else grad
            if not _are_same(home.to(wanted.dtype), wanted):
                grads.replace_param(position, wanted)
                is_changed = True
        return is_changed


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits, NaN included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
