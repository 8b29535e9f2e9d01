"""Access to master weights, gradients and optimizer states by parameter name.

[Note: full and local]
full    the whole parameter in its shape. Every rank must call the method.
local   the part covered by this rank's optimizer state, 1-D: the whole parameter at stage 0, or a
        slice, which may be empty. Elements are in the order of the parameter's strides. If the
        optimizer keeps states of whole parameters, only one rank has each state at stages 1 to 3.

The state of a whole parameter may have another shape than the parameter. Its full value has that
shape. Every rank must set its local part of a state. At stage 0 all ranks must set equal values.
``"grad"`` is the step's gradient between the last backward and ``step``, unscaled, and clipped if
`Engine.clip_grad_norm_` was called. Full and local values are on the CPU, in fp32 (float64 for
float64, or a quantized component's own dtype).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_core._torch import pytree
from zero_core.core.extension import PREFIX
from zero_core.core.grads import FlatGrads
from zero_core.core.passes import Passes
from zero_core.layout.arithmetic import Piece, Segment, Slot
from zero_core.layout.discovery import plain_name
from zero_core.optim.whole_tier import WholeTier
from zero_core.runtime.device_states import DeviceStates
from zero_core.sharded import MASTER
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.update import StepGradient

GRAD = "grad"


class _Found(NamedTuple):
    segment: Segment
    slot: Slot
    piece: Piece | None  # this rank's part, or None
    whole: WholeTier | None  # set if the state is one of the whole parameter


class StateAccess:
    """Access to states by parameter name: the type of ``engine.states``."""

    def __init__(
        self,
        state: ShardedState,
        gradient: StepGradient,
        passes: Passes,
        device_states: DeviceStates,
    ) -> None:
        self._state = state
        self._device_states = device_states
        self._gradient = gradient
        self._passes = passes
        self._grads = {g.segment.index: g for unit in passes.units.units for g in unit.grads}
        self._home: dict[str, tuple[Segment, Slot]] = {}
        for segment in state.layout.segments:
            for slot in segment.slots:
                spec = state.layout.params[slot.param]
                self._home |= dict.fromkeys((spec.name, *spec.aliases), (segment, slot))

    def has_gradient(self) -> bool:
        """Return whether "grad" can be read and set. Every rank must call it.

        True if a rank has a gradient, the current micro-step is the last one of its step, and
        ``no_sync`` is off.
        """
        return self._is_any(self.holds_gradient and self._passes.backward.is_last)

    def has_any_gradient(self) -> bool:
        """Return whether `holds_gradient` is true on any rank. Every rank must call it."""
        return self._is_any(self.holds_gradient)

    @property
    def holds_gradient(self) -> bool:
        """Whether this rank has a gradient, of some or all micro-steps of the current step."""
        return bool(self._gradient.params_with_grad)

    @property
    def is_kept_unreduced(self) -> bool:
        """Whether backwards currently leave gradients unreduced, as within ``no_sync``."""
        return not self._passes.backward.should_sync

    def get_unreduced(self, name: str) -> Tensor | None:
        """Return a copy of this rank's unreduced gradient of parameter ``name``, in its shape.

        It is the sum of all backwards since the last reduction, neither averaged over ranks nor
        unscaled. None if no backward produced a gradient. Requires no communication.
        """
        grads, position = self._find_unreduced(name)
        added = grads.full.added(position)
        return None if added is None else added / grads.plan.predivide

    @torch.no_grad()
    def set_unreduced(self, name: str, value: Tensor) -> None:
        """Replace the gradient returned by `get_unreduced`, on this rank only.

        Raises:
            RuntimeError: there is no such gradient.
            ValueError: ``value`` does not have the parameter's shape.
        """
        grads, position = self._find_unreduced(name)
        shape = self._state.layout.params[grads.param_numbers[position]].shape
        if value.shape != shape:
            raise ValueError(f"{name} has shape {shape}, found {tuple(value.shape)}")
        added = grads.full.added(position)
        if added is None:
            raise RuntimeError(
                "the parameter has no gradient on this rank to replace: set it after a backward"
            )
        added.copy_(value).mul_(grads.plan.predivide)

    def _find_unreduced(self, name: str) -> tuple[FlatGrads, int]:
        segment, slot, *_ = self._find(name, GRAD, is_local=True)
        grads = self._grads[segment.index]
        return grads, grads.param_numbers.index(slot.param)

    def get_full(self, name: str, what: str = MASTER) -> Tensor:
        """Return ``what`` of the whole parameter ``name``. Every rank must call it.

        Args:
            name: a name as in ``named_parameters``, including names of tied parameters.
            what: "master_weight", "grad", or a state of the optimizer: "exp_avg", "exp_avg_sq", ...

        Raises:
            KeyError: no such parameter or state, a state that is not a tensor, or the gradient or a
                state of a frozen parameter.
            RuntimeError: the gradient is not complete.
        """
        segment, slot, _, whole = self._find(name, what)
        state, spec = self._state, self._state.layout.params[slot.param]
        if whole is not None:
            owner, shape = self._whole_shape(whole, slot.param, what)
            shape = spec.shape if shape is None else shape
            dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
            found = torch.zeros(shape, dtype=dtype, device=state.device)
            if isinstance(kept := _kept(whole, slot.param).get(what), Tensor):
                found.copy_(kept.detach())
            state.control.broadcast(found, source=owner)
            return found.cpu()
        if what == GRAD:
            factor = self._complete_gradient()
            own = _widened(self._gradient.grads[segment.index].values().cpu()) * factor
        else:
            if what != MASTER and not self._is_any(what in state.state_names()):
                raise KeyError(_unknown(what))
            own = state.own_state(segment.index, what)
            own = own if segment.is_opaque else _widened(own)
        full = state.control.gather(own)
        return spec.to_values(full[slot.start : slot.stop])

    def get_local(self, name: str, what: str = MASTER) -> Tensor:
        """Return this rank's part of ``what``, 1-D. For "grad" every rank must call it."""
        segment, slot, piece, whole = self._find(name, what, is_local=True)
        factor = self._complete_gradient() if what == GRAD else 1.0
        if whole is not None:
            kept = _kept(whole, slot.param).get(what)
            if not isinstance(kept, Tensor):
                return torch.empty(0)
            return _widened(kept.detach().cpu()).reshape(-1)
        if piece is None:
            return torch.empty(0)
        if what == GRAD:
            final = self._gradient.grads[segment.index].covered()
            low = piece.offset + slot.start - self._state.covered(segment.index)[0]
            return _widened(final[low : low + piece.stop - piece.start].cpu()) * factor
        if what not in self._state.state_names():
            raise KeyError(_unknown(what))
        return _widened(self._state.read_state(what, piece.start, piece.stop))

    def of(self, name: str) -> dict[str, Any]:
        """Return this rank's part of every optimizer state of ``name``, as `get_local` does.

        If the optimizer keeps whole-parameter states, returns a CPU copy of the optimizer's own
        state, including non-tensors, in its own shapes and dtypes. Returns {} before the
        parameter's first step, or if this rank updates none of it. Requires no communication.
        """
        found, tier = self._find(name, "state", is_local=True), self._state.tier
        number = self._state.piece_numbers.get(found.slot.param)
        if number is None or not tier.read_scalars(number)["num_steps"]:
            return {}
        if found.whole is not None:
            return _copied(_kept(found.whole, found.slot.param))
        piece = self._state.pieces[number]
        names = [what for what in tier.state_names() if what != MASTER]
        return {n: _widened(tier.read_state(n, piece.start, piece.stop)) for n in names}

    def is_whole(self, name: str) -> bool:
        """Return whether the optimizer updates parameter ``name`` as a whole, not in slices."""
        return self._find(name, "state", is_local=True).whole is not None

    def scalars(self, name: str) -> Mapping[str, float]:
        """Return the numbers in this rank's state of parameter ``name``.

        ``num_steps`` counts the steps that updated this rank's part. Other entries are the
        optimizer's, such as torch's ``step``.
        """
        param = self._find(name, "state", is_local=True).slot.param
        number = self._state.piece_numbers.get(param)
        return {"num_steps": 0} if number is None else self._state.tier.read_scalars(number)

    @torch.no_grad()
    def load_own(self, saved: Mapping[str, tuple[Mapping[str, float], Mapping[str, Any]]]) -> None:
        """Restore this rank's states from the results of `scalars` and `of`, by parameter name.

        Requires no communication. Parameters of which this rank updates no element are skipped.
        If ValueError or KeyError is raised, nothing was restored on this rank.

        Raises:
            ValueError: a state does not have the length of this rank's part, or the shape of a
                whole-parameter state.
            KeyError: no such parameter, or the optimizer has no such state.
        """
        tier = self._state.tier
        for name, (scalars, states) in saved.items():
            _, slot, piece, whole = self._find(name, "state", is_local=True)
            own: dict[str, tuple[int, ...]] = {}
            if whole is not None:
                kept = _kept(whole, slot.param) if scalars["num_steps"] else {}
                own = {n: tuple(v.shape) for n, v in kept.items() if isinstance(v, Tensor)}
            elif piece is not None:
                own = dict.fromkeys(states, (piece.stop - piece.start,))
            for what, shape in own.items():
                value, found = states.get(what), None
                if isinstance(value, Tensor):
                    found = (value.numel(),) if whole is None else tuple(value.shape)
                if found != shape:
                    raise ValueError(
                        f"rank {self._state.control.rank} has {what!r} of {name} in shape {shape}, "
                        f"found {found}: the state is of another optimizer, stage, number of ranks "
                        "or rank; load a checkpoint instead"
                    )
            if piece is not None and not isinstance(tier, WholeTier):
                # An empty write raises KeyError for an unknown state, before anything is restored.
                for what in states.keys() - set(tier.state_names()):
                    tier.write_state(what, piece.start, states[what].reshape(-1)[:0])
        for name, (scalars, states) in saved.items():
            _, slot, piece, whole = self._find(name, "state", is_local=True)
            if whole is not None:
                if slot.param in whole.updated_params():
                    whole.write_whole_state(slot.param, _copied(states))
            elif piece is not None:
                for what, values in states.items():
                    tier.write_state(what, piece.start, values.detach().reshape(-1))
            if piece is not None:
                tier.write_scalars(self._state.piece_numbers[slot.param], scalars)

    @torch.no_grad()
    def set_full(self, name: str, value: Tensor, what: str = MASTER) -> None:
        """Set ``what`` of parameter ``name``. Every rank must call it, with the same ``value``.

        Raises:
            ValueError: ``value`` does not have the shape of the parameter or of the
                whole-parameter state, or not the dtype of a quantized component.
            KeyError: as in `get_full`.
            RuntimeError: as in `get_full`, or the parameter has no optimizer state yet.
        """
        found = segment, slot, piece, whole = self._find(name, what)
        spec = self._state.layout.params[slot.param]
        shape = spec.shape if whole is None else self._settable_shape(whole, slot.param, what)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {shape}, found {tuple(value.shape)}")
        if whole is not None:
            _set_kept(whole, slot.param, what, value)
            return
        if spec.is_opaque and value.dtype != spec.dtype:
            raise ValueError(f"{name} holds a quantizer's {spec.dtype}, found {value.dtype}")
        flat = spec.to_elements(value.detach())
        if segment.is_trainable:
            part = flat[:0] if piece is None else flat[piece.offset :][: piece.stop - piece.start]
            self._set_part(found, part, what)
        else:
            self._state.quiesce()  # other ranks may still gather the old values
            edited = self._state.params[segment.index]
            edited.edit(slot.start, flat)
            self._passes.units.values_replaced([edited])

    @torch.no_grad()
    def set_local(self, name: str, values: Tensor, what: str = MASTER) -> None:
        """Set this rank's part of ``what``. Every rank must call it, even with an empty part."""
        found = _, slot, piece, whole = self._find(name, what, is_local=True)
        numel = 0 if piece is None else piece.stop - piece.start
        if whole is not None:
            shape = self._settable_shape(whole, slot.param, what)
            numel = math.prod(shape) if slot.param in whole.updated_params() else 0
        if values.shape != (numel,):
            raise ValueError(
                f"rank {self._state.control.rank} has {numel} elements of {name}, found shape "
                f"{tuple(values.shape)}"
            )
        if whole is not None:
            _set_kept(whole, slot.param, what, values)
        else:
            self._set_part(found, values.detach(), what)

    def _set_part(self, found: _Found, part: Tensor, what: str) -> None:
        """Set this rank's ``part`` of a sliced state, or of the gradient."""
        state, (segment, slot, piece, _) = self._state, found
        if what == GRAD:
            # At stage 0 ``part`` is the whole parameter, and the gradient shard only a slice.
            factor = self._complete_gradient()
            grads = self._gradient.grads[segment.index]
            base, _ = segment.shard_range(state.control.rank)
            low, high = max(slot.start, base), min(slot.stop, base + segment.shard_numel)
            if low < high:
                first = max(slot.start, state.covered(segment.index)[0])
                grads.replace(low - base, _widened(part[low - first : high - first]) / factor)
            else:  # no element, but every rank must call ``offer``
                grads.replace(0, part[:0])
            self._gradient.params_with_grad.add(slot.param)
            self._passes.backward.offer(grads, is_last=True)
            return
        if what == MASTER:
            state.quiesce()  # other ranks may still gather the old values
        else:
            if not self._is_any(what in state.state_names()):
                raise KeyError(_unknown(what))
            self._check_stepped(slot.param)
        if piece is not None and part.numel():
            state.write_state(what, piece.start, part)
        if what == MASTER:
            self._passes.units.values_replaced([state.params[segment.index]])

    def _find(self, name: str, what: str, *, is_local: bool = False) -> _Found:
        self._device_states.check_states("access to states by name")
        self._device_states.before_write()
        plain = plain_name(name)
        if plain not in self._home:
            raise KeyError(f"no parameter {name!r}")
        segment, slot = self._home[plain]
        if not segment.is_trainable and (is_local or what != MASTER):
            raise KeyError(
                f"{name} is frozen: it has a value, for get_full() and set_full(), and no {what}"
            )
        tier, whole = self._state.tier, None
        is_sliced = what in (MASTER, GRAD) or what.startswith(PREFIX)
        if isinstance(tier, WholeTier) and not is_sliced and tier.owner_of(slot.param) is not None:
            whole = tier
        return _Found(segment, slot, self._state.piece_of(slot.param), whole)

    def _complete_gradient(self) -> float:
        """Reduce the step's gradient. Return the factor that unscales and clips it."""
        self._gradient.policy.check_unused("reading, setting or clipping gradients")
        self._passes.backward.complete_gradient()
        return self._gradient.scale_factor

    def _whole_shape(
        self, tier: WholeTier, param: int, what: str
    ) -> tuple[int, tuple[int, ...] | None]:
        """Return the owner and shape of a whole-parameter state. Every rank must call it.

        The shape is None if this parameter has no such state, but another parameter has.
        """
        kept = [tier.read_whole_state(p) for p in tier.updated_params()]
        is_known = what in tier.state_names() or any(what in state for state in kept)
        own = _kept(tier, param)
        found = own.get(what)
        kind = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        rows = self._state.control.gather_json([is_known, kind if what in own else None])
        if not any(is_known for is_known, _ in rows):
            raise KeyError(_unknown(what))
        owner = tier.owner_of(param)
        assert owner is not None, "asked for whole states alone"
        shape: list[int] | str | None = rows[owner][1]
        if isinstance(shape, str):
            name = self._state.layout.params[param].name
            raise KeyError(f"state {what!r} of {name} is no tensor but a {shape}")
        return owner, None if shape is None else tuple(shape)

    def _settable_shape(self, whole: WholeTier, param: int, what: str) -> tuple[int, ...]:
        self._check_stepped(param)
        _, shape = self._whole_shape(whole, param, what)
        if shape is None:
            raise KeyError(_unknown(what))
        return shape

    def _check_stepped(self, param: int) -> None:
        index = self._state.piece_numbers.get(param)
        has_stepped = index is not None and self._state.tier.read_scalars(index)["num_steps"] > 0
        if not self._is_any(has_stepped):
            name = self._state.layout.params[param].name
            raise RuntimeError(f"{name} has no optimizer state before its first step")

    def _is_any(self, is_here: bool) -> bool:
        found = torch.tensor([float(is_here)], device=self._state.device)
        return self._state.control.sum(found).item() > 0


def _kept(whole: WholeTier, param: int) -> Mapping[str, Any]:
    """Return a whole-parameter state, or {} if another rank has it."""
    return whole.read_whole_state(param) if param in whole.updated_params() else {}


def _set_kept(whole: WholeTier, param: int, what: str, values: Tensor) -> None:
    if isinstance(kept := _kept(whole, param).get(what), Tensor):
        kept.copy_(values.detach().view(kept.shape))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with copies of its tensors on the CPU."""
    copied: dict[str, Any] = pytree.tree_map_only(
        Tensor, lambda value: value.detach().to("cpu", copy=True), dict(state)
    )
    return copied


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _unknown(what: str) -> str:
    return f"no state {what!r}: the optimizer has none of that name, or none before its first step"
