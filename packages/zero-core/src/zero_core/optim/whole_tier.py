"""State tier of optimizers that need whole parameters.

[Note: whole parameters]
Each parameter has an owner among the ranks that hold a part of it. The owner has the parameter's
whole optimizer state. Master weights stay sharded. A parameter within one shard is updated in
place. A parameter that crosses a border of shards is *divided*: in each step its owner gathers
master weight and gradient, runs the optimizer, and returns the new values. If every rank has the
whole state (stage 0, one rank), each rank updates all parameters and nothing is sent.

Parameters in groups that the optimizer declares elementwise (`zero_core.optim.factory`) have no
owner: each rank updates its slice and keeps the slice's state.

The tier runs the given or configured optimizer on the model's own parameters. During its step, an
owned parameter with a gradient temporarily has its whole master weight and gradient, and a sliced
one has the rank's 1-D slice of them. All other parameters have no gradient, so optimizers skip
them: a write that would be lost is refused. Owned parameters have the same shapes, groups and
states as without an engine.

[Note: rounds]
Divided parameters are exchanged in rounds of consecutive segments of one dtype. To bound the bytes
in flight, a round has no more elements than the largest set of divided parameters in one segment.
Parameters without a gradient are not sent. Unlike in other tiers, every rank must call ``step``.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import get_grad, pytree, set_grad, storage_of
from zero_core.comm.control import ControlGroup
from zero_core.comm.meter import WHOLES, Meter
from zero_core.config import master_dtype
from zero_core.core import access
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import Layout, Piece
from zero_core.layout.discovery import inner_components
from zero_core.optim.device_tier import MASTER, Chunked, FlatTier
from zero_core.protocols import ParamStore

_IDLE = (
    "whose grad is None: an optimizer that updates whole parameters must skip such parameters, as "
    "torch's do, because what it writes to them is lost"
)
# Torch's own setter, because a parameter's class may override ``data``.
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Share:
    """Range ``[start, stop)`` of a parameter's elements that is on one rank."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class Whole:
    """A trainable parameter, its owner, and each rank's part of it."""

    param: int  # number in the layout
    segment: int
    owner: int  # rank that updates the parameter
    shares: tuple[Share, ...]  # sorted by rank; a single share if not divided

    @property
    def numel(self) -> int:
        return self.shares[-1].stop

    @property
    def is_divided(self) -> bool:
        return len(self.shares) > 1


class WholeTier(FlatTier):
    """State tier of any torch optimizer that updates each parameter separately.

    See [Note: whole parameters]. Parameters are numbered as in the layout. `read_whole_state`
    returns the optimizer states of a parameter with an owner. For these states, `read_state`
    returns zeros and `write_state` raises KeyError.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        control: ControlGroup,
        meter: Meter,
        is_sharded: bool,
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        param_store: ParamStore | None,
        optimizer: torch.optim.Optimizer,
        model_params: Sequence[Tensor],
        sliced: Collection[int],
        own_masters: Collection[torch.dtype],
    ) -> None:
        """Create the tier of this rank's shards, or of all parameters if not ``is_sharded``.

        ``model_params`` are in the order of the layout. ``sliced`` has the indices of parameters of
        which each rank updates a slice.
        """
        super().__init__(
            params=params, device=device, param_store=param_store, own_masters=own_masters
        )
        self._layout = layout
        self._optimizer = optimizer
        self._model_params = model_params
        self._pieces = layout.pieces(control.rank, is_sharded=is_sharded)
        self._num_steps = [0] * len(self._pieces)
        self._piece_of = {piece.param: piece for piece in self._pieces}
        self._sliced = [piece for piece in self._pieces if piece.param in sliced]
        wholes = assign_owners(layout, sliced=sliced)
        self._owners = {whole.param: whole.owner for whole in wholes}
        self._updated = [w.param for w in wholes if not is_sharded or w.owner == control.rank]
        self._exchanges = []
        for dtype, members in rounds_of(layout, wholes) if is_sharded else ():
            like = torch.empty(0, dtype=master_dtype(dtype, own_masters), device=device)
            self._exchanges.append(_Exchange(members, like, control, meter))
        # States that the optimizer's constructor created, by parameter.
        self._initial: dict[int, dict[str, Any]] = {}
        for number, param in enumerate(model_params):
            state = optimizer.state.pop(param, None)
            if state and number in self._updated:
                self._initial[number] = state
            elif state and number in sliced and number in self._piece_of:
                piece, spec = self._piece_of[number], layout.params[number]
                stop = piece.offset + piece.stop - piece.start
                self._initial[number] = own = dict(state)  # copied, in case the build fails
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == spec.shape and name != "step":
                        elements = spec.to_elements(value)[piece.offset : stop].clone()
                        own[name] = self._lent(number, elements)
        for number in self._initial:
            self._clear_state(number)

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update as `StateTier.step` describes. Every rank must call it. ``groups`` is unused.

        If the optimizer raises on some ranks only, the other ranks may wait until the timeout.
        """
        self._wait_for_downloads()
        self._scale_offers([self._pieces[index].start for index in active], grad_scale)
        used = {self._pieces[index].param for index in active}
        offers = Chunked([(start, self._grads[start]) for start in sorted(self._grads)])
        own: dict[int, tuple[Tensor, Tensor]] = {}
        for param in sorted(used):
            span = self._piece_of[param].start, self._piece_of[param].stop
            own[param] = self._masters.one(*span), offers.one(*span)
        # 1-D values and gradients of all parameters and slices that this rank updates.
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for exchange in self._exchanges:
            found |= exchange.to_owners(own, grad_scale)
        alone = {piece.param for piece in self._sliced}.union(self._updated).difference(found)
        for param in sorted(used & alone):
            master, grad = own[param]
            if grad.dtype != master.dtype or grad.device != master.device:
                wide = torch.empty_like(master)
                _put((master, grad), (master, wide), grad_scale)
                grad = wide
            found[param] = master, grad
        lent = {
            self._model_params[param]: (self._lent(param, values), self._lent(param, grad))
            for param, (values, grad) in found.items()
        }
        kind = type(self._optimizer).__name__
        idle = [(n, self._model_params[n]) for n in self._piece_of.keys() - used]
        marks = [(n, p._version, p.data_ptr()) for n, p in idle if not access.is_refused(p)]
        with _lending(self._model_params, lent):
            try:
                self._optimizer.step()
            except RuntimeError as error:
                if "where stage 3 holds only" in str(error):  # an error of `zero_core.core.access`
                    error.add_note(f"{kind}.step() may have used a parameter {_IDLE}")
                raise
            for param, version, address in marks:
                if self._is_lost(param, version, address):
                    name = self._layout.params[param].name
                    raise RuntimeError(f"{kind}.step() has written {name}, {_IDLE}")
            for model_param, (values, _) in lent.items():
                if model_param.data_ptr() != values.data_ptr():  # the optimizer has set ``data``
                    values.copy_(model_param.detach())
        updated = {param: values for param, (values, _) in found.items()}
        for exchange in self._exchanges:
            for param, part in exchange.from_owners(updated, used).items():
                piece = self._piece_of[param]
                self._masters.one(piece.start, piece.stop).copy_(part)
        for index in active:
            self._num_steps[index] += 1
        numbers = {bisect_right(self._masters.starts, self._pieces[i].start) - 1 for i in active}
        chunks = [self._masters.chunks[number] for number in sorted(numbers)]
        self._publish([c for s, m in chunks for c in self._copies(s, s + m.numel())])

    def _is_lost(self, param: int, version: int, address: int) -> bool:
        """Return whether the optimizer has changed a parameter beside its master weight."""
        piece, found = self._piece_of[param], self._model_params[param]
        master = self._masters.one(piece.start, piece.stop)
        is_apart = storage_of(found) != storage_of(master)
        if found.data_ptr() != address or (is_apart and found._version != version):
            return True
        if not is_apart or id(found) not in access.aliased:
            return False
        own = self._layout.params[param].to_elements(found.detach())[piece.offset :][: len(master)]
        return not torch.equal(own.nan_to_num(), master.to(own).nan_to_num())

    def _lent(self, param: int, elements: Tensor) -> Tensor:
        """Return ``elements`` in the parameter's shape, or as they are if they are only a slice."""
        spec = self._layout.params[param]
        return spec.to_values(elements) if elements.numel() == spec.numel else elements

    def state_names(self) -> Sequence[str]:
        return list(dict.fromkeys([MASTER, *(n for p in self._sliced for n in self._states_of(p))]))

    def _states_of(self, piece: Piece) -> dict[str, Tensor]:
        """Return the elementwise states of a slice, as 1-D views."""
        spec = self._layout.params[piece.param]
        is_all = piece.stop - piece.start == spec.numel
        shape = self._lent(piece.param, self._masters.one(piece.start, piece.stop)).shape
        return {
            name: spec.to_elements(value.detach()) if is_all else value.detach()
            for name, value in self.read_whole_state(piece.param).items()
            if isinstance(value, Tensor) and value.shape == shape and name != "step"
        }

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        if name == MASTER:
            return self._masters.read(start, stop)
        found = torch.zeros(stop - start, dtype=self._master_dtype(start))
        for piece in self._sliced:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high and name in (states := self._states_of(piece)):
                own = states[name][low - piece.start : high - piece.start]
                found[low - start : high - start] = own
        return found

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        if name == MASTER:
            self._write_master(start, values)
            return
        stop = start + values.numel()
        pieces = [p for p in self._sliced if p.start <= start and stop <= p.stop]
        if not pieces:
            kind = type(self._optimizer).__name__
            raise KeyError(f"{name!r}: states of {kind} are whole here, not sliced")
        piece = pieces[0]
        state, own = self._optimizer.state[self._model_params[piece.param]], self._states_of(piece)
        if name not in own:
            own[name] = torch.zeros_like(self._masters.one(piece.start, piece.stop))
        own[name][start - piece.start : stop - piece.start] = values
        state[name] = self._lent(piece.param, own[name])

    def device_tensors(self) -> dict[str, list[Tensor]]:
        states = pytree.tree_leaves([self.read_whole_state(param) for param in self._piece_of])
        tensors = [state for state in states if isinstance(state, Tensor)]
        return {
            "master_weights": [tensor for _, tensor in self._masters.chunks],
            "optimizer_states": [part.tensor for t in tensors for part in inner_components("", t)],
        }

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        scalars = {"num_steps": float(self._num_steps[piece])}
        param = self._pieces[piece].param
        if param in self._owners:
            return scalars
        sliced = self._states_of(self._pieces[piece])
        for name, value in self.read_whole_state(param).items():
            if name in sliced:
                continue
            if isinstance(value, int | float):
                scalars[name] = value  # an int stays an int
            elif isinstance(value, Tensor) and value.numel() == 1:
                scalars[name] = float(value)
            else:
                shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise CheckpointError(
                    f"{type(self._optimizer).__name__} has the state {name!r} of "
                    f"{self._layout.params[param].name}, a {type(value).__qualname__} "
                    f"({shape or repr(value)[:80]}), and says that its group is elementwise "
                    "(is_elementwise_group): states of such a group are tensors of the parameter's "
                    "shape, or numbers. Keep it in another form, or leave the group out"
                )
        return scalars

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        self._num_steps[piece] = int(scalars["num_steps"])
        param = self._pieces[piece].param
        if not self._num_steps[piece]:
            self._clear_state(param)
        elif param not in self._owners:
            values = {
                name: value if isinstance(value, int) else torch.tensor(value)
                for name, value in scalars.items()
                if name != "num_steps"
            }
            self.write_whole_state(param, {**self.read_whole_state(param), **values})

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Raise KeyError for a name other than `MASTER` if no parameter is sliced."""
        unknown = [name for name in names if name != MASTER]
        if unknown and not self._sliced:
            kind = type(self._optimizer).__name__
            raise KeyError(f"{unknown[0]!r}: states of {kind} are whole here, not sliced")

    def owner_of(self, param: int) -> int | None:
        return self._owners.get(param)  # None for a sliced, empty or frozen parameter

    def updated_params(self) -> Sequence[int]:
        return self._updated  # parameters with an owner: this rank's, or all if not sharded

    def read_whole_state(self, param: int) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, or an empty dictionary if it has none."""
        found: dict[str, Any] = self._optimizer.state.get(self._model_params[param], {})
        return found

    def _clear_state(self, param: int) -> None:
        """Reset a parameter's optimizer state to that before the first step."""
        self._optimizer.state.pop(self._model_params[param], None)
        if param in self._initial:
            self.write_whole_state(param, copy.deepcopy(self._initial[param]))

    def write_whole_state(self, param: int, state: Mapping[str, Any]) -> None:
        """Replace a parameter's state. Tensors of the parameter's shape get its strides, too."""
        owner, spec = self._model_params[param], self._layout.params[param]
        (group,) = [g for g in self._optimizer.param_groups if any(p is owner for p in g["params"])]
        # Fused and capturable kernels read the step count on the device.
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        moved = {}
        for name, value in state.items():
            if name != "step" and type(value) is Tensor and value.shape == spec.shape:
                value = spec.to_values(spec.to_elements(value))
            if name != "step" or is_on_device:
                value = pytree.tree_map_only(Tensor, lambda t: t.to(self._device), value)
            moved[name] = value
        self._optimizer.state[owner] = moved


def assign_owners(layout: Layout, *, sliced: Collection[int] = ()) -> tuple[Whole, ...]:
    """Assign each trainable parameter to a rank, for stages 1 to 3.

    A parameter's owner holds a part of it. Divided parameters are assigned last, the largest first,
    each to the rank that owns the fewest elements by then. ``sliced`` and empty ones have no owner.
    """
    load = [0] * layout.world_size
    found: list[Whole] = []
    for segment in layout.segments:
        numel = segment.shard_numel
        for slot in segment.slots if segment.is_trainable else ():
            if slot.start == slot.stop or slot.param in sliced:
                continue
            shares = tuple(
                Share(rank, *slot.common(*segment.shard_range(rank)))
                for rank in range(slot.start // numel, (slot.stop - 1) // numel + 1)
            )
            found.append(Whole(slot.param, segment.index, shares[0].rank, shares))
            if len(shares) == 1:
                load[shares[0].rank] += slot.stop - slot.start
    divided = [whole for whole in found if whole.is_divided]
    for whole in sorted(divided, key=lambda whole: (-whole.numel, whole.param)):
        whole.owner = min((s.rank for s in whole.shares), key=lambda rank: (load[rank], rank))
        load[whole.owner] += whole.numel
    return tuple(found)


def rounds_of(layout: Layout, wholes: Sequence[Whole]) -> list[tuple[torch.dtype, list[Whole]]]:
    """Return the dtype and the divided parameters of each round. See [Note: rounds]."""
    divided = [whole for whole in wholes if whole.is_divided]
    segments = [list(members) for _, members in groupby(divided, key=lambda w: w.segment)]
    limit = max(map(_numel, segments), default=0)
    rounds: list[tuple[torch.dtype, list[Whole]]] = []
    for members in segments:
        dtype = layout.segments[members[0].segment].dtype
        if rounds and rounds[-1][0] == dtype and _numel(rounds[-1][1] + members) <= limit:
            rounds[-1][1].extend(members)
        else:
            rounds.append((dtype, members))
    return rounds


def step_bytes(
    layout: Layout,
    *,
    is_sharded: bool,
    is_apart: bool,
    sliced: Collection[int],
    dtypes: Mapping[int, tuple[torch.dtype, torch.dtype]],
) -> tuple[int, int]:
    """Return the temporary bytes of a step: (parameters and gradients, messages).

    Both are maxima over the ranks. The first one counts copies: values and gradients of divided
    parameters, and widened or moved gradients. The second one counts bytes sent and received in the
    largest round. ``is_apart``: the update and the gradients are on different devices. ``dtypes``:
    dtypes of master weight and offered gradient, by index of a trainable segment.
    """
    wholes = assign_owners(layout, sliced=sliced)
    divided = [whole for whole in wholes if is_sharded and whole.is_divided]
    divided_params = {whole.param for whole in divided}
    kept = [0] * layout.world_size
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank, is_sharded=is_sharded):
            master, offered = dtypes[piece.segment]
            if piece.param not in divided_params and (is_apart or offered != master):
                kept[rank] += (piece.stop - piece.start) * master.itemsize
    for whole in divided:
        kept[whole.owner] += 2 * whole.numel * dtypes[whole.segment][0].itemsize
    messages = [0]
    for _, members in rounds_of(layout, divided):
        width = 2 * dtypes[members[0].segment][0].itemsize
        moved = [0] * layout.world_size
        for whole in members:
            for share in whole.shares:
                if share.rank != whole.owner:
                    moved[share.rank] += width * share.numel
                    moved[whole.owner] += width * share.numel
        messages.append(max(moved))
    return max(kept), max(messages)


def _numel(wholes: Sequence[Whole]) -> int:
    return sum(whole.numel for whole in wholes)


_Parcel = tuple[int, int, Share]
"""A share that is sent to or received from another rank: (other rank, parameter, share)."""


class _Exchange:
    """Exchange of the divided parameters of one round."""

    def __init__(
        self, wholes: Sequence[Whole], like: Tensor, control: ControlGroup, meter: Meter
    ) -> None:
        """``like`` has the dtype and device of the master weights."""
        self._like = like
        self._control = control
        self._meter = meter
        self._owned: dict[int, tuple[int, Share]] = {}  # number of elements, and this rank's share
        self._held: list[_Parcel] = []  # this rank's shares of other ranks' parameters, by owner
        self._missing: list[_Parcel] = []  # other ranks' shares of owned parameters, by rank
        for whole in wholes:
            for share in whole.shares:
                if share.rank == whole.owner == control.rank:
                    self._owned[whole.param] = whole.numel, share
                elif share.rank == control.rank:
                    self._held.append((whole.owner, whole.param, share))
                elif whole.owner == control.rank:
                    self._missing.append((share.rank, whole.param, share))
        self._held.sort(key=itemgetter(0))
        self._missing.sort(key=itemgetter(0))

    def to_owners(
        self, parts: Mapping[int, tuple[Tensor, Tensor]], factor: float
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Send pairs (values, gradient) to owners. Return the whole pairs of owned parameters."""
        held = [parcel for parcel in self._held if parcel[1] in parts]
        missing = [parcel for parcel in self._missing if parcel[1] in parts]
        sizes = [2 * share.numel for _, _, share in held]
        sent = self._like.new_empty(sum(sizes))
        for (_, param, _), flat in zip(held, torch.split(sent, sizes), strict=True):
            _put(parts[param], flat.view(2, -1).unbind(), factor)
        arrived = self._exchange(sent, held, missing, rows=2)
        found = {}
        for param, (numel, share) in self._owned.items():
            if param in parts:
                # Two aligned tensors, because the alignment can change a matrix kernel's rounding.
                found[param] = full = self._like.new_empty(numel), self._like.new_empty(numel)
                _put(parts[param], [row[share.start : share.stop] for row in full], factor)
        sizes = [2 * share.numel for _, _, share in missing]
        for (_, param, share), flat in zip(missing, torch.split(arrived, sizes), strict=True):
            for into, row in zip(found[param], flat.view(2, -1), strict=True):
                into[share.start : share.stop] = row
        return found

    def from_owners(self, values: Mapping[int, Tensor], used: set[int]) -> dict[int, Tensor]:
        """Send ``values`` of owned parameters. Return this rank's shares of ``used`` parameters."""
        held = [parcel for parcel in self._held if parcel[1] in used]
        missing = [parcel for parcel in self._missing if parcel[1] in used]
        sent = [values[param][share.start : share.stop] for _, param, share in missing]
        flat = torch.cat([self._like, *sent])
        arrived = self._exchange(flat, missing, held, rows=1)
        sizes = [share.numel for _, _, share in held]
        pieces = zip(held, torch.split(arrived, sizes), strict=True)
        found = {param: part for (_, param, _), part in pieces}
        for param, (_, share) in self._owned.items():
            if param in used:
                found[param] = values[param][share.start : share.stop]
        return found

    def _exchange(
        self, parts: Tensor, to: Sequence[_Parcel], of: Sequence[_Parcel], *, rows: int
    ) -> Tensor:
        """Send the parcels ``to``, joined in ``parts``. Return the joined parcels ``of``."""
        sent, received = ([0] * self._control.world_size for _ in range(2))
        for numels, parcels in ((sent, to), (received, of)):
            for peer, _, share in parcels:
                numels[peer] += rows * share.numel
        links = self._meter.links  # estimated, as if each peer received equally many bytes
        each_nbytes = parts.nbytes // max(links.world_size - 1, 1)
        self._meter.add("all_to_all", WHOLES, links.direct(each_nbytes))
        return self._control.exchange(parts, sent, received)


def _put(part: tuple[Tensor, Tensor], into: Sequence[Tensor], factor: float) -> None:
    """Copy a master weight and its gradient to ``into``. Scale a widened gradient by ``factor``."""
    (master, grad), (values, wide) = part, into
    values.copy_(master)
    wide.copy_(grad)  # widened before unscaling, to keep small values
    if grad.dtype != wide.dtype and factor != 1.0:  # `_scale_offers` has scaled other gradients
        wide.mul_(factor)


@contextmanager
def _lending(
    params: Sequence[Tensor], lent: Mapping[Tensor, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Set values and gradients of ``lent`` parameters, clear other gradients. Undo at exit."""
    # Refused parameters have no gradient, and the optimizer must not use them.
    held = [param for param in params if param in lent or not access.is_refused(param)]
    with access.opened(param for param in held if isinstance(param, nn.Parameter)):
        before = [(param, access.get_data(param), get_grad(param)) for param in held]
        try:
            for param in held:
                set_grad(param, None)
                if param in lent:
                    values, grad = lent[param]
                    _set_data(param, values)
                    set_grad(param, grad)
            yield
        finally:
            for param, values, old_grad in before:
                set_grad(param, None)
                _set_data(param, values)
                set_grad(param, old_grad)
