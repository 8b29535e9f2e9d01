"""Communication hook that quantizes the gradients of torch's DistributedDataParallel.

[Note: reduction of a bucket]
A bucket has ``numel`` gradients of one dtype. Padding gives every rank a slice of equal length. Two
quantized hops (`zero_comm.collectives.two_hop`) reduce the slices, so every rank has the average of
its own slice. The averages are then gathered, by default quantized. Every rank dequantizes the same
messages, including its own, so all ranks get the same bits.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
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

Hook = Callable[[object, Any], Future[Tensor]]  # Any: torch's stubs lack dist.GradBucket


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
    """Create a hook that averages DDP's gradients in quantized messages (qgZ, arXiv 2306.10209).

    Every rank must call it and pass the result to ``ddp.register_comm_hook(None, hook)``, with one
    hook per DDP module. Buckets are exchanged while backward runs: in a thread on hosts, on a
    separate stream on accelerators. Buckets too small for shorter messages are averaged exactly. A
    quantized block with NaN or Inf arrives as NaN on all ranks. See [Note: reduction of a bucket].

    Args:
        gradients: format of reduced gradients: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        between: format of reduced gradients between nodes. None: same as ``gradients``.
        gathered: format of the averaged gradients in the gather. None sends them exactly.
        group: DDP's process group. None: the default group. The hook creates a new group of the
            same ranks, which keeps its exchanges separate from DDP's. For a subgroup, only its
            ranks create the new group. They must then be in equally many process groups, and with
            NCCL no device may be bound to the default group.
        ranks_per_node: number of consecutive ranks that share a node, or a 2-D DeviceMesh whose
            last dimension is within a node. None uses the launcher's environment.
        is_stochastic: whether gradients are rounded stochastically.
        error_feedback: `LocoSettings` to add the quantization error of a bucket's reduction to the
            next bucket of the same parameters. The gather has no error feedback.
        has_checksum: whether messages carry a checksum.
        timeout: timeout of the hook's new group. None: torch's default.

    Raises:
        ValueError: an argument does not fit.
        RuntimeError: the new group of a subgroup cannot be created. Raised on all of its ranks.
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
    """Create a new process group of the same ranks. A collective over these ranks."""
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
    """Raise RuntimeError instead of a later hang if the ranks cannot create the group alone."""
    world = dist.group.WORLD
    # NCCL splits the communicator of a bound device, which needs all ranks of the job.
    is_split = "nccl" in dist.get_backend_config(group)
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
        """Start to average a bucket's gradients in place. ``state`` is unused."""
        values = bucket.buffer()
        if self._collectives.world_size == 1:
            future: Future[Tensor] = Future()
            future.set_result(values)
            return future
        if values.layout is not torch.strided:
            raise TypeError(f"gradients must be dense: use sparse=False; got {values.layout}")
        if self._queue is None:
            self._queue = open_queue(values.device)
        # Read now, because DDP reuses the bucket object after this call.
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        return self._queue.run(lambda: self._average(index, parameters, values))

    def _average(self, index: int, parameters: tuple[int, ...], values: Tensor) -> Tensor:
        world_size = self._collectives.world_size
        numel = -(-values.numel() // world_size)
        wide = torch.promote_types(values.dtype, torch.float32)
        average = torch.empty(numel, dtype=wide, device=values.device)
        num_absent = numel * world_size - values.numel()
        full = torch.nn.functional.pad(values, (0, num_absent)) if num_absent else values
        if self._parameters.setdefault(index, parameters) != parameters:
            # DDP rebuilds its buckets after the first step, and kept errors no longer match.
            self._reducer.forget_errors()
            self._parameters[index] = parameters
        self._reducer.reduce(average, full, scale=1 / world_size, key=index)
        gather_slices(self._collectives, self._gathered, full, average)
        if full is not values:
            values.copy_(full[: values.numel()])
        return values
