"""`TransportCollectives` over plain torch.distributed.

[Note: one order]
A process group matches collectives by the order in which its ranks start them. Here the calling
thread starts every collective immediately, and `TorchCollectives.launch` runs its job before it
returns. The order is therefore the same on every rank. A **subgroup** needs no process group of its
own. Its exchanges are all-to-alls of the whole group with empty parts for ranks outside the
subgroup. NCCL sends nothing for an empty part, and gloo an empty message.

The alternative, ``dist.new_group``, must be called by every rank of the job in the same order. It
can hang if ranks reach their first reduction at different times, as pipeline stages do. With
``use_local_synchronization`` it names a group by the number of groups that a rank was in before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.transport.protocol import Work
from zero_comm.transport.torch_compat import all_gather_single


class DoneWork:
    """Work of an operation that was complete when it returned."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True, eq=False)
class _SumWork:
    """Work of a reduction, whose first ``wait`` sums the received rows into ``out``."""

    work: Work
    out: Tensor
    rows: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        if (rows := self.rows) is not None:
            total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
            for row in rows[1:]:
                total.add_(row)
            self.out.copy_(total)
            self.rows = None  # only here: after a failed wait, the next wait must not return early


class TorchCollectives:
    """`zero_comm.transport.protocol.TransportCollectives` over a process group of any backend.

    Tensors are flat and contiguous, and are sent as bytes. All ranks of the group must call the
    same methods in the same order, see [Note: one order]. ``group`` None is the default group, or
    a single rank if torch.distributed is not initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        world_size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the process group that was given")
        self._set_members(tuple(range(world_size)), rank)

    def _set_members(self, members: tuple[int, ...], rank: int) -> None:
        """Renumber ``members`` of the process group as the ranks 0, 1, ... of these collectives."""
        self._members = members
        self.rank = rank
        self.world_size = len(members)

    def subgroup(self, ranks: Sequence[int]) -> TorchCollectives:
        """Return collectives among some of the ranks. See [Note: one order].

        Every rank must call it with the ascending ranks of its own subgroup. All ranks must also
        call the methods of the result equally often.
        """
        ranks = tuple(ranks)
        if self.rank not in ranks or [*ranks] != sorted({*ranks} & {*range(self.world_size)}):
            raise ValueError(
                f"ranks of a subgroup must be ascending ranks below {self.world_size}, {self.rank} "
                f"among them, got {[*ranks]}"
            )
        part = copy.copy(self)
        part._set_members(tuple(self._members[r] for r in ranks), ranks.index(self.rank))
        return part

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, which may be its slice of ``out``."""
        self._check_out(out, shard.numel() * self.world_size, shard.dtype)
        if self._is_silent(shard):
            return _copied(out, shard)
        if self._is_part:
            return self.all_to_all(out, shard.repeat(self.world_size), unit=unit)
        work = all_gather_single(_as_bytes(out), _as_bytes(shard), self.group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        return work

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice ``k`` of ``out`` with slice ``rank`` of rank ``k``'s ``parts``."""
        self._check_out(out, parts.numel(), parts.dtype)
        if parts.numel() % self.world_size:
            raise ValueError(
                f"parts must be slices of equal length for {self.world_size} ranks, got "
                f"{parts.numel()} elements"
            )
        if self._is_silent(parts):
            return _copied(out, parts)
        sizes = None
        if self._is_part:  # parts for ranks outside the subgroup are empty
            nbytes = parts.nbytes // self.world_size
            ranks = range(dist.get_world_size(self.group))
            sizes = [nbytes if rank in self._members else 0 for rank in ranks]
        work: Work = dist.all_to_all_single(
            _as_bytes(out), _as_bytes(parts), sizes, sizes, group=self.group, async_op=True
        )
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        ``wait`` adds in fp32 (fp64 for fp64 input) and in rank order, so that all runs are equal.
        """
        received = torch.empty_like(full)
        work = self.all_to_all(received, full, unit=unit)
        return _SumWork(work, out, received.view(self.world_size, -1))

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Allocate zeroed ordinary memory, which is enough for torch.distributed."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job`` immediately on the current stream. See [Note: one order]."""
        job()
        return DoneWork()

    @property
    def _is_part(self) -> bool:
        return self.group is not None and self.world_size < dist.get_world_size(self.group)

    def _is_silent(self, values: Tensor) -> bool:
        """Whether no rank sends anything. A rank alone in a subgroup still joins the all-to-all."""
        return not self._is_part and (self.world_size == 1 or values.numel() == 0)

    def _check_out(self, out: Tensor, numel: int, dtype: torch.dtype) -> None:
        if out.numel() != numel or out.dtype != dtype:
            raise ValueError(
                f"out must have {numel} elements of {dtype} with {self.world_size} ranks, got "
                f"{out.numel()} of {out.dtype}"
            )


class Rehearsal(TorchCollectives):
    """Collectives that exchange nothing: each rank seems to send what this rank sends."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.group = None
        self._set_members(tuple(range(world_size)), rank)

    def all_gather(self, out: Tensor, shard: Tensor, **_: object) -> Work:
        return _copied(out, shard.repeat(self.world_size))

    def all_to_all(self, out: Tensor, parts: Tensor, **_: object) -> Work:
        own = parts.view(self.world_size, -1)[self.rank]
        return _copied(out, own.repeat(self.world_size))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def _copied(out: Tensor, values: Tensor) -> Work:
    if out.data_ptr() != values.data_ptr():
        out.copy_(values)
    return DoneWork()
