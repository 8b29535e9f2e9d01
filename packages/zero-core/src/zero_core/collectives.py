"""What the engine's own collectives have in common, and the small exchanges beside them.

On an accelerator the library's all-gather and all-to-all are used (`zero_core.library`), among
hosts the direct exchange of `zero_core.direct`. Either way a reduction is an exchange and a local
sum in rank order in fp32, so that its value depends neither on the backend's ring nor on the stage.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.errors import CheckpointCorruptError, CheckpointError, CollectiveError
from zero_core.protocols import Work

__all__ = ["ControlGroup", "all_gather_single", "call_named", "sum_in_rank_order", "wait"]

_T = TypeVar("_T")

# torch 2.13 renamed the tensor collectives; the old names warn there.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
"""The library's all-gather of 1-D tensors."""


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


def wait(work: Work, what: Callable[[], str]) -> None:
    """Wait for ``work``; a failure says ``what()`` it was."""
    call_named(work.wait, what)


def call_named(act: Callable[[], _T], what: Callable[[], str]) -> _T:
    """What ``act``, a part of a collective, returns; a failure says ``what()`` it was."""
    try:
        return act()
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
            content = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            sums = self.gather(torch.tensor([zlib.crc32(content)]))
            if bool((sums == sums[0]).all()):
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

    def gather_into(self, out: Tensor, tensor: Tensor) -> None:
        """Every rank's 1-D ``tensor`` (equally long), in rank order, into ``out``.

        Both are on the CPU.
        """
        if self.world_size == 1:
            out.copy_(tensor)
            return
        staged = out if self._device == out.device else torch.empty_like(out, device=self._device)
        all_gather_single(staged, tensor.to(self._device), group=self._group)
        if staged is not out:
            out.copy_(staged)

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's 1-D ``tensor`` (equally long), in rank order, on the CPU of every rank."""
        return self.gather_here(tensor).cpu()

    def gather_here(self, tensor: Tensor) -> Tensor:
        """As `gather`, but on the device; ``tensor`` itself with one rank."""
        if self.world_size == 1:
            return tensor
        local = tensor.to(self._device)
        out = torch.empty(self.world_size * local.numel(), dtype=local.dtype, device=self._device)
        all_gather_single(out, local, group=self._group)
        return out
