"""Storage and update of a tier's master weights and optimizer state.

`Stepper.plan` runs in the caller's thread and checks its arguments. `Stepper.update` then runs
chunk by chunk, for a host tier in its worker thread.

`RuleStepper` updates by a fused host kernel. As in ZeRO-Offload (arXiv 2101.06840, section 5) one
pass over memory reads the gradient, updates master weights and states, and writes the rounded
parameters.

[Note: blocks]
A block is a range of elements in one shard with a `Rule` and a set of buffers, with fp32 master
weights first unless they are split. Under a rule that updates any span, a block is all or a part of
a shard, padding included. Under a rule with ``block`` > 1 it is inside one piece and starts at a
multiple of ``block`` elements from the piece's start (see `zero_offload.rules.rule`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run, SpanMap, plan_runs
from zero_offload.flat.grads import GradLedger, add_up
from zero_offload.memory.storage import BlockFile
from zero_offload.protocols import ChangeWatcher, Groups
from zero_offload.rules.rule import (
    KERNEL_DTYPES,
    MASTER,
    PARAM,
    REMAINDER,
    Copies,
    Grad,
    Rule,
    Stored,
)
from zero_offload.threads import num_kernel_threads

_SQUARED_NUMEL = 1 << 20
"""Elements whose squares are summed at once, so that their fp32 gradient takes 4 MiB."""

SpanMemory = Callable[[int, int], Tensor]
"""Function that returns memory for the parameters of a range inside one shard."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Runs that are updated together and then published one by one."""

    runs: tuple[Run, ...]
    settings: Any = None


def spans_of(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    return [(run.start, run.stop) for chunk in chunks for run in chunk.runs]


class ShardMasters:
    """Master weights of a flat space on one device, shard by shard.

    ``upper_halves`` maps a shard's index to memory in its dtype for the upper half of a split
    master weight. The constructor copies the shard there. With ``is_in_place`` the other shards are
    their own master weights if all of them have the master dtype and are on ``device``.

    Attributes:
        is_in_place: whether all unsplit master weights are the shards themselves.
        num_bytes: bytes of master weights (of split ones: upper halves), including shards.
        num_copy_bytes: bytes of master weights that are not memory of a shard.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        is_in_place: bool,
        upper_halves: Mapping[int, Tensor] | None = None,
    ) -> None:
        upper, dtype = upper_halves or {}, geometry.master_dtype
        self.is_in_place = is_in_place and all(
            shard.dtype == dtype and shard.device.type == device.type
            for i, (_, shard) in enumerate(geometry.shards)
            if i not in upper
        )
        masters: list[tuple[int, Tensor]] = []
        self.num_bytes = self.num_copy_bytes = 0
        for i, (start, shard) in enumerate(geometry.shards):
            if i in upper:
                master = upper[i].copy_(shard)
            elif shard.is_meta:  # A shard on the meta device has no values.
                master = torch.zeros(shard.numel(), dtype=dtype, device=device)
            else:
                master = shard if self.is_in_place else shard.to(device, dtype, copy=True)
            masters.append((start, master))
            self.num_bytes += master.nbytes
            if shard.is_meta or master.data_ptr() != shard.data_ptr():
                self.num_copy_bytes += master.nbytes
        self._space = Geometry(geometry.numel, (), masters, 0, master_dtype=dtype)

    def view(self, start: int, stop: int) -> Tensor:
        """Return the memory of a range inside one shard: upper halves if its masters are split."""
        return self._space.view(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a CPU copy of a range: zero between shards, upper halves of split masters."""
        values = torch.zeros(stop - start, dtype=self._space.master_dtype, device="cpu")
        for a, b, master in self._space.overlaps(start, stop):
            values[a - start : b - start].copy_(master)
        return values

    def write(self, start: int, values: Tensor) -> None:
        for a, b, master in self._space.overlaps(start, start + values.numel()):
            master.copy_(values[a - start : b - start])


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of master weights and states. ``master_copies`` excludes the memory of shards."""

    masters: int
    master_copies: int
    states: int


class Stepper(ABC):
    """Master weights and optimizer state of one flat space on ``device``, and their update.

    Attributes:
        has_kernel: whether a host kernel, not torch, computes the update.
        is_in_place: whether `update` changes the shards themselves and ignores ``out``.
        states: names and dtypes of the elementwise states, without the master weight.
        num_steps: number of updates of each piece.
        is_sequential: whether chunks must be updated in the order of `plan`.
        file: the file of master weights and states, or None if they are in memory.
        watcher: its ``before_change`` is called before states change.
    """

    has_kernel: bool
    is_in_place: bool
    is_sequential: bool = False
    states: Mapping[str, torch.dtype]
    file: BlockFile | None = None

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.num_steps = [0] * len(geometry.pieces)
        self.watcher: ChangeWatcher | None = None

    def announce(self, spans: Iterable[tuple[int, int]]) -> None:
        """Call the watcher, if any, for each span. Call this before every change of states."""
        if self.watcher is not None:
            for span in spans:
                self.watcher.before_change(*span)

    @abstractmethod
    def num_bytes(self) -> StateBytes: ...

    @abstractmethod
    def plan(self, active: Sequence[int], groups: Groups, grads: GradLedger) -> list[Chunk]:
        """Return the chunks of a step in ascending order, or raise ValueError."""

    @abstractmethod
    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float, out: SpanMemory) -> None:
        """Update a chunk. Write each run's rounded values to ``out``'s memory, unless in place."""

    def round_values(self, start: int, values: Tensor, out: Tensor) -> None:
        """Write ``values``, the master weights from ``start`` on, to ``out``, rounded."""
        out.copy_(values.to(self.geometry.master_dtype))

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a 1-D CPU copy of a state or ``master_weight``, zero where none is stored."""

    def peek(self, name: str, start: int, stop: int) -> Tensor:
        """Return the same as `read`, in any thread. The range must not be updated meanwhile."""
        return self.read(name, start, stop)

    @abstractmethod
    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a state or ``master_weight`` from ``start`` on."""

    @abstractmethod
    def read_scalars(self, piece: int) -> dict[str, float]:
        """Return ``num_steps`` and the optimizer's scalars of one piece."""

    @abstractmethod
    def check_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Raise ValueError if `write_scalars` could not restore these scalars."""

    @abstractmethod
    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the result of `read_scalars`. Call it after `check_scalars`."""

    def square_sum(self, terms: list[Tensor]) -> float:
        """Return the sum of squares of the sum of ``terms``, in double precision.

        Any thread may call it. ``terms`` are 1-D, in host memory, and are added in order in the
        dtype of the master weights.
        """
        found = 0.0
        for start in range(0, terms[0].numel(), _SQUARED_NUMEL):
            parts = [term[start : start + _SQUARED_NUMEL] for term in terms]
            total = torch.empty(parts[0].numel(), dtype=self.geometry.master_dtype, device="cpu")
            add_up(parts, total)
            found += float(torch.linalg.vector_norm(total, dtype=torch.float64).square())
        return found

    def settle(self) -> None:
        """Complete transfers to a file, if any. Called in the update thread at a job's end."""
        return

    def count(self, active: Sequence[int]) -> None:
        for i in active:
            self.num_steps[i] += 1


def check_num_steps(scalars: Mapping[str, float]) -> int:
    found = scalars.get("num_steps")
    if found is None or found < 0 or found != int(found):
        raise ValueError(f"scalars need a whole, non-negative num_steps, got {dict(scalars)}")
    return int(found)


_Kept = Mapping[str, tuple[torch.dtype, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``[start, stop)``, their rule, and dtype and length of each of their buffers."""

    start: int
    stop: int
    rule: Rule
    kept: _Kept

    def clip(self, stored: Stored, start: int, stop: int) -> dict[str, Tensor]:
        """Return the buffers of a range, which is the whole block if the rule has blocks."""
        if self.rule.block == 1:
            low, high = start - self.start, stop - self.start
            return {name: values[low:high] for name, values in stored.items()}
        assert (start, stop) == (self.start, self.stop), "a block is one span"
        return dict(stored)

    def decode(self, stored: Stored, name: str, start: int, stop: int) -> Tensor:
        return self.rule.decode(name, stored, start - self.start, stop - self.start)

    def encode(self, stored: Stored, name: str, start: int, values: Tensor) -> None:
        self.rule.encode(name, stored, start - self.start, values.to("cpu"))


class BlockLayout:
    """The blocks of a flat space, as pure arithmetic. See [Note: blocks].

    ``rules`` are the rules of the shards, all with the same ``block``. A block has at most
    ``block_numel`` elements (None: no limit), rounded up to a multiple of the rule's ``block``.
    ``record_bytes`` has, block by block, the bytes of each buffer in ``names``, 0 for none.
    """

    def __init__(
        self, geometry: Geometry, rules: Sequence[Rule], block_numel: int | None = None
    ) -> None:
        self.blocks: list[Block] = []
        shards = zip(geometry.shards, rules, strict=True)
        ranges = [(start, start + shard.numel(), rule) for (start, shard), rule in shards]
        if any(rule.block > 1 for rule in rules):
            pieces = zip(geometry.pieces, geometry.piece_shards, strict=True)
            ranges = [(piece.start, piece.stop, rules[index]) for piece, index in pieces]
        for start, stop, rule in ranges:
            own = rule.block
            most = stop - start if block_numel is None else -(-block_numel // own) * own
            for low in range(start, stop, max(most, 1)):
                high = min(low + most, stop)
                self.blocks.append(Block(low, high, rule, _kept(rule, high - low)))
        self._index = SpanMap((b.start, b.stop, i) for i, b in enumerate(self.blocks))
        everything = [*(_kept(rule, 0) for rule in rules), *(block.kept for block in self.blocks)]
        self.names = tuple(dict.fromkeys(name for kept in everything for name in kept))
        kept_or_none = (block.kept.get(n) for block in self.blocks for n in self.names)
        self.record_bytes = [k[0].itemsize * k[1] if k else 0 for k in kept_or_none]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(index, a, b)`` for each part ``[a, b)`` of the range in block ``index``."""
        return ((index, a, b) for a, b, index in self._index.overlaps(start, stop))

    def parts_of(self, index: int, name: str) -> list[int]:
        """Return the indices in ``names`` of the buffers to transfer for one state of a block."""
        block = self.blocks[index]
        if name == MASTER and block.rule.is_master_split:
            return [self.names.index(PARAM), self.names.index(REMAINDER)]
        if name == MASTER or block.rule.block == 1:
            return [self.names.index(name)]
        return [part for part, n in enumerate(self.names) if n in block.kept and n != MASTER]


def _kept(rule: Rule, numel: int) -> _Kept:
    whole = {} if rule.is_master_split else {MASTER: (torch.float32, numel)}
    return {**whole, **rule.stored(numel)}


class RuleStepper(Stepper):
    """Stepper whose update is a `Rule`. Subclasses store the blocks."""

    has_kernel = True

    def __init__(self, geometry: Geometry, rule: Rule, layout: BlockLayout, groups: Groups) -> None:
        super().__init__(geometry, torch.device("cpu"))
        self.rule = rule
        self.layout = layout
        self.states = rule.states
        self._initial = [{name: rule.initial(name, g) for name in rule.states} for g in groups]

    @abstractmethod
    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        """Divide the runs of a step into chunks, in ascending order."""

    @abstractmethod
    def take(self, index: int) -> dict[str, Tensor]:
        """Return the buffers of a block, which the caller may use until `put`."""

    @abstractmethod
    def put(self, index: int) -> None:
        """Store the updated buffers of a block that was taken."""

    def fill(self, pieces: Iterable[int], *, is_fresh: bool) -> None:
        """Write the pieces' initial states. With ``is_fresh`` the storage has zeros already."""
        for span in (self.geometry.pieces[i] for i in pieces):
            for name, value in self._initial[span.group].items():
                if value or not is_fresh:
                    first = torch.full((span.stop - span.start,), value, device="cpu")
                    self.write(name, span.start, first)

    def plan(self, active: Sequence[int], groups: Groups, grads: GradLedger) -> list[Chunk]:
        pieces = self.geometry.pieces
        keys: dict[int, Hashable] = {
            i: self.rule.hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active
        }
        runs = plan_runs(self.geometry, active, keys)
        for run in runs:
            grads.segments(run.start, run.stop)  # raises for a missing gradient
        return self.chunks(runs)

    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float, out: SpanMemory) -> None:
        taken: dict[int, dict[str, Tensor]] = {}
        for run in chunk.runs:
            rounded = None if self.is_in_place else out(run.start, run.stop)
            for index, start, stop in self.layout.overlaps(run.start, run.stop):
                block = self.layout.blocks[index]
                if index not in taken:
                    taken[index] = self.take(index)
                stored = block.clip(taken[index], start, stop)
                own = None if rounded is None else rounded[start - run.start : stop - run.start]
                self.update_span(block, start, stop, stored, grads, run.key, grad_scale, own)
        for index in taken:
            self.put(index)

    def update_span(
        self,
        block: Block,
        start: int,
        stop: int,
        stored: Stored,
        grads: GradLedger,
        key: Hashable,
        grad_scale: float,
        out: Tensor | None,
        copies: Copies = (),
    ) -> None:
        """Update a range, which ``stored`` and ``copies`` cover, with the settings ``key``."""
        is_any = block.rule.block == 1
        calls = (
            grads.segments(start, stop) if is_any else [(start, stop, grads.joined(start, stop))]
        )
        for a, b, terms in calls:
            own, copied = dict(stored), copies
            if (a, b) != (start, stop):
                part = slice(a - start, b - start)
                own = {name: values[part] for name, values in stored.items()}
                copied = [(source[part], target[part]) for source, target in copies]
            master, grad = own.pop(MASTER, None), _kernel_grad(block.rule, terms)
            rounded = None if out is None else out[a - start : b - start]
            block.rule.update(master, grad, own, key, grad_scale, rounded, copied)

    def round_values(self, start: int, values: Tensor, out: Tensor) -> None:
        master = values.to("cpu", torch.float32)
        out.copy_(master)
        for index, a, b in self.layout.overlaps(start, start + values.numel()):
            part = slice(a - start, b - start)
            self.layout.blocks[index].rule.round_to(master[part], out[part])

    def square_sum(self, terms: list[Tensor]) -> float:
        kernel = self.rule.summing
        if kernel is None or any(term.dtype not in KERNEL_DTYPES for term in terms):
            return super().square_sum(terms)
        total, _ = kernel.grad_norm_sq(terms, num_threads=num_kernel_threads())
        return total

    def read_scalars(self, piece: int) -> dict[str, float]:
        count = self.num_steps[piece]
        own = dict.fromkeys(self.rule.scalars, float(count)) if count else {}
        return {"num_steps": count, **own}

    def check_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(
                f"{type(self.rule).__name__} has no scalars {unknown}; the state is another "
                f"optimizer's"
            )

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        count = int(scalars["num_steps"])
        if count == 0:
            self.fill([piece], is_fresh=False)
        self.num_steps[piece] = count


def _kernel_grad(rule: Rule, terms: list[Tensor]) -> Grad:
    served = [term if term.dtype in KERNEL_DTYPES else term.float() for term in terms]
    if len(served) == 1:
        return served[0]
    if rule.summing is not None:
        return served
    total = torch.empty(served[0].numel(), dtype=torch.float32, device="cpu")
    add_up(served, total)
    return total
