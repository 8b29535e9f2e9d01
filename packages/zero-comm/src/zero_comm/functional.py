"""Quantized collectives as plain functions over torch.distributed, without any engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.block_format import BlockFormat
from zero_comm.quantizer import quantize
from zero_comm.rank_parts import dequantize_parts, is_worth_quantizing
from zero_comm.torch_compat import all_gather_single

__all__ = ["quantized_all_gather"]


def quantized_all_gather(
    shard: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    format: str | BlockFormat = "int8",
) -> Tensor:
    """Gather every rank's shard, sending quantized bytes (ZeRO++, arXiv 2306.10209: qwZ).

    Every rank of the group must call it, with a shard of the same shape and dtype. All ranks get
    identical results, because a rank sees its own shard as the others do: quantized. A shard that
    is not floating point, or so small that quantizing would not shorten it, is gathered as it is.

    Args:
        shard: at least one-dimensional; read, never changed. Gradients don't flow through.
        group: the process group; None for the default one. With no process group initialised,
            the calling process is the only rank.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.

    Returns:
        A new tensor of ``shard``'s dtype and device: the shards joined along the first dimension,
        in rank order.

    Raises:
        ValueError: an argument that doesn't fit, by name.
    """
    fmt = BlockFormat.make(format)
    if shard.dim() == 0:
        raise ValueError("shard must have at least one dimension, got a scalar")
    shard = shard.detach().contiguous()
    world_size = _world_size(group)
    out = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
    flat_out, flat_shard = out.view(-1), shard.view(-1)
    if not is_worth_quantizing(shard.dtype, shard.numel(), fmt):
        _all_gather(flat_out, flat_shard, group)
        return out
    part = quantize(flat_shard, fmt)
    gathered = torch.empty(world_size * part.numel(), dtype=torch.uint8, device=part.device)
    _all_gather(gathered, part, group)
    dequantize_parts(gathered, flat_out, world_size=world_size, fmt=fmt)
    return out


def _world_size(group: dist.ProcessGroup | None) -> int:
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def _all_gather(out: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> None:
    if out.numel() == shard.numel():  # one rank, with or without a process group
        out.copy_(shard)
    else:
        all_gather_single(out, shard, group)
