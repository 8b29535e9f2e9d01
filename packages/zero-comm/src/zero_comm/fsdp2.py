"""Quantized weights and gradients for torch's FSDP2 (``fully_shard``), by its public hooks.

    model = fully_shard(model)
    zero_comm.fsdp2.apply(model, weights="int8", gradients="int4")

[Note: FSDP2's buffers]
All-gather: FSDP2 copies a group's shards into its own slice of the gather's output and passes that
slice as the input. Here it is quantized into a separate buffer, messages are gathered, and all of
the output is dequantized, this rank's slice too: every rank computes with the same weights, while
the sharded parameters, which the optimizer updates, keep every bit. Where parameters of several
dtypes are gathered together, FSDP2 passes bytes, which are sent unquantized.

Reduce-scatter: one flat buffer of gradients in the reduce dtype, a slice for every rank, reduced in
two hops (`zero_comm.collectives.two_hop`).

Both run on the streams on which FSDP2 calls them and use the process group passed with the call,
the shard group: with a replicate dimension (HSDP) the all-reduce across it is still FSDP2's. Each
root has a stream of its own to reduce on, so a reducer's memory is kept for each stream: two roots
over one group never write the same bytes at the same time. Nothing is set up among ranks
beforehand, see [Note: one order] in `zero_comm.transport.torch_collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zero_comm.collectives.feedback import LocoSettings
from zero_comm.collectives.two_hop import GradientFormat, SliceReducer
from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.message import Packing
from zero_comm.transport.torch_collectives import TorchCollectives
from zero_comm.transport.torch_compat import all_gather_single, premultiplier, reduce_scatter_single

# Modules whose gathers or reductions were replaced here: the others keep what they have.
_GATHERING: WeakSet[FSDPModule] = WeakSet()
_REDUCING: WeakSet[FSDPModule] = WeakSet()


def apply(
    module: nn.Module,
    *,
    weights: str | BlockFormat | None = "int8",
    gradients: str | BlockFormat | None = "int4",
    between: str | BlockFormat | None = None,
    ranks_per_node: int | DeviceMesh | None = None,
    is_stochastic: bool = False,
    error_feedback: LocoSettings | None = None,
    has_checksum: bool = False,
) -> None:
    """Let FSDP2 gather weights and reduce gradients in quantized form (ZeRO++, arXiv 2306.10209).

    Applies to every FSDPModule in the tree of ``module``. Every rank calls it, after
    ``fully_shard`` and outside of forward and backward. A further call changes the settings;
    ``weights=None, gradients=None`` restores FSDP2's own. See [Note: FSDP2's buffers]. Shards that
    quantizing would not shorten are sent exactly. With one rank in a shard group FSDP2 has nothing
    to send and nothing changes.

    Args:
        module: the root, or any part.
        weights: format of gathered weights: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`;
            None: FSDP2's own gather.
        gradients: format of reduced gradients; None: FSDP2's own reduction.
        between: their format between nodes; None: the same.
        ranks_per_node: consecutive ranks of a shard group that share a node; or a 2-D DeviceMesh
            over its ranks whose last dimension lies within a node; None asks the launcher's
            environment. Checked when gradients are first reduced.
        is_stochastic: whether gradients are rounded stochastically.
        error_feedback: `LocoSettings` to add the quantization error of a group's gradients to the
            next ones.
        has_checksum: whether messages carry a checksum.

    Raises:
        ValueError: an argument that doesn't fit, by name; a tree without FSDPModule; or, from
            FSDP2, a module whose parameters are sharded over several meshes.
    """
    modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not modules:
        raise ValueError(
            "module holds no FSDPModule; call torch.distributed.fsdp.fully_shard on it first"
        )
    packing = None if weights is None else Packing(weights, has_checksum=has_checksum)
    fmt = None
    if gradients is not None:
        fmt = GradientFormat.make(
            gradients,
            between,
            is_stochastic=is_stochastic,
            error_feedback=error_feedback,
            has_checksum=has_checksum,
        )
    reducers: dict[tuple[dist.ProcessGroup, object], SliceReducer] = {}
    for index, part in enumerate(modules):
        # By shape: the base classes that FSDP2's stubs ask for have no public name.
        if packing is not None or part in _GATHERING:
            gather: Any = _Gather(packing)
            part.set_custom_all_gather(gather)
            _GATHERING.add(part)
        if fmt is not None or part in _REDUCING:
            reduction: Any = _ReduceScatter(fmt, ranks_per_node, reducers, index)
            part.set_custom_reduce_scatter(reduction)
            _REDUCING.add(part)
    if packing is None:
        _GATHERING.difference_update(modules)
    if fmt is None:
        _REDUCING.difference_update(modules)


class _Comm:
    """Base of both collectives: allocates FSDP2's buffers in ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new, uninitialised tensor of this shape."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class _Gather(_Comm):
    """Gathers messages (see [Note: FSDP2's buffers]), or without a packing the exact shards."""

    packing: Packing | None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        packing, numel = self.packing, input_tensor.numel()
        if packing is None or not packing.shortens(input_tensor.dtype, numel):
            return all_gather_single(output_tensor, input_tensor, group, async_op=async_op)
        nbytes = packing.nbytes(numel)
        own = torch.empty(nbytes, dtype=torch.uint8, device=input_tensor.device)
        packing.pack(input_tensor, own.view(1, nbytes))
        rows = own.new_empty(group.size(), nbytes)
        work = all_gather_single(rows.view(-1), own, group, async_op=async_op)
        arrival = _Arrival(work, packing, rows, output_tensor)
        if async_op:
            return arrival
        arrival.wait()
        return None


class _Arrival(dist.Work):
    """Work of a gather of messages: the first ``wait`` dequantizes them into the output.

    FSDP2 waits where it reads the output: on an accelerator its current stream waits for the
    gather, and dequantizes.
    """

    def __init__(self, work: dist.Work | None, packing: Packing, rows: Tensor, out: Tensor) -> None:
        super().__init__()
        self._gather = work
        self._packing = packing
        self._rows: Tensor | None = rows
        self._out = out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the bytes, then dequantize them."""
        if self._gather is not None:
            self._gather.wait() if timeout is None else self._gather.wait(timeout)
        if self._rows is not None:
            self._packing.unpack(self._rows, self._out, senders=range(len(self._rows)))
            if self._rows.device.type != "cpu":
                # Memory of the gather's stream, which must not reuse it until this one has read.
                self._rows.record_stream(torch.accelerator.current_stream(self._rows.device))
            self._rows = None
        return True


@dataclass(eq=False)
class _ReduceScatter(_Comm):
    """Reduces messages (see [Note: FSDP2's buffers]), or without a format exact gradients.

    ``reducers`` are those of each process group and stream, shared by the modules of one `apply`.
    """

    fmt: GradientFormat | None
    ranks_per_node: int | DeviceMesh | None
    reducers: dict[tuple[dist.ProcessGroup, object], SliceReducer]
    index: int

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.fmt is None:
            return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op=async_op)
        if async_op:
            raise ValueError(
                "async_op=True was asked of a reduction; FSDP2 reduces on a stream of its own, "
                "with async_op=False"
            )
        scale, on_host = _scale_of(op, group.size()), input_tensor.device.type == "cpu"
        stream = None if on_host else torch.accelerator.current_stream(input_tensor.device)
        reducer = self.reducers.get((group, stream))
        if reducer is None:
            collectives = TorchCollectives(group)
            reducer = SliceReducer(collectives, self.fmt, ranks_per_node=self.ranks_per_node)
            self.reducers[group, stream] = reducer
        reducer.reduce(output_tensor, input_tensor, scale=scale, key=self.index)
        return None


def _scale_of(op: Any, world_size: int) -> float:
    """Return the factor that ``op`` applies to a sum."""
    if op == dist.ReduceOp.AVG:
        return 1 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        return premultiplier(op)
    raise ValueError(f"gradients are reduced by AVG, SUM or PREMUL_SUM, FSDP2 asked for {op}")
