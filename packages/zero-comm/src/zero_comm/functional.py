"""Quantized collectives as plain functions over torch.distributed, without any engine."""

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
    """Gather every rank's shard, sending quantized bytes (ZeRO++, arXiv 2306.10209: qwZ).

    Every rank of the group must call it, with a shard of the same shape and dtype. All ranks get
    identical results, because a rank quantizes and dequantizes its own shard too. A shard that is
    not floating point, or that quantizing would not shorten, is gathered exactly.

    Args:
        shard: at least one-dimensional; read, never changed. Gradients don't flow through.
        format: a kind ("int8", "int4", "e4m3", "e5m2") or a whole format.
        group: the process group; None for the default one. With no process group initialised,
            the calling process is the only rank.
        has_checksum: whether messages carry a checksum.

    Returns:
        A new tensor of ``shard``'s dtype and device: the shards joined along the first dimension,
        in rank order.

    Raises:
        ValueError: an argument that doesn't fit, by name.
        CorruptMessageError: a message arrived damaged; it names the sender.
    """
    packing = Packing(format, has_checksum=has_checksum)
    if shard.dim() == 0:
        raise ValueError("shard must have at least one dimension, got a scalar")
    shard = shard.detach().contiguous()
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
    shape and dtype and the same other arguments. Sums are taken in fp32 in rank order, so the
    result is the same in every run. A slice that quantizing would not shorten is reduced exactly.

    Args:
        full: fp32, bf16, fp16 or fp64; its first dimension is divisible by the ranks; read, never
            changed. Gradients don't flow through.
        format: a kind ("int8", "int4", "e4m3", "e5m2") or a whole format.
        between: format between nodes; None: the same as within a node.
        op: "avg" or "sum".
        group: the process group; None for the default one. With no process group initialised,
            the calling process is the only rank.
        ranks_per_node: consecutive ranks of the group that share a node; or a 2-D DeviceMesh
            whose last dimension lies within a node; None asks the launcher's environment, at the
            cost of one small exchange the first time.
        seed: rounds stochastically; None: to the nearest.
        has_checksum: whether messages carry a checksum.

    Returns:
        A new tensor of ``full``'s dtype and device, ``full.shape[0] / ranks`` long in its first
        dimension.

    Raises:
        ValueError: an argument that doesn't fit, by name.
        CorruptMessageError: a message arrived damaged; it names the sender.
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
    full = full.detach().contiguous()
    reducer = SliceReducer(collectives, fmt, ranks_per_node=ranks_per_node, seed=seed or 0)
    out = full.new_empty(full.shape[0] // world_size, *full.shape[1:])
    scale = 1 / world_size if op == "avg" else 1.0
    reducer.reduce(out.view(-1), full.view(-1), scale=scale)
    return out
