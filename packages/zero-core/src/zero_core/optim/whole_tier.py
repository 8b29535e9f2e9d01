"""State tier of optimizers that need whole parameters.

[Note: whole parameters]
Each parameter has an owner among the ranks that hold a part of it (`zero_core.layout.owners`), and
its optimizer state is there, whole. Master weights stay sliced as for any optimizer. In a step the
owner gathers the master weights and gradients of its divided parameters, the optimizer updates
them, and the new values return to the ranks that hold them. Where every rank has the whole state
(stage 0, one rank) each updates everything, and nothing is sent.

The optimizer is the one that was given to ``build``, over the model's own parameters. For the time
of its step the parameters that this rank owns hold their whole master weights and gradients, and
all others have no gradient, which every optimizer leaves alone. So shapes, groups, hooks, counters
in groups and whatever an optimizer keeps by parameter are as without an engine.

Unlike in other tiers, ``step`` is a collective: every rank calls it once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_core._torch import inner_tensors, pytree
from zero_core.comm.control import ControlGroup
from zero_core.comm.meter import WHOLES, Meter
from zero_core.layout.arithmetic import Layout, Piece
from zero_core.layout.owners import Share, Whole, assign_owners
from zero_core.optim.device_tier import Bf16Tier
from zero_core.optim.flat_tier import MASTER, Chunked, FlatTier
from zero_core.protocols import ParamStore

# Of torch itself, whatever the class of a parameter overrides.
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
_set_grad = Tensor.grad.__set__  # type: ignore[union-attr]


class WholeTier(FlatTier):
    """`zero_core.protocols.WholeStateTier` of any torch optimizer that updates by parameter."""

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
    ) -> None:
        """Make this rank's tier.

        Args:
            layout: the place of every element.
            control: exchanges divided parameters, and ``meter`` counts them.
            is_sharded: whether the tier covers a shard of each segment, or all of it.
            params: as for `zero_core.protocols.StateTierFactory`.
            device: where parameters are updated, and the states are.
            param_store: as for `zero_core.protocols.StateTierFactory`.
            optimizer: over the model's parameters; its states move to ``device``.
            model_params: the model's parameters, in the order of the layout.
        """
        super().__init__(params=params, device=device, param_store=param_store)
        self._layout = layout
        self._optimizer = optimizer
        self._model_params = model_params
        self._pieces = layout.pieces(control.rank, is_sharded=is_sharded)
        self._num_steps = [0] * len(self._pieces)
        self._piece_of = {piece.param: piece for piece in self._pieces}
        wholes = assign_owners(layout)
        self._owners = {whole.param: whole.owner for whole in wholes}
        self._updated = [w.param for w in wholes if not is_sharded or w.owner == control.rank]
        divided = [whole for whole in wholes if is_sharded and whole.is_divided]
        dtypes = [self._dtype_of_masters(layout.segments[w.segment].dtype) for w in divided]
        self._exchanges = [
            _Exchange(
                [w for w, d in zip(divided, dtypes, strict=True) if d == dtype],
                dtype,
                control,
                meter,
            )
            for dtype in dict.fromkeys(dtypes)
        ]
        for number, param in enumerate(model_params):
            state = optimizer.state.pop(param, None)
            if state and number in self._updated:
                self.write_whole_state(number, state)

    # ------------------------------------------------------------------- step

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update as the protocol says, as a collective. ``groups`` are the optimizer's own."""
        self._downloads.order_before_update()
        used = {self._pieces[index].param for index in active}
        wholes = self._gather(used, grad_scale)
        self._update(wholes)
        self._return(used, wholes)
        for index in active:
            self._num_steps[index] += 1
        starts = {self._masters.index_of(self._pieces[index].start) for index in active}
        chunks = [self._masters.chunks[index] for index in sorted(starts)]
        self._publish([c for s, m in chunks for c in self._copies(s, s + m.numel())])

    def _gather(self, used: set[int], factor: float) -> dict[int, tuple[Tensor, Tensor]]:
        """Return values and gradient of the used parameters that this rank updates, 1-D."""
        offers = Chunked([(start, self._grads[start]) for start in sorted(self._grads)])
        own = {
            param: self._own_part(self._piece_of[param], offers, factor) for param in sorted(used)
        }
        for exchange in self._exchanges:
            own |= exchange.to_owners(own)
        return {param: own[param] for param in self._updated if param in used}

    def _own_part(self, piece: Piece, offers: Chunked, factor: float) -> tuple[Tensor, Tensor]:
        """Return this rank's master weights of a parameter, and its gradient times ``factor``."""
        master = self._masters.one(piece.start, piece.stop)
        offered = offers.one(piece.start, piece.stop)
        grad = offered.to(master.device, master.dtype)  # before it is unscaled
        if factor != 1.0:
            grad = grad * factor
        return master, grad

    def _update(self, wholes: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Run the optimizer over 1-D values and gradients, and update the values in place."""
        lent = {}
        for number, (values, grad) in wholes.items():
            shape = self._layout.params[number].shape
            lent[self._model_params[number]] = values.view(shape), grad.view(shape)
        with _lending(self._model_params, lent):
            self._optimizer.step()
            for param, (values, _) in lent.items():
                if param.data_ptr() != values.data_ptr():  # some optimizers assign new memory
                    values.copy_(param.detach())

    def _return(self, used: set[int], wholes: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Send the new values of divided parameters to the ranks that hold them."""
        values = {param: whole[0] for param, whole in wholes.items()}
        for exchange in self._exchanges:
            for param, part in exchange.from_owners(values).items():
                if param in used:
                    piece = self._piece_of[param]
                    self._masters.one(piece.start, piece.stop).copy_(part)

    # ----------------------------------------------------------------- states

    def state_names(self) -> Sequence[str]:
        return [MASTER]

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        self._check_name(name)
        return self._masters.read(start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        self._check_name(name)
        self._write_master(start, values)

    def _check_name(self, name: str) -> None:
        if name != MASTER:
            raise KeyError(f"{name!r}: states of {type(self._optimizer).__name__} are not sliced")

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors: see `zero_core.protocols.DeviceMemory`."""
        states = [self.read_whole_state(param) for param in self._updated]
        return {
            "master_weights": [tensor for _, tensor in self._masters.chunks],
            "optimizer_states": [tensor for state in states for tensor in _tensors_in(state)],
        }

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        return {"num_steps": float(self._num_steps[piece])}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        self._num_steps[piece] = int(scalars["num_steps"])
        if not self._num_steps[piece]:
            self._optimizer.state.pop(self._model_params[self._pieces[piece].param], None)

    def owner_of(self, param: int) -> int:
        return self._owners[param]

    def updated_params(self) -> Sequence[int]:
        return self._updated

    def read_whole_state(self, param: int) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._optimizer.state.get(self._model_params[param], {})
        return state

    def write_whole_state(self, param: int, state: Mapping[str, Any]) -> None:
        owner = self._model_params[param]
        (group,) = [g for g in self._optimizer.param_groups if any(p is owner for p in g["params"])]
        # As torch's own load_state_dict does: these kernels read the count on the device.
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        self._optimizer.state[owner] = {
            name: value if name == "step" and not is_on_device else _moved(value, self._device)
            for name, value in state.items()
        }


class Bf16WholeTier(WholeTier):
    """The same with bf16 shards as their own master weights. States are bf16 then, too."""

    master_dtypes = Bf16Tier.master_dtypes


class _Exchange:
    """Exchange of the divided parameters whose master weights have one dtype."""

    def __init__(
        self, wholes: Sequence[Whole], dtype: torch.dtype, control: ControlGroup, meter: Meter
    ) -> None:
        self._dtype = dtype
        self._control = control
        self._meter = meter
        rank, size = control.rank, control.world_size
        self._owned = [whole for whole in wholes if whole.owner == rank]
        self._own_share = {w.param: s for w in self._owned for s in w.shares if s.rank == rank}
        away = [(w, share) for w in wholes for share in w.shares if share.rank != w.owner]
        # What this rank holds for other owners, by owner, and what others hold for it, by holder.
        self._held = sorted(
            ((w.owner, w.param, s) for w, s in away if s.rank == rank), key=lambda part: part[0]
        )
        self._missing = sorted(
            ((s.rank, w.param, s) for w, s in away if w.owner == rank), key=lambda part: part[0]
        )
        self._numels = [[0] * size for _ in range(size)]  # [holder][owner]
        for whole, share in away:
            self._numels[share.rank][whole.owner] += share.numel

    def to_owners(
        self, parts: Mapping[int, tuple[Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Send this rank's ``parts``, master weights and gradients, to their owners.

        Returns:
            Those of each whole parameter of ``parts`` that this rank owns.
        """
        sent = [
            row
            for _, param, share in self._held
            for row in parts.get(param, (self._nothing(share),) * 2)
        ]
        arrived = self._send(sent, [[2 * numel for numel in row] for row in self._numels])
        found = {}
        for whole in self._owned:
            if whole.param in parts:
                rows, share = parts[whole.param], self._own_share[whole.param]
                # Two tensors, each aligned: matrix kernels may round otherwise elsewhere.
                full = rows[0].new_empty(whole.numel), rows[1].new_empty(whole.numel)
                for into, row in zip(full, rows, strict=True):
                    into[share.start : share.stop] = row
                found[whole.param] = full
        at = 0
        for _, param, share in self._missing:
            if param in found:
                arriving = arrived[at : at + 2 * share.numel].view(2, share.numel)
                for into, row in zip(found[param], arriving, strict=True):
                    into[share.start : share.stop] = row
            at += 2 * share.numel
        return found

    def from_owners(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send ``values`` of whole parameters that this rank owns to those that hold a part.

        Returns:
            This rank's part of each divided parameter, of 0 where its owner has no value.
        """
        sent = [
            values[param][share.start : share.stop] if param in values else self._nothing(share)
            for _, param, share in self._missing
        ]
        arrived = self._send(sent, [list(column) for column in zip(*self._numels, strict=True)])
        sizes = [share.numel for _, _, share in self._held]
        pieces = zip(self._held, torch.split(arrived, sizes), strict=True)
        found = {param: part for (_, param, _), part in pieces}
        for param, share in self._own_share.items():
            if param in values:
                found[param] = values[param][share.start : share.stop]
        return found

    def _nothing(self, share: Share) -> Tensor:
        return torch.zeros(share.numel, dtype=self._dtype)

    def _send(self, parts: Sequence[Tensor], numels: Sequence[Sequence[int]]) -> Tensor:
        device = next((part.device for part in parts if not part.is_cpu), torch.device("cpu"))
        empty = torch.empty(0, dtype=self._dtype, device=device)
        flat = torch.cat([empty, *(part.to(device) for part in parts)])
        self._meter.add_all_to_all(WHOLES, flat.nbytes)
        return self._control.exchange(flat, numels)


@contextmanager
def _lending(
    params: Sequence[Tensor], lent: Mapping[Tensor, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Give the parameters in ``lent`` these values and gradients, and the others no gradient."""
    before = [(param, param.data, param.grad) for param in params]
    try:
        for param in params:
            _set_grad(param, None)
            if param in lent:
                values, grad = lent[param]
                _set_data(param, values)
                _set_grad(param, grad)
        yield
    finally:
        for param, values, old_grad in before:
            _set_grad(param, None)
            _set_data(param, values)
            _set_grad(param, old_grad)


def _moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with the tensors in it on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a state that have memory of their own."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found = inner_tensors(leaf)
            if found is None:
                yield leaf
            else:
                yield from _tensors_in(found[0])
