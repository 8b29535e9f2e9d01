"""Local parts of parameters: a whole tensor, or the local part of a DTensor.

[Note: DTensors]
Under FSDP2's ``fully_shard`` a parameter is a DTensor. Its local part is plain memory that is never
moved: FSDP2 frees and gathers the unsharded parameters, which are other memory. So the update works
on the local part. Gradients and loaded state are redistributed to the parameter's placements, and
returned state is a DTensor in the same ones, which ``torch.distributed.checkpoint`` reshards.

[Note: empty parts]
A small parameter has no element on some ranks, and its steps are still counted there, because a
checkpoint needs the same names and numbers from every rank. Such a part has one element of its own
in the flat space, always zero, that is in no parameter and in no state_dict.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LocalPart:
    """The local part of one parameter and its place ``[start, stop)`` in the flat space.

    ``shard`` is its own memory, 1-D, which new values are written to. It has no gaps, or ValueError
    is raised.
    """

    def __init__(self, param: Tensor, start: int) -> None:
        local = _local_of(param)
        self.param = param
        self.start = start
        self._is_empty = local.numel() == 0  # see [Note: empty parts]
        self._home = local.data_ptr()
        self.shard = local.new_zeros(1) if self._is_empty else _flat(local)
        self.stop = start + self.shard.numel()

    def check_home(self, index: int) -> None:
        """Raise RuntimeError if the part has moved to other memory since construction."""
        if not self._is_empty and _local_of(self.param).data_ptr() != self._home:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(self.param.shape)} lies in other memory than "
                f"at construction; move, cast or shard a model before its optimizer is made"
            )

    def version(self) -> tuple[int, int]:
        """Return counters of all writes except through ``data``: a DTensor has its own."""
        return self.param._version, self.shard._version

    def flatten(self, values: Tensor) -> Tensor:
        """Return the local part of ``values`` as 1-D elements in the order of the part's memory.

        ``values`` has the parameter's shape. The result is its own memory where nothing has to be
        rearranged. Values in other placements are redistributed, which is a collective.
        """
        if values.is_sparse:
            raise ValueError("sparse gradients cannot be offloaded")
        local, found = _local_of(self.param), self._localize(values)
        if self._is_empty:
            return found.new_zeros(1)
        if found.shape == local.shape and found.stride() == local.stride():
            return _flat(found)
        ordered = torch.empty_strided(
            local.size(), local.stride(), dtype=found.dtype, device=found.device
        )
        return _flat(ordered.copy_(found))

    def _localize(self, values: Tensor) -> Tensor:
        param: Any = self.param
        if _is_dtensor(values) and _is_dtensor(param):
            placed: Any = values
            if placed.placements != param.placements:
                placed = placed.redistribute(placements=param.placements)
            found = _local_of(placed)
        else:
            found = values.detach()
        local_shape = tuple(_local_of(param).shape)
        if found.shape != local_shape or _is_dtensor(found):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)}, of which {local_shape} is on this "
                f"rank, cannot take a {type(values).__name__} of shape {tuple(values.shape)}; "
                f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict brings state "
                f"into the right placements"
            )
        return found

    def shape(self, values: Tensor) -> Tensor:
        """Return 1-D CPU values in the parameter's shape and placements, inverse to `flatten`."""
        local = _local_of(self.param)
        kept = values[: local.numel()].as_strided(local.size(), local.stride())
        if not _is_dtensor(self.param):
            return kept
        # DTensor.from_local would move the values to the mesh's device.
        placed: Any = torch.empty_like(self.param.detach(), dtype=values.dtype, device="cpu")
        _local_of(placed).copy_(kept)
        return placed  # type: ignore[no-any-return]


def lay_out(groups: Sequence[dict[str, Any]]) -> tuple[list[LocalPart], list[tuple[int, int, int]]]:
    """Return the parts of all parameters with elements, one after another, and their pieces."""
    parts: list[LocalPart] = []
    pieces: list[tuple[int, int, int]] = []
    for g, group in enumerate(groups):
        for param in group["params"]:
            if param.numel():
                part = LocalPart(param, parts[-1].stop if parts else 0)
                parts.append(part)
                pieces.append((part.start, part.stop, g))
    return parts, pieces


def common_device(parts: Sequence[LocalPart]) -> torch.device:
    """Return the one device of all parts, or the CPU without parts."""
    devices = sorted({str(part.shard.device) for part in parts})
    if len(devices) > 1:
        raise ValueError(f"the parameters must be on one device, they are on {devices}")
    return parts[0].shard.device if parts else torch.device("cpu")


def check_not_replicated(parts: Sequence[LocalPart]) -> None:
    """Raise ValueError if several ranks hold the same elements, of which each chooses a ratio.

    The kernels of host and accelerator agree to a few ulps, so that replicas would diverge.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for part in parts:
        placed: Any = part.param
        if not _is_dtensor(placed) or any(p.is_replicate() for p in placed.placements):
            raise ValueError(
                'ratio="auto" on an accelerator needs parameters that no two ranks share (FSDP2 '
                "without replicas): with DDP or HSDP each rank would choose its own ratio, and the "
                "replicas would drift apart; give a ratio"
            )


def _is_dtensor(tensor: Tensor) -> bool:
    # A process that has a DTensor has imported its module; others need not.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_of(tensor: Tensor) -> Tensor:
    if not _is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        placed: Any = tensor
        local: Tensor = placed.to_local()
    return local.detach()


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in memory order, 1-D, sharing its memory."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != dense:
            raise ValueError(
                f"a parameter must fill its memory without gaps; one of shape "
                f"{tuple(tensor.shape)} has strides {tensor.stride()}"
            )
        dense *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))
