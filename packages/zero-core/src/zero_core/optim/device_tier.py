"""State tier on the compute device: torch's optimizer over slices.

[Note: master weights here]
Where a parameter shard is fp32 (or float64) it is its own master weight: the optimizer updates it
in place. Where it is 16-bit, an fp32 master weight lies beside it and is rounded into it after a
step; and so for a shard of any dtype that rests off the device. Each piece of the local flat space
is an ``nn.Parameter`` over its slice of the master weights, so any elementwise torch optimizer
works, with its own kernels; its state tensors are moved into flat buffers when they first appear.
Where some master weights are fp32 and others float64, each has its states in the dtype that the
optimizer gives them: a flat state is then one buffer per dtype.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._libc import release_free_pages
from zero_core.protocols import ParamStore

MASTER = "master_weight"
_WIDE = (torch.float32, torch.float64)


class _Chunked:
    """Flat space ``[0, numel)`` made of consecutive tensors."""

    def __init__(self, chunks: Sequence[tuple[int, Tensor]]) -> None:
        self.chunks = list(chunks)
        self._starts = [start for start, _ in chunks]

    def parts(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """Return the views that cover ``[start, stop)``, each with its start."""
        found: list[tuple[int, Tensor]] = []
        index = self.index_of(start)
        while start < stop:
            low, tensor = self.chunks[index]
            end = min(stop, low + tensor.numel())
            found.append((start, tensor[start - low : end - low]))
            start, index = end, index + 1
        return found

    def index_of(self, start: int) -> int:
        """Return the number of the tensor that has element ``start``."""
        return bisect_right(self._starts, start) - 1

    def one(self, start: int, stop: int) -> Tensor:
        """Return the view of ``[start, stop)``, which must be in one chunk."""
        ((_, view),) = self.parts(start, stop)
        return view


class DeviceTier:
    """`zero_core.protocols.StateTier` on the compute device."""

    owns_grads = False

    def __init__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        param_store: ParamStore | None = None,
    ) -> None:
        self._numel = numel
        self._device = device
        self._make = optimizer_maker(optimizer_class, groups)
        self._published = _Chunked(params)
        self._store = param_store
        self._masters = _Chunked([(start, _master_of(shard, device)) for start, shard in params])
        self._flat: dict[str, _Chunked] = {MASTER: self._masters}
        self._spans = [(start, stop) for start, stop, _ in pieces]
        self._pieces = [nn.Parameter(self._masters.one(*span)) for span in self._spans]
        self._num_steps = [0] * len(pieces)
        self._grads: dict[int, Tensor] = {}
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for piece, (_, _, group) in zip(self._pieces, pieces, strict=True):
            members[group].append(piece)
        self._optimizer: torch.optim.Optimizer | None = None
        if self._pieces:
            # An optimizer refuses a group list in which every group is empty.
            self._optimizer = self._make(
                [{**g, "params": m} for g, m in zip(groups, members, strict=True)]
            )

    def offer_grad(self, start: int, grad: Tensor) -> None:
        self._grads[start] = grad

    def read_grad(self, start: int, stop: int) -> Tensor:
        grads = _Chunked([(s, self._grads[s]) for s in sorted(self._grads)])
        return torch.cat([part.cpu() for _, part in grads.parts(start, stop)])

    def discard_grads(self) -> None:
        self._grads.clear()

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        if self._optimizer is None or not active:
            return
        grads = _Chunked([self._scaled(s, grad_scale) for s in self._starts_of(active)])
        for own, given in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({k: v for k, v in given.items() if k != "params"})
        turns = self._turns(active)
        for turn in turns:
            for index in turn:
                self._pieces[index].grad = grads.one(*self._spans[index])
                self._num_steps[index] += 1
            self._optimizer.step()
            for index in turn:
                self._pieces[index].grad = None
                self._flatten_state(index)
            if len(turns) > 1:
                release_free_pages()
        for start, grad in grads.chunks:
            self._publish(start, start + grad.numel())

    def _starts_of(self, active: Sequence[int]) -> list[int]:
        """Return the starts of the offers that hold the gradients of the pieces."""
        offered = sorted(self._grads)
        found = {offered[bisect_right(offered, self._spans[i][0]) - 1] for i in active}
        return sorted(found)

    def wait_params(self, start: int, stop: int) -> None:
        """Return at once: the update runs on the stream that will read it."""

    def are_params_ready(self, start: int, stop: int) -> bool:
        return True

    def state_names(self) -> Sequence[str]:
        return list(self._flat)

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        parts = [part for _, part in self._flat[name].parts(start, stop)]
        return torch.cat([p.detach().cpu() for p in parts]) if parts else torch.empty(0)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        if name not in self._flat:
            if not any(name in states for states in self._probe().values()):
                raise KeyError(f"{self._make.func} has no state {name!r}")
            self._flat[name] = self._new_flat(name, values.dtype)
        stop = start + values.numel()
        for low, part in self._flat[name].parts(start, stop):
            with torch.no_grad():
                part.copy_(values[low - start : low - start + part.numel()])
        if name == MASTER:
            self._publish(start, stop)

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        assert self._optimizer is not None  # there is a piece
        state = self._optimizer.state.get(self._pieces[piece], {})
        scalars = {
            name: float(value)
            for name, value in state.items()
            if value is not None and not self._is_elementwise(piece, value)
        }
        return {"num_steps": float(self._num_steps[piece]), **scalars}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        assert self._optimizer is not None  # there is a piece
        self._num_steps[piece] = int(scalars["num_steps"])
        param = self._pieces[piece]
        if self._num_steps[piece] == 0:
            for name, flat in self._flat.items():
                if name != MASTER:
                    flat.one(*self._spans[piece]).zero_()
            self._optimizer.state[param] = self._initial_state(param)
            self._flatten_state(piece)
            return
        self._optimizer.state[param] = state = {}
        # As torch's own load_state_dict does: these kernels read the count on the device.
        group = self._group_of(param)
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        device = param.device if is_on_device else torch.device("cpu")
        for name, value in scalars.items():
            if name != "num_steps":
                state[name] = torch.tensor(value, dtype=torch.float32, device=device)
        for name, flat in self._flat.items():
            if name != MASTER:
                state[name] = flat.one(*self._spans[piece])

    def _turns(self, active: Sequence[int]) -> list[list[int]]:
        """Return the pieces that step together: all, but at their first step those of one chunk.

        Then the optimizer makes states that `_flatten_state` moves. The states of one chunk take
        little memory, those of all chunks as much as all states once more.
        """
        turns: dict[int, list[int]] = {}
        for index in active:
            is_first = self._num_steps[index] == 0
            chunk = self._published.index_of(self._spans[index][0]) if is_first else -1
            turns.setdefault(chunk, []).append(index)
        return list(turns.values())

    def _probe(self) -> dict[torch.dtype, dict[str, torch.dtype]]:
        """Return the states that the optimizer can have, by the dtype of the master weights."""
        if self._optimizer is None:
            return {}
        groups = self._optimizer.param_groups
        return {
            dtype: probe_states(self._make, groups, self._device, dtype)
            for dtype in dict.fromkeys(master.dtype for _, master in self._masters.chunks)
        }

    def _scaled(self, start: int, factor: float) -> tuple[int, Tensor]:
        """Return the gradient offered at ``start`` in the master's dtype, times ``factor``."""
        grad = self._grads[start]
        _, master = self._masters.parts(start, start + 1)[0]
        grad = grad.to(master.dtype)  # before it is unscaled: small values survive
        return start, grad.mul_(factor) if factor != 1.0 else grad

    def _initial_state(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the initial state of a parameter: empty, or for instance Adagrad's sum."""
        assert self._optimizer is not None
        fresh = self._make([{**self._group_of(param), "params": [param]}])
        return dict(fresh.state.get(param, {}))

    def _group_of(self, param: nn.Parameter) -> dict[str, Any]:
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        return next(g for g in groups if any(p is param for p in g["params"]))

    def _publish(self, start: int, stop: int) -> None:
        with torch.no_grad():
            masters = self._masters.parts(start, stop)
            shards = self._published.parts(start, stop)
            for (low, master), (_, shard) in zip(masters, shards, strict=True):
                if shard.is_meta:
                    assert self._store is not None, "whoever gives meta shards gives a store"
                    self._store.write(low, master.to(shard.dtype))
                elif shard.data_ptr() != master.data_ptr():
                    shard.copy_(master)  # to the host: there when it returns

    def _is_elementwise(self, piece: int, value: object) -> bool:
        return isinstance(value, Tensor) and value.shape == self._pieces[piece].shape

    def _flatten_state(self, piece: int) -> None:
        """Move state that the optimizer has just made into the flat buffers."""
        assert self._optimizer is not None
        state = self._optimizer.state[self._pieces[piece]]
        for name, value in state.items():
            if not self._is_elementwise(piece, value):
                continue
            if name not in self._flat:
                self._flat[name] = self._new_flat(name, value.dtype)
            home = self._flat[name].one(*self._spans[piece])
            if value.data_ptr() != home.data_ptr():
                state[name] = home.copy_(value)

    def _new_flat(self, name: str, dtype: torch.dtype) -> _Chunked:
        """Allocate zeros for state ``name``, one buffer per dtype.

        Where all masters have one dtype the state has ``dtype``. Otherwise the optimizer is probed,
        which costs a step.
        """
        chunks = self._masters.chunks
        of_master = {master.dtype: dtype for _, master in chunks}
        if len(of_master) > 1:
            of_master = {m: states.get(name, dtype) for m, states in self._probe().items()}
        found: list[tuple[int, Tensor]] = []
        for kind in dict.fromkeys(of_master.values()):
            same = [(start, m.numel()) for start, m in chunks if of_master[m.dtype] == kind]
            sizes = [numel for _, numel in same]
            flat = torch.zeros(sum(sizes), dtype=kind, device=self._device)
            found += zip([start for start, _ in same], torch.split(flat, sizes), strict=True)
        return _Chunked(sorted(found, key=lambda chunk: chunk[0]))


def optimizer_options(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the first group's settings that the optimizer's constructor takes."""
    names = [name for name in inspect.signature(optimizer_class).parameters if name != "params"]
    return {name: groups[0][name] for name in names if name in groups[0]}


def optimizer_maker(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> partial[torch.optim.Optimizer]:
    """Return the optimizer's class with the options of ``groups``, to be called with groups.

    Some options count when the optimizer is made, not per group: Adagrad's initial sum.
    """
    make: Any = optimizer_class  # each class types its own options
    return partial(make, **optimizer_options(optimizer_class, groups))


def probe_states(
    make: partial[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.dtype]:
    """Return the elementwise states of a parameter of ``dtype``, found by a step of its own.

    ``make`` is the result of `optimizer_maker`.
    """
    found: dict[str, torch.dtype] = {}
    for group in groups:
        probe = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
        probe.grad = torch.zeros_like(probe)
        optimizer = make([{**group, "params": [probe]}])
        optimizer.step()
        state = optimizer.state.get(probe, {})
        found |= {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == (2,)}
    return found


def _master_of(shard: Tensor, device: torch.device) -> Tensor:
    dtype = shard.dtype if shard.dtype in _WIDE else torch.float32
    if shard.is_meta:
        return torch.zeros(shard.numel(), dtype=dtype, device=device)
    return shard.to(device, dtype)
