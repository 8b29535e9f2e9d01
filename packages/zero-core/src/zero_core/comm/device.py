"""Collectives of accelerators over a library such as NCCL, and the choice of a transport.

All-gathers and all-to-alls run in the library. A reduction is an all-to-all and then a local sum in
rank order (`zero_core.comm.fused_sum`), on the stream of reductions. The compute stream waits for
the reduction before it uses the sum.

[Note: two levels]
N nodes have R ranks each. Rank n * R + l has position l on node n. A single all-to-all among all
ranks would send (N - 1) R slices per rank to other nodes. Instead, the ranks of a node first
exchange slices: each rank receives the slices for its own position on all nodes. It adds them in
rank order in fp32, which gives N partial sums of its node. Ranks at equal positions then exchange
partial sums and add them in the order of the nodes. Each rank thus sends N - 1 partial sums to
other nodes. All ZeRO stages and all runs add in the same order.

[Note: coded exchanges]
With a codec (`zero_core.protocols.SliceCodec`), an exchange whose peers are all on other nodes
sends encoded slices or partial sums. All messages are padded to the longest one. The host must know
this length to start the exchange, so a reduction has two jobs. The first job encodes and gathers
the lengths. The second job exchanges, decodes and sums. It is launched when the reduction is waited
for, one unit later. While the host waits for the lengths, the device computes that unit. (A fixed
length would save nothing, because it must fit slices that cannot be compressed.) The first job
leaves its messages in a buffer. The second job sends a copy of them and receives into that buffer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from zero_core.protocols import (
    EXACT_GRADIENTS,
    Gathered,
    MessageChecks,
    Reduced,
    SliceCodec,
    TransportCollectives,
    Work,
)

_log = logging.getLogger(__name__)


def share_memory(control: ControlGroup, ranks: Ranks, per_node: int) -> SharedMemory | None:
    """Return memory shared by this node's CPU ranks, or None if they cannot share memory."""
    if ranks.device.type != "cpu" or ranks.size == 1 or not dist.is_initialized():
        return None  # without process groups, ranks are threads of one process
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
"""Lengths of encoded messages are multiples of this number of bytes."""


class DeviceCollectives(Transport):
    """Implementation of `zero_core.protocols.TransportCollectives` for accelerators."""

    reduces_in_place = False

    def __init__(
        self,
        library: DeviceLibrary,
        queues: CommQueues,
        meter: Meter,
        members: Sequence[int] | None = None,
    ) -> None:
        """Connect ``members``, by default all ranks. Every rank of ``library`` must call it."""
        super().__init__(library.rank, queues, meter, members)
        self._library, links = library, self._links
        self._buffers: dict[str, Tensor] = {}  # scratch by purpose, for one reduction at a time
        self._open: _DeviceReduction | None = None  # reduction whose second job is not launched
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
        """Return an uninitialized buffer of ``numel`` elements, valid until the next reduction."""
        nbytes = numel * dtype.itemsize
        kept = self._buffers.get(purpose)
        if kept is None or kept.nbytes < nbytes:
            # Free the small buffer first, so that the allocator can reuse its memory.
            kept = None
            self._buffers.pop(purpose, None)
            with torch.inference_mode(False):
                kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[purpose] = kept
        return _typed(kept, numel, dtype)

    @property
    def checks(self) -> MessageChecks | None:
        return None if self._codec is None else self._codec.checks

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

        unfinished, self._open = self._open, None
        if unfinished is not None:  # its slices are in scratch buffers that this reduction reuses
            unfinished.launch_second()
        sent = full.dtype if nodes is None else sum_dtype(full.dtype)
        codec = self._codec if self._links.codes_slices else None
        if codec is not None and not codec.serves(sent, out.numel()):
            codec = None

        def job() -> None:
            nonfinite.zero_()
            library, parts, senders = self._reductions, full, self._members
            received = self._scratch("received", full.numel(), full.dtype, full.device)
            if nodes is not None:
                near_ranks, library = nodes
                parts = self._sum_in_node(*nodes, full, received, nonfinite)
                received = _typed(full, parts.numel(), sent)
                senders = range(near_ranks.rank, self.world_size, near_ranks.world_size)
            if codec is None:
                library.all_to_all(received, parts).wait()
                finish(received, far)
            else:
                exchange = self._encoded(codec, library, received, parts, senders, unit)
                reduction.second_job = lambda: finish(received, exchange())
                reduction.stream = torch.accelerator.current_stream(out.device)

        def finish(received: Tensor, far_nbytes: int) -> None:
            slices = received.view(-1, out.numel())
            if is_added:
                add_in_rank_order(out, slices.unbind())
                find_nonfinite(slices, nonfinite)
                norm.copy_(norm_of(out))
            else:
                sum_slices(slices, out, norm, None if nodes else nonfinite)
            self._meter.add("reduce_scatter", GRADIENTS, (near, far_nbytes))

        reduction = _DeviceReduction(norm, nonfinite, self.launch)
        reduction.work = self.launch(job, is_reduction=True)
        self._open = None if codec is None else reduction
        return reduction

    def _encoded(
        self,
        codec: SliceCodec,
        library: DeviceLibrary,
        out: Tensor,
        parts: Tensor,
        senders: Sequence[int],
        unit: int,
    ) -> Callable[[], int]:
        """Encode slices. Return a function that exchanges them and returns the bytes sent."""
        size, own, device = library.world_size, library.rank, parts.device
        rows, into = parts.view(size, -1), out.view(size, -1)
        most = codec.max_nbytes(parts.dtype, rows.shape[1])
        messages = self._scratch("messages", size * most, torch.uint8, device).view(size, most)
        peers = [peer for peer in range(size) if peer != own]
        sizes = torch.stack([codec.pack(rows[peer], messages[peer]) for peer in peers])
        found, longest = sizes.new_empty(size), sizes.amax(0, keepdim=True)
        library.all_gather(found, longest).wait()
        lengths = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        lengths.copy_(found, non_blocking=True)
        event = torch.accelerator.current_stream(device).record_event()

        def exchange() -> int:
            event.synchronize()
            for sender, nbytes in zip(senders, lengths.tolist(), strict=True):
                check_announced(nbytes, most, senders[own], sender, multiple=_MESSAGE_ALIGNMENT)
            nbytes = int(lengths.max())
            sent = self._scratch("sent", size * nbytes, torch.uint8, device)
            sent.view(size, -1).copy_(messages[:, :nbytes])
            arrived = messages.view(-1)[: size * nbytes]
            library.all_to_all(arrived, sent).wait()
            for peer in peers:
                message = arrived.view(size, -1)[peer]
                codec.unpack(message, into[peer], sender=senders[peer], unit=unit)
            into[own].copy_(rows[own])
            return len(peers) * nbytes

        return exchange

    def _sum_in_node(
        self,
        near: DeviceLibrary,
        far: DeviceLibrary,
        full: Tensor,
        scratch: Tensor,
        nonfinite: Tensor,
    ) -> Tensor:
        """Return this node's partial sums, a view of ``scratch``. See [Note: two levels].

        Overwrites ``full``. Sets ``nonfinite`` for the ranks of this node.
        """
        num_nodes, per_node = far.world_size, near.world_size
        sent = scratch.view(per_node, num_nodes, -1)
        sent.copy_(full.view(num_nodes, per_node, -1).transpose(0, 1))
        near.all_to_all(full, scratch).wait()
        partial_sums = _typed(scratch, scratch.numel() // per_node, sum_dtype(full.dtype))
        of_node = nonfinite.view(num_nodes, per_node)[far.rank]
        sum_slices(full.view(per_node, -1), partial_sums, nonfinite=of_node)
        return partial_sums

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
                    codec.pack(zeros, message)
                    codec.unpack(message, zeros, sender=self.rank, unit=0)

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


@dataclass(eq=False, slots=True)
class _DeviceReduction:
    """A pending reduction: `zero_core.protocols.StatisticsReduction`."""

    norm: Tensor
    nonfinite: Tensor
    _launch: Callable[..., Work]
    work: Work = field(init=False)
    second_job: Callable[[], None] | None = None  # see [Note: coded exchanges]
    stream: torch.Stream = field(init=False)  # the stream of both jobs

    def wait(self) -> None:
        self.launch_second()
        self.work.wait()

    def launch_second(self) -> None:
        job, self.second_job = self.second_job, None
        if job is None:
            self.work.wait()  # raises the error of a first job that failed
        else:
            with self.stream:  # the job depends on the first one only, not on the caller's stream
                self.work = self._launch(job, is_reduction=True)


def _typed(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
