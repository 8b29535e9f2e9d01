"""Collectives among accelerators by their library (for example NCCL), and choice of a transport.

All-gather and all-to-all are the library's. A reduction is an all-to-all followed by a local sum in
rank order (`zero_core.comm.fused_sum`), on the stream of reductions. The compute stream waits for
the reduction before it uses the sum.

[Note: two levels]
Rank n * R + l has position l on node n, with N nodes of R ranks. A single all-to-all among all
ranks would send (N - 1) R slices per rank to other nodes. Instead, ranks of a node first exchange
slices: each receives those for the ranks at its own position on all nodes. It adds them in rank
order in fp32 to N partial sums of its node. Ranks at equal positions then exchange partial sums and
add them in the order of the nodes. Each rank thus sends N - 1 partial sums to other nodes. All ZeRO
stages and all runs add in the same order.

[Note: coded exchanges]
With a codec (`zero_core.protocols.SliceCodec`), an exchange whose peers are all on other nodes
sends encoded slices or partial sums. The ranks first exchange the messages' lengths, for which the
host blocks. The messages are decoded before the sum.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core._torch import timeout_of
from zero_core.comm.control import ControlGroup, DeviceLibrary, Lane
from zero_core.comm.fused_sum import (
    add_in_rank_order,
    find_nonfinite,
    norm_of,
    sum_dtype,
    sum_slices,
)
from zero_core.comm.groups import Ranks
from zero_core.comm.host import HostCollectives, Transport, check_announced
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Meter
from zero_core.comm.queues import CommQueues, HostQueues, StreamQueues
from zero_core.comm.shared_memory import SharedMemory
from zero_core.protocols import EXACT_GRADIENTS, Gathered, Reduced, TransportCollectives, Work

_log = logging.getLogger(__name__)


def share_memory(control: ControlGroup, ranks: Ranks, per_node: int) -> SharedMemory | None:
    """Return memory shared by this node's CPU ranks, or None if they cannot share memory."""
    if ranks.device.type != "cpu" or ranks.size == 1 or not dist.is_initialized():
        return None  # an accelerator, a single rank, or ranks that are threads
    timeout_s = ranks.timeout_s or timeout_of(ranks.group, ranks.device).total_seconds()
    shared = SharedMemory(control, timeout_s=timeout_s, ranks_per_node=per_node)
    num_far = per_node - 1 - len(shared.peers)
    if num_far:
        _log.info(
            "rank %d: %d of the %d other ranks of its node cannot share memory with it (another "
            "host, user or namespace of processes): what they exchange travels through "
            "torch.distributed",
            ranks.rank,
            num_far,
            per_node - 1,
        )
    return shared if shared.peers else None


def make_transport(
    ranks: Ranks, shared: SharedMemory | None, meter: Meter
) -> HostCollectives | DeviceCollectives:
    """Create the engine's built-in collectives. Every rank must call it."""
    is_host = ranks.device.type in ("cpu", "meta")
    queues = HostQueues() if is_host else StreamQueues(ranks.device)
    if ranks.size == 1 or ranks.device.type == "cpu":
        return HostCollectives(ranks.messages(), ranks.rank, shared, queues, meter)
    if ranks.device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share one hardware queue, so gathers, "
            "reductions and copies wait for the computation that was enqueued before them; unset "
            "it (CUDA's default is 8)"
        )
    return DeviceCollectives(ranks.library(), queues, meter)


_MESSAGE_ALIGNMENT = 16
"""Bytes: the length of an encoded message is a multiple of this."""


class DeviceCollectives(Transport):
    """`zero_core.protocols.TransportCollectives` of accelerators."""

    reduces_in_place = False

    def __init__(
        self,
        library: DeviceLibrary,
        queues: CommQueues,
        meter: Meter,
        members: Sequence[int] | None = None,
    ) -> None:
        """Every rank of ``library`` must call it, but only ``members`` take part. None: all."""
        super().__init__(library.rank, queues, meter, members)
        self._library, links = library, self._links
        self._buffers: dict[str, Tensor] = {}  # scratch by purpose; reductions never overlap
        # If a parameter is unused on one rank only, that rank interleaves reductions and gathers
        # differently. Each queue therefore has its own communicator.
        self._gathers = library.subgroup(self._members, Lane.GATHERS)
        self._reductions = library.subgroup(self._members, Lane.REDUCTIONS)
        self._nodes: tuple[DeviceLibrary, DeviceLibrary] | None = None
        if members is None and links.sums_in_two_levels:
            per_node = links.ranks_per_node
            node, place = divmod(self.rank, per_node)
            near = library.subgroup(range(node * per_node, (node + 1) * per_node), Lane.REDUCTIONS)
            far = library.subgroup(range(place, self.world_size, per_node), Lane.REDUCTIONS)
            self._nodes = near, far

    def _scratch(
        self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized buffer of ``numel`` elements, valid during one job."""
        nbytes = numel * dtype.itemsize
        kept = self._buffers.get(purpose)
        if kept is None or kept.nbytes < nbytes:
            # Free the small buffer first, so that the large one can reuse its memory.
            kept = None
            self._buffers.pop(purpose, None)
            with torch.inference_mode(False):
                kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[purpose] = kept
        return _typed(kept, numel, dtype)

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        return DeviceCollectives(self._library, self._queues, self._meter, self._chosen(ranks))

    def close(self) -> None:
        self._library.close()

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        return self._gathers.all_gather(out, shard)

    def _reduce(self, out: Tensor, full: Tensor, unit: int, *, is_added: bool) -> Work:
        nodes = None if is_added else self._nodes  # reduce_add must add in rank order
        near, far = self._links.direct(out.numel() * full.itemsize)
        if nodes is not None:
            sum_nbytes = out.numel() * sum_dtype(full.dtype).itemsize
            near, far = self._links.reduction(out.numel() * full.itemsize, sum_nbytes)
        # Allocated on the caller's stream, which waits for the job before the memory is reused.
        norm = torch.empty((), dtype=sum_dtype(out.dtype), device=out.device)
        nonfinite = torch.empty(self.world_size, dtype=torch.bool, device=out.device)

        def job() -> None:
            nonfinite.zero_()
            if nodes is not None:
                coded_nbytes = self._reduce_in_two_levels(*nodes, out, full, norm, nonfinite)
            else:
                received = self._scratch("received", full.numel(), full.dtype, full.device)
                coded_nbytes = self._exchange(self._reductions, received, full, self._members)
                slices = received.view(self.world_size, -1)
                if is_added:
                    add_in_rank_order(out, slices.unbind())
                    find_nonfinite(slices, nonfinite)
                    norm.copy_(norm_of(out))
                else:
                    sum_slices(slices, out, norm, nonfinite)
            far_nbytes = far if coded_nbytes is None else coded_nbytes
            self._meter.add("reduce_scatter", GRADIENTS, (near, far_nbytes))

        return _DeviceReduction(self.launch(job, is_reduction=True), norm, nonfinite)

    def _exchange(
        self, library: DeviceLibrary, out: Tensor, parts: Tensor, senders: Sequence[int]
    ) -> int | None:
        """Run an all-to-all of slices. If they are encoded, return the bytes sent, else None."""
        size, own = library.world_size, library.rank
        rows, into = parts.view(size, -1), out.view(size, -1)
        codec = self._codec if self._links.codes_slices else None
        numel = rows.shape[1]
        if codec is None or not codec.serves(parts.dtype, numel):
            library.all_to_all(out, parts).wait()
            return None
        device, most = parts.device, codec.max_nbytes(parts.dtype, numel)
        messages = self._scratch("messages", (size - 1) * most, torch.uint8, device)
        sent, end = [0] * size, 0
        for peer in range(size):
            if peer != own:
                sent[peer] = codec.pack(rows[peer], messages[end : end + most])
                end += sent[peer]
        lengths = torch.tensor(sent, device=device)
        theirs = torch.empty_like(lengths)
        library.all_to_all(theirs, lengths).wait()
        received: list[int] = theirs.tolist()
        for sender, nbytes in zip(senders, received, strict=True):
            check_announced(nbytes, most, senders[own], sender, multiple=_MESSAGE_ALIGNMENT)
        arrived = self._scratch("arrived", sum(received), torch.uint8, device)
        library.exchange(arrived, messages[:end], sent, received).wait()
        for peer, message in enumerate(torch.split(arrived, received)):
            if peer != own:
                codec.unpack(message, into[peer], sender=senders[peer])
        into[own].copy_(rows[own])
        return end

    def _reduce_in_two_levels(
        self,
        near: DeviceLibrary,
        far: DeviceLibrary,
        out: Tensor,
        full: Tensor,
        norm: Tensor,
        nonfinite: Tensor,
    ) -> int | None:
        """Reduce as in [Note: two levels].

        ``full`` is overwritten. ``nonfinite`` is set for the ranks of this node. Returns the bytes
        sent to other nodes if they are encoded, else None.
        """
        num_nodes, per_node, numel = far.world_size, near.world_size, out.numel()
        scratch = self._scratch("received", full.numel(), full.dtype, full.device)
        sent = scratch.view(per_node, num_nodes, numel)
        sent.copy_(full.view(num_nodes, per_node, numel).transpose(0, 1))
        near.all_to_all(full, scratch).wait()
        wide = sum_dtype(full.dtype)
        partial = _typed(scratch, num_nodes * numel, wide)
        of_node = nonfinite.view(num_nodes, per_node)[far.rank]
        sum_slices(full.view(per_node, -1), partial, nonfinite=of_node)
        received = _typed(full, num_nodes * numel, wide)
        far_ranks = range(near.rank, self.world_size, per_node)
        coded_nbytes = self._exchange(far, received, partial, far_ranks)
        sum_slices(received.view(num_nodes, numel), out, norm)
        return coded_nbytes

    def prepare(self, gathered: Gathered, reduced: Reduced, device: torch.device) -> None:
        def job() -> None:
            codec = self._codec if self._links.codes_slices else None
            for numel, dtype, _ in reduced:
                self._scratch("received", numel, dtype, device)
            # Compile the kernels by summing and coding a few zeros.
            for dtype, out_dtype in {(dtype, out_dtype) for _, dtype, out_dtype in reduced}:
                norm = torch.empty((), dtype=sum_dtype(out_dtype), device=device)
                nonfinite = torch.zeros(1, dtype=torch.bool, device=device)
                zeros, out = (torch.zeros(64, dtype=d, device=device) for d in (dtype, out_dtype))
                if self._nodes is None:
                    sum_slices(zeros.view(1, -1), out, norm, nonfinite)
                else:
                    given, zeros = zeros, torch.empty(64, dtype=sum_dtype(dtype), device=device)
                    sum_slices(given.view(1, -1), zeros, nonfinite=nonfinite)
                    sum_slices(zeros.view(1, -1), out, norm)
                if codec is not None and codec.serves(zeros.dtype, 1 << 20):
                    message = zeros.new_empty(codec.max_nbytes(zeros.dtype, 64), dtype=torch.uint8)
                    codec.unpack(message[: codec.pack(zeros, message)], zeros, sender=self.rank)

        self.launch(job, is_reduction=True).wait()

    def device_tensors(self) -> dict[str, list[Tensor]]:
        return {"buffers": list(self._buffers.values())}

    @property
    def exchange_nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        self._check_all_to_all(out, parts)
        self._meter.add(
            "all_to_all", GRADIENTS, self._links.direct(parts.nbytes // self.world_size)
        )
        return self._reductions.all_to_all(out, parts)


@dataclass(frozen=True, eq=False, slots=True)
class _DeviceReduction:
    """A reduction under way: `zero_core.protocols.StatisticsReduction`."""

    work: Work
    norm: Tensor
    nonfinite: Tensor

    def wait(self) -> None:
        self.work.wait()


def _typed(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
