"""Quantized collectives as functions over torch.distributed, without an engine."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_comm.collectives.two_hop import GradientFormat, SliceReducer, gather_slices
from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.message import Packing
from zero_comm.quantizer.quantize import check_float
from zero_comm.transport.torch_collectives import TorchCollectives


def quantized_all_gather(
    shard: Tensor,
    format: str | BlockFormat = "int8",
    *,
    group: dist.ProcessGroup | None = None,
    has_checksum: bool = False,
) -> Tensor:
    """Gather every rank's shard as quantized messages (ZeRO++, arXiv 2306.10209: qwZ).

    Every rank of the group must call it, with a shard of the same shape and dtype and the same
    other arguments. Return a new tensor: all shards concatenated along the first dimension in rank
    order. All ranks get identical results, because a rank also dequantizes its own message. Shards
    are gathered exactly if their dtype cannot be quantized or if messages would not be shorter.

    Args:
        shard: at least 1-D, never changed. Gradients do not flow through.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        group: process group, None for the default group. Without torch.distributed initialized, the
            calling process is the only rank.
        has_checksum: whether messages carry a checksum. Accelerators check only such messages.

    Raises:
        ValueError: an argument does not fit.
        CorruptMessageError: a received message is damaged. The error names the sender.
    """
    packing = Packing(format, has_checksum=has_checksum)
    if shard.dim() == 0:
        raise ValueError("shard must have at least one dimension, got a scalar")
    shard = shard.detach().resolve_conj().resolve_neg().contiguous()
    collectives = TorchCollectives(group)
    out = shard.new_empty(collectives.world_size * shard.shape[0], *shard.shape[1:])
    gather_slices(collectives, packing, out.view(-1), shard.view(-1))
    return out


def quantized_reduce_scatter(
    full: Tensor,
    format: str | BlockFormat = "int4",
    *,
    between: str | BlockFormat | None = None,
    op: Literal["avg", "sum"] = "avg",
    group: dist.ProcessGroup | None = None,
    ranks_per_node: int | DeviceMesh | None = None,
    seed: int | None = None,
    has_checksum: bool = False,
) -> Tensor:
    """Reduce this rank's slice of every rank's tensor in two quantized hops.

    qgZ (ZeRO++, arXiv 2306.10209, section 3.3), see [Note: the two hops] in
    `zero_comm.collectives.two_hop`. Every rank of the group must call it, with a tensor of the same
    shape and dtype and the same other arguments. Return a new tensor, whose first dimension has
    ``full.shape[0] / ranks`` elements. The order of additions is fixed, so results are
    reproducible. Sums are in fp32. If messages would not be shorter, slices are sent exactly, and
    fp64 is summed in fp64. Other arguments and errors are those of `quantized_all_gather`.

    Args:
        full: fp32, bf16, fp16 or fp64, never changed. The number of ranks divides its first
            dimension. Gradients do not flow through.
        between: format between nodes. None: same as ``format``.
        op: "avg" or "sum".
        ranks_per_node: number of consecutive ranks that share a node, or a 2-D DeviceMesh whose
            last dimension is within a node. None derives it from the launcher's environment, by an
            all-gather in the group's first such call.
        seed: seed of stochastic rounding. None rounds to the nearest.
    """
    if op not in ("avg", "sum"):
        raise ValueError(f"op must be 'avg' or 'sum', got {op!r}")
    check_float("full", full.dtype)
    fmt = GradientFormat.make(
        format, between, is_stochastic=seed is not None, has_checksum=has_checksum
    )
    collectives = TorchCollectives(group)
    world_size = collectives.world_size
    if full.dim() == 0 or full.shape[0] % world_size:
        raise ValueError(
            f"full must have a first dimension divisible by {world_size} ranks, got shape "
            f"{tuple(full.shape)}"
        )
    full = full.detach().resolve_neg().contiguous()
    reducer = SliceReducer(collectives, fmt, ranks_per_node=ranks_per_node, seed=seed or 0)
    out = full.new_empty(full.shape[0] // world_size, *full.shape[1:])
    scale = 1 / world_size if op == "avg" else 1.0
    reducer.reduce(out.view(-1), full.view(-1), scale=scale)
    return out
