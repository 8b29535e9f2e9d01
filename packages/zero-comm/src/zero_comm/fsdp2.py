"""Quantized weights and gradients for torch's FSDP2 (``fully_shard``), through its public hooks.

    model = fully_shard(model)
    zero_comm.fsdp2.apply(model, weights="int8", gradients="int4")

[Note: FSDP2's buffers]
All-gather: FSDP2 passes the flat shards of a parameter group, which are a slice of the gather's
output. The gather quantizes them into a separate buffer, exchanges the messages, and dequantizes
all slices of the output, including this rank's. All ranks therefore compute with the same weights,
while the sharded parameters keep every bit. If a group has parameters of several dtypes, FSDP2
passes bytes, which are sent exactly.

Reduce-scatter: FSDP2 passes one flat buffer of gradients in the reduce dtype with a slice per rank.
Two hops reduce it (`zero_comm.collectives.two_hop`).

Both run on FSDP2's streams and use the process group that FSDP2 passes, the shard group. With a
replicate dimension (HSDP), FSDP2 still runs its own all-reduce across replicas. Each root module
reduces on its own stream. There is one reducer per group and stream, so two roots never write to
the same buffers at once.
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

# Modules whose gather or reduction `apply` has set. It leaves hooks on other modules unchanged.
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
    """Make FSDP2 gather weights and reduce gradients in quantized form (ZeRO++, arXiv 2306.10209).

    It applies to every FSDPModule in the tree of ``module``. Every rank must call it, after
    ``fully_shard`` and outside of forward and backward. Another call changes the settings, and
    ``weights=None, gradients=None`` restores FSDP2's collectives. Shards that no message would
    shorten are sent exactly. With one rank per shard group nothing changes.

    Args:
        module: the root module, or any submodule.
        weights: format of gathered weights: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
            None: FSDP2's own gather.
        gradients: format of reduced gradients. None: FSDP2's own reduction.
        ranks_per_node: number of consecutive ranks of a shard group that share a node, checked at
            the first reduction. This and the other arguments: see `zero_comm.ddp_comm_hook`.

    Raises:
        ValueError: an argument does not fit, the tree has no FSDPModule, or, from FSDP2, parameters
            of one module are sharded over several meshes.
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
        # Any, because the base classes in FSDP2's type stubs have no public name.
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
    """Base of both collectives, which allocates FSDP2's buffers in ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class _Gather(_Comm):
    """Gather of messages, or exact shards if ``packing`` is None. See [Note: FSDP2's buffers]."""

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
    """Work of a gather of messages, whose first ``wait`` dequantizes them into the output.

    FSDP2 waits on the stream that reads the output, which then also dequantizes.
    """

    def __init__(self, work: dist.Work | None, packing: Packing, rows: Tensor, out: Tensor) -> None:
        super().__init__()
        self._gather = work
        self._packing = packing
        self._rows: Tensor | None = rows
        self._out = out

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._gather is not None:
            self._gather.wait() if timeout is None else self._gather.wait(timeout)
        if self._rows is not None:
            self._packing.unpack(self._rows, self._out, senders=range(len(self._rows)))
            if self._rows.device.type != "cpu":
                # Keeps the gather's stream from reusing the memory before this stream has read it.
                self._rows.record_stream(torch.accelerator.current_stream(self._rows.device))
            self._rows = None
        return True


@dataclass(eq=False)
class _ReduceScatter(_Comm):
    """Reduction of messages, or of exact gradients if ``fmt`` is None. See [Note: FSDP2's buffers].

    All modules of one `apply` share ``reducers``: one reducer per process group and stream.
    """

    fmt: GradientFormat | None
    ranks_per_node: int | DeviceMesh | None
    reducers: dict[tuple[dist.ProcessGroup, object], SliceReducer]
    index: int  # of the module, which is a key of the error feedback

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
