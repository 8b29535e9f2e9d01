"""Entry point ``host`` of ``zero_core.state_tiers``, which creates a state tier from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals, freeze_groups
from zero_offload.protocols import (
    AdamKernel,
    DeviceTierFactory,
    Groups,
    OptimizerClass,
    ParamStore,
    UploadCodec,
)
from zero_offload.settings import INSTALL, OffloadSettings
from zero_offload.steppers.torch_stepper import TorchStepper
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import DeviceTier
from zero_offload.tiers.shares import device_bytes, host_share, state_bytes
from zero_offload.tiers.twin import BudgetTier, TwinTier
from zero_offload.transfers.mover import Mover


def create_tier(
    *,
    numel: int,
    pieces: Sequence[tuple[int, int, int]],
    params: Sequence[tuple[int, Tensor]],
    device: torch.device,
    optimizer_class: OptimizerClass,
    groups: Groups,
    config: Mapping[str, Any],
    adam_kernel: AdamKernel | None,
    device_tier: DeviceTierFactory,
    names: Sequence[str] = (),
    param_store: ParamStore | None = None,
    upload_codec: UploadCodec | None = None,
) -> TwinTier:
    """Create a tier that keeps all or a part of the optimizer state on the host.

    The tier implements ZeRO-Offload (arXiv 2101.06840) and the Twin-Flow of ZeRO-Offload++. One key
    of the block ``offload_optimizer`` selects the elements that are kept and updated on the host,
    by default all of them. The others are kept and updated on ``device``.

    - ``ratio``, 0 to 1: the last ``round(ratio * numel)`` elements.
    - ``"ratio": "auto"``: the number of last elements that an `AutoTier` measures to be fastest.
    - ``parameters``: the parameters whose names match one of these patterns.
    - ``device_budget``: all but the first elements whose device memory fits in this many bytes.

    With ``"host_share": "first"`` a ratio or a budget gives the host the first elements instead. If
    ``device`` is a CPU, none of these keys changes the result: host and device use the same update,
    and a split inside a parameter is aligned (see `OffloadTiers.alignment`).

    Args:
        numel: length of the local flat space in elements, padding included.
        pieces: ``(start, stop, group)`` of each parameter's elements, sorted and disjoint.
        params: ``(start, tensor)``: 1-D parameter shards to update. An offloaded shard is on the
            CPU, or on the meta device if ``param_store`` writes it. All others are on ``device``.
        device: the compute device.
        optimizer_class: an elementwise torch optimizer.
        groups: its ``param_groups`` without ``params``, every default filled in.
        config: the resolved ``zero_optimization`` block.
        adam_kernel: host kernel for Adam, AdamW and the other optimizers that it has functions for,
            or None for torch's own update.
        device_tier: factory of the device's tier on an accelerator.
        names: names of the parameters, one per piece. Only ``parameters`` needs them.
        param_store: writes new values of shards on the meta device.
        upload_codec: codec of the differences that ``lossless_upload`` sends.

    Raises:
        ValueError: a setting or an optimizer is not supported. The message names it.
        StorageError: the disk has no room for the state file.
    """
    settings = OffloadSettings.from_config(config)
    if settings.lossless_upload and upload_codec is None and device.type != "cpu":
        raise ValueError(
            f"offload_optimizer.lossless_upload needs a codec: {INSTALL.format('zero-comm')}, "
            "which has one, or pass upload_codec"
        )
    geometry = Geometry(numel, pieces, params, len(groups))
    dtypes = {tensor.dtype for _, tensor in params}
    if torch.float64 in dtypes and len(dtypes) > 1:  # All master weights of a tier have one dtype.
        others = sorted(str(dtype) for dtype in dtypes - {torch.float64})
        raise ValueError(
            f"offload_optimizer does not serve torch.float64 parameters beside {others}: its "
            "master weights all have one dtype, so those would be updated in float64. Give all "
            'trainable parameters one dtype, or leave the optimizer state on the device ("device": '
            '"none"), which keeps each dtype apart'
        )
    tiers = OffloadTiers(
        geometry,
        settings,
        device=device,
        optimizer_class=optimizer_class,
        groups=groups,
        adam_kernel=adam_kernel,
        device_tier=device_tier,
        param_store=param_store,
        upload_codec=upload_codec if settings.lossless_upload else None,
    )
    is_accelerated = device.type != "cpu"
    host = host_share(
        settings, geometry, names, optimizer_class, groups, is_accelerated=is_accelerated
    )
    return make_twin(geometry, host, groups, tiers)


def make_twin(
    geometry: Geometry, host: Intervals | None, groups: Groups, tiers: OffloadTiers
) -> TwinTier:
    """Create a tier with the elements ``host`` on the host, or an `AutoTier` for None.

    With ``device_budget`` it is a `BudgetTier`, whose `expect_micro_steps` may change the elements.
    """
    frozen = freeze_groups(groups)
    if host is not None:
        tier_class = TwinTier if tiers.device_budget is None else BudgetTier
        return tier_class(geometry, frozen, host, tiers)
    per_element = state_bytes(tiers.optimizer_class, groups, geometry.master_dtype)
    everything, is_accelerated = Intervals([(0, geometry.numel)]), tiers.device.type != "cpu"
    whole = device_bytes(geometry, everything, per_element, is_accelerated=is_accelerated)
    element_bytes = -(-whole // max(geometry.numel, 1))
    return AutoTier(geometry, frozen, tiers, element_bytes=element_bytes)


def make_device_tier(
    *,
    numel: int,
    pieces: Sequence[tuple[int, int, int]],
    params: Sequence[tuple[int, Tensor]],
    device: torch.device,
    optimizer_class: OptimizerClass,
    groups: Groups,
    param_store: ParamStore | None = None,
) -> DeviceTier:
    """Create a tier that updates ``params`` on ``device`` with torch, for use without an engine."""
    geometry = Geometry(numel, pieces, params, len(groups))
    frozen = freeze_groups(groups)
    stepper = TorchStepper(geometry, device, optimizer_class, frozen, is_in_place=True)
    return DeviceTier(geometry, stepper, Mover(geometry, device, param_store))
