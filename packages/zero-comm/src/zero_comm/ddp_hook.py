"""Quantized gradients for torch's DistributedDataParallel, as a communication hook.

[Note: reduction of a bucket]
A bucket has ``numel`` gradients of one dtype. It is padded to a slice of equal length for every
rank. Slices are reduced in two quantized hops (`zero_comm.collectives.two_hop`), so that every rank
has the average of its own, and the averages are gathered, quantized by default. Every rank
dequantizes the same messages, its own included, so all ranks get the same bits. A ring all-reduce
sends each gradient twice; this sends it once in the reduction's format and once in the gather's.
"""

# Annotations are evaluated here, unlike elsewhere: DDP compares those of a hook with its own types.
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from zero_comm.collectives.feedback import LocoSettings
from zero_comm.collectives.two_hop import GradientFormat, SliceReducer, gather_slices
from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.message import Packing
from zero_comm.transport.queues import CommQueue, open_queue
from zero_comm.transport.torch_collectives import TorchCollectives
from zero_comm.transport.torch_compat import all_gather_single, count_groups

Hook = Callable[[object, Any], Future[Tensor]]  # torch's stubs leave dist.GradBucket out


def ddp_comm_hook(
    gradients: str | BlockFormat = "int4",
    *,
    between: str | BlockFormat | None = None,
    gathered: str | BlockFormat | None = "int8",
    group: dist.ProcessGroup | None = None,
    ranks_per_node: int | DeviceMesh | None = None,
    is_stochastic: bool = False,
    error_feedback: LocoSettings | None = None,
    has_checksum: bool = False,
    timeout: timedelta | None = None,
) -> Hook:
    """Make a hook that averages DDP's gradients in quantized form (ZeRO++, arXiv 2306.10209: qgZ).

    Every rank calls it, and passes the result to ``ddp.register_comm_hook(None, hook)``, one hook
    for each DDP module. Buckets are exchanged beside backward: in a thread on hosts, on a stream
    of their own on accelerators. See [Note: reduction of a bucket]. A bucket so small that its
    messages would be no shorter is averaged exactly. NaN and Inf arrive as NaN in their whole
    block, on all ranks.

    Args:
        gradients: format of the gradients that are reduced: "int8", "int4", "e4m3", "e5m2" or a
            `BlockFormat`.
        between: their format between nodes; None: the same.
        gathered: format of the reduced gradients; None: exact.
        group: DDP's process group; None for the default one. The hook makes one of its own with
            the same ranks, so that its exchanges don't mix with DDP's. The group of a subgroup is
            made by its ranks alone: torch names such groups after the number of groups that a rank
            is in, so this must be equal on them, and on NCCL no device may be bound to the default
            group.
        ranks_per_node: consecutive ranks of the group that share a node; or a 2-D DeviceMesh
            whose last dimension lies within a node; None asks the launcher's environment.
        is_stochastic: whether gradients are rounded stochastically.
        error_feedback: `LocoSettings` to add the quantization error of a bucket's reduction to the
            next bucket of the same parameters. The gather has none: what ``gathered`` rounds away
            is lost.
        has_checksum: whether messages carry a checksum.
        timeout: of an exchange, for the hook's own group; None: torch's default.

    Raises:
        ValueError: an argument that doesn't fit, by name.
        RuntimeError: the group of a subgroup cannot be made; raised on all of its ranks.
    """
    fmt = GradientFormat.make(
        gradients,
        between,
        is_stochastic=is_stochastic,
        error_feedback=error_feedback,
        has_checksum=has_checksum,
    )
    packing = None if gathered is None else Packing(gathered, has_checksum=has_checksum)
    return _BucketAverager(_own_group(group, timeout), fmt, packing, ranks_per_node).average


def _own_group(group: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a new process group of the same ranks. A collective over them."""
    if group is None or group is dist.group.WORLD:
        own = dist.new_group(timeout=timeout)
    else:
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        is_part = len(ranks) < dist.get_world_size()
        if is_part:
            _check_can_make_group(group, ranks)
        own = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=is_part
        )
    assert isinstance(own, dist.ProcessGroup), "only members are asked"
    return own


def _check_can_make_group(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Refuse what would wait until the timeout: a group that its ranks cannot make alone."""
    world = dist.group.WORLD
    is_split = "nccl" in dist.get_backend_config(group)  # off the communicator of a bound device
    if is_split and world is not None and world.bound_device_id is not None:
        raise RuntimeError(
            f"ddp_comm_hook(group=...) over ranks {ranks}, with a device bound by "
            "init_process_group(device_id=...): NCCL makes the hook's group with all ranks of the "
            "job; call init_process_group without device_id"
        )
    on_host = dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    own = torch.tensor([count_groups()], device=device)
    numbers = own.new_empty(len(ranks))
    all_gather_single(numbers, own, group)
    if len(set(numbers.tolist())) > 1:
        found = ", ".join(f"rank {r}: {n}" for r, n in zip(ranks, numbers.tolist(), strict=True))
        raise RuntimeError(
            "ddp_comm_hook(group=...): torch names the hook's group after the number of process "
            f"groups that a rank is in, which must be equal on its ranks, found {found}; make each "
            "group on all ranks of the job, by new_group without use_local_synchronization"
        )


class _BucketAverager:
    """Averages buckets on a queue, one after another."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        fmt: GradientFormat,
        gathered: Packing | None,
        ranks_per_node: int | DeviceMesh | None,
    ) -> None:
        self._collectives = TorchCollectives(group)
        self._reducer = SliceReducer(self._collectives, fmt, ranks_per_node=ranks_per_node)
        self._gathered = gathered
        self._queue: CommQueue | None = None
        self._parameters: dict[int, tuple[int, ...]] = {}

    def average(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Start to average a bucket's gradients in place. ``state`` is DDP's, unused."""
        values = bucket.buffer()
        if self._collectives.world_size == 1:
            future: Future[Tensor] = Future()
            future.set_result(values)
            return future
        if self._queue is None:
            self._queue = open_queue(values.device)
        # The bucket is DDP's own again once this returns.
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        return self._queue.run(lambda: self._average(index, parameters, values))

    def _average(self, index: int, parameters: tuple[int, ...], values: Tensor) -> Tensor:
        world_size = self._collectives.world_size
        numel = -(-values.numel() // world_size)
        wide = torch.promote_types(values.dtype, torch.float32)
        average = torch.empty(numel, dtype=wide, device=values.device)
        full = values
        if numel * world_size > values.numel():
            full = values.new_zeros(numel * world_size)
            full[: values.numel()].copy_(values)
        if self._parameters.setdefault(index, parameters) != parameters:
            # DDP rebuilds its buckets after the first step: the kept errors are of other gradients.
            self._reducer.forget_errors()
            self._parameters[index] = parameters
        self._reducer.reduce(average, full, scale=1 / world_size, key=index)
        gather_slices(self._collectives, self._gathered, full, average)
        if full is not values:
            values.copy_(full[: values.numel()])
        return values
