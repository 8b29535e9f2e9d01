"""The engine's own collectives over torch.distributed.

On gloo, gathers and reductions are direct exchanges: every rank sends each other rank just what it
needs, point to point. gloo's own all-gather is a ring of copies and its reduce-scatter a whole
all-reduce; the exchange moves the same bytes in about a third of the time (docs/decisions.md).
Elsewhere (NCCL) the library's all-gather and all-to-all are used.

A reduction is an exchange and a local sum in rank order in fp32, so that its value depends neither
on the backend's ring nor on the stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.errors import CheckpointCorruptError, CheckpointError, CollectiveError
from zero_core.protocols import Work

__all__ = ["ControlGroup", "NativeCollectives", "sum_in_rank_order", "wait"]

# torch 2.13 renamed the tensor collectives; the old names warn there.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


def _gather_tag(unit: int) -> int:
    # Ranks that gather different units must not take one for the other.
    return 2 * unit + 1


def _reduce_tag(unit: int) -> int:
    return 2 * unit + 2


class _Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        return None


class _Exchange:
    """Point-to-point operations under way, and what to do when they are done."""

    def __init__(
        self,
        works: Sequence[Work | None],
        finish: Callable[[], None] | None = None,
        contributions: Sequence[Tensor] = (),
    ) -> None:
        self.contributions = contributions
        self._works: Sequence[Work | None] | None = works
        self._finish = finish

    def wait(self) -> None:
        if self._works is None:
            return
        works, self._works = self._works, None
        for work in works:
            if work is not None:
                work.wait()
        if self._finish is not None:
            self._finish()


def sum_in_rank_order(out: Tensor, slices: Sequence[Tensor]) -> None:
    """``out = slices[0] + slices[1] + ...`` from left to right, in fp32 (float64 for float64)."""
    wide = torch.float64 if slices[0].dtype == torch.float64 else torch.float32
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    if len(slices) > 1 and slices[0].dtype == wide:
        torch.add(slices[0], slices[1], out=total)
        rest = slices[2:]
    else:
        total.copy_(slices[0])
        rest = slices[1:]
    for part in rest:
        total.add_(part)
    if total is not out:
        out.copy_(total)


class NativeCollectives:
    """`zero_core.protocols.Collectives` over one process group; see there for the contract."""

    def __init__(
        self, group: dist.ProcessGroup | None, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        """``group`` None means the default group, or none at all if ``world_size`` is 1."""
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._is_direct = world_size > 1 and device.type == "cpu"
        # Where a block's parameter is unused on one rank only, reductions and gathers interleave
        # differently there. Tags keep them apart on gloo; elsewhere each kind has its own group.
        self._reduce_group = group
        if world_size > 1 and not self._is_direct:
            self._reduce_group = dist.new_group(
                dist.get_process_group_ranks(group), use_local_synchronization=True
            )
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """See `zero_core.protocols.Collectives.all_gather`."""
        slices = out.view(self._world_size, -1)
        own = slices[self._rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self._world_size == 1:
            return _Done()
        if not self._is_direct:
            work = _all_gather_single(out, shard, group=self._group, async_op=True)
            return cast(Work, work)
        tag = _gather_tag(unit)
        works = [self._receive(slices[peer], peer, tag) for peer in self._peers()]
        works += [self._send(shard, peer, tag) for peer in self._peers()]
        return _Exchange(works)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.Collectives.reduce_scatter`."""
        if self._world_size == 1:
            sum_in_rank_order(out, [full])
            return _Done()
        numel = out.numel()
        key = (full.numel(), full.dtype)
        free = self._scratch.setdefault(key, [])
        received = free.pop() if free else torch.empty_like(full)
        slices, parts = full.view(self._world_size, numel), received.view(self._world_size, numel)
        sources = list(parts)
        works: list[Work | None] = []
        if self._is_direct:
            sources[self._rank] = slices[self._rank]
            tag = _reduce_tag(unit)
            works += [self._receive(parts[peer], peer, tag) for peer in self._peers()]
            works += [self._send(slices[peer], peer, tag) for peer in self._peers()]
        else:
            works.append(
                dist.all_to_all_single(received, full, group=self._reduce_group, async_op=True)
            )

        def finish() -> None:
            sum_in_rank_order(out, sources)
            free.append(received)

        return _Exchange(works, finish, sources)

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbour, so that no rank is everybody's first target.
        return [(self._rank + k) % self._world_size for k in range(1, self._world_size)]

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        return dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Work | None:
        return dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)


def wait(work: Work, what: Callable[[], str]) -> None:
    """Wait for ``work``; a failure says ``what()`` it was."""
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveError(
            f"{what()} failed or timed out: {error}. If the ranks took different branches or one "
            "of them died, the first rank to report another error is the cause"
        ) from error


class ControlGroup:
    """The few small exchanges beside the data path: facts of a step, names, checksums.

    Bytes and numbers only: object collectives would unpickle what a peer sends.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._device = device

    def sum(self, values: Tensor) -> Tensor:
        """Sum of every rank's ``values``, in place; the same bits on every rank."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self._group)
        return values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, in rank order, on every rank."""
        if self.world_size == 1:
            return [data]
        lengths = self.gather(torch.tensor([len(data)], dtype=torch.int64)).tolist()
        padded = torch.zeros(max(max(lengths), 1), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(padded).view(self.world_size, -1)
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Overwrite ``tensor`` with rank ``source``'s."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self._group, group_src=source)

    def equalize(self, tensor: Tensor) -> None:
        """As `broadcast` from rank 0, for what is likely to be the same on every rank already.

        On a host, where a checksum costs less than sending, nothing is sent if all agree.
        """
        if self.world_size > 1 and tensor.is_cpu:
            content: Any = tensor.view(torch.uint8).numpy()  # a buffer, whatever its stubs say
            digest = hashlib.sha256(content).digest()
            rows = self.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
            if bool((rows.view(self.world_size, -1) == rows[: len(digest)]).all()):
                return
        self.broadcast(tensor)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather_bytes(b"")

    def together(self, what: str, act: Callable[[], object]) -> None:
        """Run ``act`` on every rank; if it fails on one, raise on all, instead of a hang.

        Raises:
            CheckpointCorruptError: that is what it was on some rank.
            CheckpointError: anything else.
        """
        failure: list[str] = []
        try:
            act()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = [type(error).__name__, str(error)]
        rows = [json.loads(row) for row in self.gather_bytes(json.dumps(failure).encode())]
        failed = [f"rank {r}: {': '.join(row)}" for r, row in enumerate(rows) if row]
        if failed:
            is_corrupt = any(row and row[0] == CheckpointCorruptError.__name__ for row in rows)
            kind = CheckpointCorruptError if is_corrupt else CheckpointError
            raise kind(f"{what} failed on {'; '.join(failed)}")

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's 1-D ``tensor`` (equally long), in rank order, on the CPU of every rank."""
        if self.world_size == 1:
            return tensor.cpu()
        local = tensor.to(self._device)
        out = torch.empty(self.world_size * local.numel(), dtype=local.dtype, device=self._device)
        _all_gather_single(out, local, group=self._group)
        return out.cpu()
