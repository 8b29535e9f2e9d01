"""State tier on the compute device: a torch optimizer over slices. `FlatTier` is its base.

[Note: master weights here]
A parameter shard of a dtype in ``own_masters`` (by default fp32 and float64) is its own master
weight and is updated in place. Any other shard has a separate fp32 master weight, which is rounded
into the shard after a step. A shard on another device than the update's always has a separate one.

[Note: states]
Each piece of the local flat space (`zero_core.protocols`) is an ``nn.Parameter`` over its slice of
the master weights, so any elementwise torch optimizer runs with its own kernels. States are views
of flat buffers, one per state and dtype. On an accelerator the buffers are allocated in ``build``,
so that a job that does not fit fails early, and states do not fragment activation memory. The
optimizer then starts from states of zeros, if a trial step shows that this equals starting without
states. On a CPU, or if the results differ (SGD with dampening, NAdam), the optimizer creates states
in its first step, and they are moved to the buffers.

[Note: turns]
A step updates the pieces in turns of at most `TURN_NUMEL` elements, which bounds the optimizer's
temporary memory (``foreach`` allocates at least 4 bytes per element). Gradients narrower than the
master weights are widened into one buffer shared by all turns. A piece larger than a turn is split
into several parameters.

[Note: ahead of the decision]
Torch's fused kernels read ``found_inf`` on the device and change nothing if it is 1. A step can
therefore be enqueued before the host knows whether to take it (`DeviceTier.step_ahead`). Gradients
are multiplied by ``grad_scale`` outside the kernel, so that results are bit-identical to `step`.
States that the optimizer creates in such a step (SGD's, if momentum was 0 in ``build``) are
uninitialized if the step changed nothing, and are then dropped.
"""

from __future__ import annotations

import copy
import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero_core._libc import release_free_pages
from zero_core._torch import set_found_inf, takes_found_inf
from zero_core.config import WIDE_DTYPES, master_dtype
from zero_core.layout.arithmetic import ALIGNMENT, round_up
from zero_core.protocols import ChangeWatcher, ParamStore

MASTER = "master_weight"
_STORED_NUMEL = 1 << 18  # elements per write to a `ParamStore`, few enough for the CPU cache
TURN_NUMEL = 1 << 26
"""Maximum number of elements that are updated at once: 256 MiB of fp32."""


class Chunked:
    """Flat index space ``[0, numel)``, stored as consecutive 1-D tensors."""

    def __init__(self, chunks: Sequence[tuple[int, Tensor]]) -> None:
        self.chunks = list(chunks)
        self.starts = [start for start, _ in chunks]

    def parts(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """Return (start, view) pairs that cover ``[start, stop)``."""
        found: list[tuple[int, Tensor]] = []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            low, tensor = self.chunks[index]
            end = min(stop, low + tensor.numel())
            found.append((start, tensor[start - low : end - low]))
            start, index = end, index + 1
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of ``[start, stop)`` on the CPU."""
        parts = [part.detach().cpu() for _, part in self.parts(start, stop)]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def write(self, start: int, values: Tensor) -> None:
        for low, part in self.parts(start, start + values.numel()):
            part.copy_(values[low - start : low - start + part.numel()])

    def one(self, start: int, stop: int) -> Tensor:
        """Return a view of ``[start, stop)``, which must be within one chunk."""
        ((_, view),) = self.parts(start, stop)
        return view


class FlatTier:
    """Base class of tiers with master weights of the local flat space on the updating device."""

    owns_grads = False

    def __init__(
        self,
        *,
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        param_store: ParamStore | None,
        own_masters: Collection[torch.dtype],
    ) -> None:
        """Create master weights. ``own_masters``: dtypes of shards that are their own masters."""
        self._device = device
        self._published = Chunked(params)
        self._store = param_store
        masters = []
        for start, shard in params:
            dtype = master_dtype(shard.dtype, own_masters)
            if shard.is_meta:
                masters.append((start, torch.zeros(shard.numel(), dtype=dtype, device=device)))
            else:
                masters.append((start, shard.to(device, dtype)))
        self._masters = Chunked(masters)
        self._grads: dict[int, Tensor] = {}
        self._scaled: set[int] = set()  # starts of offered gradients that were scaled in place
        # Asynchronous copies of updated shards to the host, on a separate stream: {start: (stop,
        # event)}. A copy waits for the update, readers of the shard wait for its event, and the
        # next update waits for all copies. A step does not block the host.
        self._downloads: dict[int, tuple[int, torch.Event]] = {}
        self._download_stream: torch.Stream | None = None

    def offer_grad(self, start: int, grad: Tensor) -> None:
        self._grads[start] = grad
        self._scaled.discard(start)

    def discard_grads(self) -> None:
        self._grads.clear()
        self._scaled.clear()

    def _scale_offers(self, firsts: Iterable[int], factor: Tensor | float) -> list[int]:
        """Scale the offered gradients that contain the elements ``firsts``. Return their starts.

        Each is scaled once, in place. Those that must be widened are scaled after widening instead.
        """
        offered = sorted(self._grads)
        starts = sorted({offered[bisect_right(offered, first) - 1] for first in firsts})
        for start in () if isinstance(factor, float) and factor == 1.0 else starts:
            grad = self._grads[start]
            if start not in self._scaled and grad.dtype == self._master_dtype(start):
                grad.mul_(factor)
                self._scaled.add(start)
        return starts

    def read_grad(self, start: int, stop: int) -> Tensor:
        grads = Chunked([(s, self._grads[s]) for s in sorted(self._grads)])
        return torch.cat([part.cpu() for _, part in grads.parts(start, stop)])

    def wait_params(self, start: int, stop: int) -> None:
        """Make the current stream wait for copies to the host that overlap ``[start, stop)``."""
        for low, (high, event) in self._downloads.items():
            if low < stop and high > start:
                torch.accelerator.current_stream(self._device).wait_event(event)

    def are_params_ready(self, start: int, stop: int) -> bool:
        downloads = self._downloads.items()
        return all(e.query() for low, (high, e) in downloads if low < stop and high > start)

    def _wait_for_downloads(self) -> None:
        if self._download_stream is not None and self._downloads:
            torch.accelerator.current_stream(self._device).wait_stream(self._download_stream)

    def _master_dtype(self, start: int) -> torch.dtype:
        return self._masters.chunks[bisect_right(self._masters.starts, start) - 1][1].dtype

    def _copies(self, start: int, stop: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return (start, master weights, shard) for parts whose master weights are separate."""
        masters, shards = self._masters.parts(start, stop), self._published.parts(start, stop)
        return [
            (low, master, shard)
            for (low, master), (_, shard) in zip(masters, shards, strict=True)
            if shard.is_meta or shard.data_ptr() != master.data_ptr()
        ]

    def _write_master(self, start: int, values: Tensor) -> None:
        self._wait_for_downloads()
        self._masters.write(start, values)
        self._publish(self._copies(start, start + values.numel()))
        if self._download_stream is not None:
            self._download_stream.synchronize()
            self._downloads.clear()

    @torch.no_grad()
    def _publish(self, copies: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Round master weights into the parameter shards."""
        away = []
        for start, master, shard in copies:
            if shard.is_meta:
                assert self._store is not None, "whoever gives meta shards gives a store"
                at_once = _STORED_NUMEL if master.is_cpu else master.numel()
                for low in range(0, master.numel(), max(at_once, 1)):
                    part = master[low : low + at_once]
                    self._store.write(start + low, part.to(shard.dtype))
            elif shard.device == master.device or master.is_cpu:
                shard.copy_(master)
            else:
                away.append((start, master, shard))
        if not away:
            return
        stream = self._download_stream = self._download_stream or torch.Stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for start, master, shard in away:
                shard.copy_(master.to(shard.dtype), non_blocking=True)
                self._downloads[start] = start + shard.numel(), stream.record_event()


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece, or a part of a large piece: range ``[start, stop)`` of the local flat space."""

    piece: int  # index of the piece
    start: int
    stop: int
    group: int  # index of the parameter group
    param: nn.Parameter  # master weights
    states: dict[str, Tensor]  # elementwise states by name: views of the flat buffers


@dataclass(slots=True)
class _Turn:
    """Parts that are updated together. See [Note: turns]."""

    members: list[list[nn.Parameter]]  # parameters by group
    parts: list[_Part] = field(default_factory=list)  # sorted by start
    extents: dict[int, list[int]] = field(default_factory=dict)  # [start, stop] by gradient start
    sizes: list[list[int]] = field(default_factory=list)  # lengths of parts and gaps, by extent
    places: list[int] = field(default_factory=list)  # each part's index in all ``sizes``, joined

    def add(self, part: _Part, offer: int) -> None:
        self.parts.append(part)
        self.members[part.group].append(part.param)
        if offer not in self.extents:
            self.extents[offer] = [part.start, part.start]
            self.sizes.append([])
        place = self.places[-1] + 1 if self.places else 0
        extent, sizes = self.extents[offer], self.sizes[-1]
        if part.start > extent[1]:
            sizes.append(part.start - extent[1])
            place += 1
        sizes.append(part.stop - part.start)
        self.places.append(place)
        extent[1] = part.stop


class DeviceTier(FlatTier):
    """State tier on the compute device. It can enqueue a step before the host has decided on it."""

    turn_numel: ClassVar[int] = TURN_NUMEL

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
        own_masters: Collection[torch.dtype] = WIDE_DTYPES,
    ) -> None:
        super().__init__(
            params=params, device=device, param_store=param_store, own_masters=own_masters
        )
        self._make = optimizer_maker(optimizer_class, groups)
        self._flat: dict[str, Chunked] = {MASTER: self._masters}
        self._num_steps = [0] * len(pieces)
        self._ahead: list[int] = []  # pieces updated by `step_ahead`
        self._made: list[tuple[_Part, str]] = []  # states created in the last step
        self._parts: list[list[_Part]] = []  # parts of each piece
        self._members: list[list[nn.Parameter]] = [[] for _ in groups]
        for piece, (start, stop, group) in enumerate(pieces):
            self._parts.append(
                [
                    _Part(piece, low, high, group, nn.Parameter(self._masters.one(low, high)), {})
                    for low, high in pairwise([*range(start, stop, self.turn_numel), stop])
                ]
            )
            self._members[group] += [part.param for part in self._parts[-1]]
        # The last step's turns and copies, reused for equal active pieces and ranges of gradients.
        self._plan_key: tuple[tuple[int, ...], tuple[tuple[int, int], ...]] | None = None
        self._turns: list[_Turn] = []
        self._plan_copies: list[tuple[int, Tensor, Tensor]] = []
        self._widened: dict[torch.dtype, Tensor] = {}
        self._watcher: ChangeWatcher | None = None
        # State before the first step, by dtype and group. None: the optimizer must create it.
        self._initial: dict[tuple[torch.dtype, int], dict[str, Any] | None] = {}
        self._optimizer = self._make(
            [{**g, "params": m} for g, m in zip(groups, self._members, strict=True)]
        )
        for part in chain.from_iterable(self._parts):
            if part.param in self._optimizer.state:  # made at construction, such as Adagrad's sum
                self._flatten_state(part)
        self._made.clear()
        if not self._parts or device.type in ("cpu", "meta"):
            return  # the optimizer creates its states in the first step: see [Note: states]
        for dtype, kinds in self._probe().items():
            for name, kind in kinds.items():
                if name not in self._flat:
                    self._flat[name] = self._new_flat(name, kind)
            for number, options in enumerate(self._optimizer.param_groups):
                found = _probe_initial_state(self._make, options, self._device, dtype)
                self._initial[dtype, number] = found
        for part in chain.from_iterable(self._parts):
            self._give_state(part)

    def _give_state(self, part: _Part) -> bool:
        """Set a part's states to zeros in flat buffers. Return False if zeros cannot be used."""
        initial = self._initial.get((part.param.dtype, part.group))
        if initial is None:
            return False
        part.states.clear()
        state: dict[str, Any] = {}
        for name, value in initial.items():
            if isinstance(value, Tensor) and name in self._flat:
                state[name] = part.states[name] = self._state_of(part, name)
            else:
                state[name] = value.clone() if isinstance(value, Tensor) else value
        self._optimizer.state.pop(part.param, None)
        if state:
            self._optimizer.state[part.param] = state
        return True

    def _state_of(self, part: _Part, name: str) -> Tensor:
        return self._flat[name].one(part.start, part.stop)

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        for start, _, dtype in grads:
            if self._parts and dtype != (master := self._master_dtype(start)):
                self._buffer(master)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        states = [t for k, flat in self._flat.items() if k != MASTER for _, t in flat.chunks]
        for state in self._optimizer.state.values():
            states += [v for v in state.values() if isinstance(v, Tensor) and v.dim()]
        return {
            "master_weights": [tensor for _, tensor in self._masters.chunks],
            "optimizer_states": states,
            "buffers": list(self._widened.values()),
        }

    @property
    def can_step_ahead(self) -> bool:
        """Whether the kernels read ``found_inf``, and a step runs entirely on the device."""
        has_states = bool(self._initial) and None not in self._initial.values()
        return has_states and self._store is None and takes_found_inf(self._optimizer)

    def step_ahead(
        self,
        groups: Sequence[Mapping[str, Any]],
        active: Sequence[int],
        *,
        grad_scale: Tensor | float,
        found_inf: Tensor,
    ) -> None:
        """Enqueue a step that changes nothing if ``found_inf`` (0-dim fp32 on the device) is 1.

        ``grad_scale`` is 0-dim float64 on the device, or a number if no gradient needs scaling. It
        must be 1 if ``found_inf`` is 1. Call `settle` when the host knows the outcome. After that,
        `step` may update further pieces of the same training step with the same ``grad_scale``.
        """
        with set_found_inf(self._optimizer, found_inf):
            self.step(groups, active, grad_scale=grad_scale)
        self._ahead = list(active)

    def settle(self, *, is_void: bool) -> None:
        """Finish `step_ahead`. ``is_void``: the update changed nothing and is not counted."""
        if is_void:
            for piece in self._ahead:
                self._num_steps[piece] -= 1
            self._scaled.clear()  # nothing was scaled: the factor was 1
            # States that the void step created are uninitialized: drop them and unused buffers.
            for part, name in self._made:
                part.states.pop(name).zero_()
                del self._optimizer.state[part.param][name]
            for name in {name for _, name in self._made}:
                if not any(name in p.states for p in chain.from_iterable(self._parts)):
                    del self._flat[name]
            self._made.clear()
            self._plan_key = None
        self._ahead = []

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        active: Sequence[int],
        *,
        grad_scale: Tensor | float,
    ) -> None:
        if not active:
            return
        for own, given in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({k: v for k, v in given.items() if k != "params"})
        starts = self._scale_offers([self._parts[i][0].start for i in active], grad_scale)
        self._wait_for_downloads()
        self._made.clear()
        spans = tuple([(start, start + self._grads[start].numel()) for start in starts])
        key = tuple(active), spans
        if self._plan_key != key:
            self._turns, has_states = self._divide(active, starts)
            self._plan_copies = [copied for span in spans for copied in self._copies(*span)]
            # Turns are not reusable if the optimizer creates states in this step.
            self._plan_key = key if has_states else None
        for turn in self._turns:
            for start, stop in turn.extents.values() if self._watcher is not None else ():
                self._announce(start, stop)
            self._run(turn, grad_scale)
            if self._plan_key is None and len(self._turns) > 1:
                release_free_pages()
        for piece in active:
            self._num_steps[piece] += 1
        self._publish(self._plan_copies)

    def _divide(self, active: Sequence[int], starts: Sequence[int]) -> tuple[list[_Turn], bool]:
        """Divide pieces into turns. Also return whether all pieces already have states."""
        turns: list[_Turn] = []
        last_names: set[str] | None = None
        have_all = True
        for part in chain.from_iterable(self._parts[piece] for piece in active):
            offer = starts[bisect_right(starts, self._parts[part.piece][0].start) - 1]
            state = self._optimizer.state.get(part.param, {})
            names = {name for name, v in state.items() if _is_elementwise(part.param, v)}
            is_given = self._initial.get((part.param.dtype, part.group)) is not None
            has_state = is_given or self._num_steps[part.piece] > 0
            have_all &= has_state
            # New states exist twice until they are moved to the flat buffers. Create the states of
            # one offered gradient at a time to limit the extra memory.
            is_full = not turns or not (has_state or offer in turns[-1].extents)
            if not is_full:  # check that there is memory for this part's widened gradient
                extents = turns[-1].extents
                sizes = {known: stop - start for known, (start, stop) in extents.items()}
                sizes[offer] = part.stop - extents.get(offer, (part.start,))[0]
                is_full = widened_numel(sizes.values()) > self.turn_numel
            # Torch's fused SGD creates states for all parameters of a call, or for none.
            if is_full or names != last_names:
                turns.append(_Turn([[] for _ in self._members]))
            last_names = names
            turns[-1].add(part, offer)
        return turns, have_all

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        """Return the shared buffer for widened gradients."""
        if dtype not in self._widened:
            sizes = [m.numel() for _, m in self._masters.chunks if m.dtype == dtype]
            numel = min(widened_numel(sizes), self.turn_numel)
            self._widened[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
        return self._widened[dtype]

    def _run(self, turn: _Turn, factor: Tensor | float) -> None:
        """Update the parts of a turn. Narrow gradients are widened first."""
        views: list[Tensor] = []
        widened: Counter[torch.dtype] = Counter()  # elements of each buffer in use
        for (offer, (start, stop)), sizes in zip(turn.extents.items(), turn.sizes, strict=True):
            dtype = self._master_dtype(start)
            grad = self._grads[offer][start - offer : stop - offer]
            if grad.dtype != dtype:
                wide = self._buffer(dtype)[widened[dtype] :][: stop - start]
                widened[dtype] += round_up(stop - start, ALIGNMENT)
                wide.copy_(grad)  # widened before unscaling, to keep small values
                if not (isinstance(factor, float) and factor == 1.0):
                    wide.mul_(factor)
                grad = wide
            views += torch.split(grad, sizes)
        for part, place in zip(turn.parts, turn.places, strict=True):
            part.param.grad = views[place]
        groups = self._optimizer.param_groups
        try:
            for group, params in zip(groups, turn.members, strict=True):
                group["params"] = params
            self._optimizer.step()
        finally:
            for group, params in zip(groups, self._members, strict=True):
                group["params"] = params
            for part in turn.parts:
                part.param.grad = None
        for part in turn.parts:
            self._flatten_state(part)

    def state_names(self) -> Sequence[str]:
        return list(self._flat)

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        return self._flat[name].read(start, stop)

    peek_state = read_state

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        self._watcher = watcher

    def _announce(self, start: int, stop: int) -> None:
        if self._watcher is not None:
            self._watcher.before_change(start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        self._announce(start, start + values.numel())
        if name not in self._flat:
            if not any(name in states for states in self._probe().values()):
                raise KeyError(f"{self._make.func} has no state {name!r}")
            self._flat[name] = self._new_flat(name, values.dtype)
        if name == MASTER:
            self._write_master(start, values)
        else:
            self._flat[name].write(start, values)

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        param = self._parts[piece][0].param  # all parts of a piece have equal scalars
        scalars = {
            name: float(value)
            for name, value in self._optimizer.state.get(param, {}).items()
            if value is not None and not _is_elementwise(param, value)
        }
        return {"num_steps": float(self._num_steps[piece]), **scalars}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        self._num_steps[piece] = int(scalars["num_steps"])
        self._plan_key = None  # the plan depends on which states exist
        names = [name for name in self._flat if name != MASTER]
        for part in self._parts[piece]:
            self._announce(part.start, part.stop)
            group = self._optimizer.param_groups[part.group]
            if self._num_steps[piece]:
                self._optimizer.state[part.param] = state = {}
                # Fused and capturable kernels read the step count on the device.
                is_on_device = bool(group.get("fused") or group.get("capturable"))
                device = part.param.device if is_on_device else torch.device("cpu")
                for name, value in scalars.items():
                    if name != "num_steps":
                        state[name] = torch.tensor(value, dtype=torch.float32, device=device)
                for name in names:
                    state[name] = part.states[name] = self._state_of(part, name)
                continue
            for name in names:
                self._state_of(part, name).zero_()
            if not self._give_state(part):  # for example Adagrad, which starts from an initial sum
                fresh = self._make([{**group, "params": [part.param]}])
                self._optimizer.state[part.param] = dict(fresh.state.get(part.param, {}))
                self._flatten_state(part)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        states = self._probe()
        for name in names:
            if name not in self._flat and not any(name in found for found in states.values()):
                raise KeyError(f"{self._make.func} has no state {name!r}")

        @cache
        def needed(group: int, dtype: torch.dtype) -> set[str]:
            zeros = torch.zeros(2, dtype=dtype, device=self._device)
            _, own = _probe(self._make, self._optimizer.param_groups[group], zeros, zeros)
            return {k for k, v in own.items() if v is not None} - states[dtype].keys()

        for (part, *_), given in zip(self._parts, scalars, strict=True):
            if given["num_steps"]:
                extra = sorted(given.keys() & states[part.param.dtype].keys())
                missing = sorted(needed(part.group, part.param.dtype) - given.keys())
                if extra or missing:
                    raise ValueError(
                        f"the state is another optimizer's: scalars {extra} are tensors of this "
                        f"one, {missing} are missing"
                    )

    def _probe(self) -> dict[torch.dtype, dict[str, torch.dtype]]:
        """Return names and dtypes of the possible states, by the dtype of the master weights."""
        return {
            dtype: probe_states(self._make, self._optimizer.param_groups, self._device, dtype)
            for dtype in dict.fromkeys(master.dtype for _, master in self._masters.chunks)
        }

    def _flatten_state(self, part: _Part) -> None:
        """Move states that the optimizer has just created into the flat buffers."""
        state = self._optimizer.state[part.param]
        for name, value in state.items():
            if value is part.states.get(name) or not _is_elementwise(part.param, value):
                continue
            if name not in self._flat:
                self._flat[name] = self._new_flat(name, value.dtype)
            home = self._state_of(part, name)
            if value.data_ptr() != home.data_ptr():
                home.copy_(value)
            state[name] = part.states[name] = home
            self._made.append((part, name))

    def _new_flat(self, name: str, dtype: torch.dtype) -> Chunked:
        """Allocate zeros for state ``name``, in one buffer per dtype."""
        chunks = self._masters.chunks
        of_master = {master.dtype: dtype for _, master in chunks}
        if len(of_master) > 1:
            of_master = {m: states.get(name, dtype) for m, states in self._probe().items()}
        found: list[tuple[int, Tensor]] = []
        for kind in dict.fromkeys(of_master.values()):
            same = [(start, m.numel()) for start, m in chunks if of_master[m.dtype] == kind]
            flat = torch.zeros(sum(n for _, n in same), dtype=kind, device=self._device)
            views = torch.split(flat, [numel for _, numel in same])
            found += zip([start for start, _ in same], views, strict=True)
        return Chunked(sorted(found, key=lambda chunk: chunk[0]))


def _is_elementwise(param: Tensor, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


def widened_numel(sizes: Iterable[int]) -> int:
    """Return the number of elements of a buffer for gradients of ``sizes``, each one aligned."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def optimizer_maker(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> partial[torch.optim.Optimizer]:
    """Return a constructor of the optimizer, with the options of ``groups[0]``.

    Some options, such as Adagrad's initial sum, apply only at construction, not per group.
    """
    make: Any = optimizer_class  # constructors have different signatures
    taken = inspect.signature(optimizer_class).parameters.keys() - {"params"}
    return partial(make, **{name: v for name, v in groups[0].items() if name in taken})


def probe_states(
    make: partial[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (2,),
) -> dict[str, torch.dtype]:
    """Return names and dtypes of the elementwise states that a parameter has after one step."""
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    return {
        name: value.dtype
        for group in groups
        for name, value in _probe(make, group, zeros, zeros)[1].items()
        if isinstance(value, Tensor) and value.shape == shape
    }


def _probe(
    make: partial[torch.optim.Optimizer],
    group: Mapping[str, Any],
    values: Tensor,
    grad: Tensor,
    state: Mapping[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Run a step from ``state`` on a copy of ``values``. Return new values and optimizer state."""
    probe = nn.Parameter(values.clone())
    probe.grad = grad.clone()
    optimizer = make([{**group, "params": [probe]}])
    if state:
        optimizer.state[probe] = copy.deepcopy(state)
    optimizer.step()
    return probe.detach(), dict(optimizer.state.get(probe, {}))


def _probe_initial_state(
    make: partial[torch.optim.Optimizer],
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any] | None:
    """Return a state of zeros if a first step from it equals one without state, otherwise None."""
    values, grad = torch.tensor([[1.0, -0.75], [0.5, -3.0]], dtype=dtype, device=device)
    expected, state = _probe(make, group, values, grad)
    zeros = {
        name: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    found, from_zeros = _probe(make, group, values, grad, zeros)
    is_same = torch.equal(found, expected) and all(
        torch.equal(from_zeros[name], value) if isinstance(value, Tensor) else value is None
        for name, value in state.items()
    )
    return zeros if is_same else None
