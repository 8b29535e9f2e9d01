"""From a config to a tier: the entry point ``host`` of ``zero_core.state_tiers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_offload.elementwise import check_elementwise
from zero_offload.flat_tier import DeviceTier, HostTier
from zero_offload.geometry import Geometry, freeze_groups
from zero_offload.kernel_stepper import KernelStepper, can_serve
from zero_offload.nvme_stepper import NvmeStepper
from zero_offload.protocols import AdamKernel, DeviceTierFactory, ParamStore, StateTier
from zero_offload.resting import Rest, RestingDeviceMover, RestingHostMover, shifted
from zero_offload.rules import check_kernel_class, resolve_rule
from zero_offload.settings import NvmeSettings, OffloadSettings
from zero_offload.stepper import Stepper
from zero_offload.torch_stepper import TorchStepper
from zero_offload.twin import TwinTier

__all__ = ["create_tier", "make_device_tier", "make_twin"]

_CPU = torch.device("cpu")


def create_tier(
    *,
    numel: int,
    pieces: Sequence[tuple[int, int, int]],
    params: Sequence[tuple[int, Tensor]],
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    adam_kernel: AdamKernel | None,
    device_tier: DeviceTierFactory,
    param_store: ParamStore | None = None,
) -> TwinTier:
    """Make a tier whose first ``offload_optimizer.ratio`` of elements live on the host.

    ZeRO-Offload (arXiv 2101.06840) with the Twin-Flow of ZeRO-Offload++: elements
    ``[0, round(ratio * numel))`` are kept and updated on the host, the rest on ``device``. On a
    CPU both halves use the same update, so the ratio never changes a bit of the result; with
    compact states, but for the parameter that the cut goes through: blocks and random numbers
    count from the start of each part.

    Args:
        numel: length of the local flat space in elements, padding included.
        pieces: ``(start, stop, group)`` of each parameter's part, sorted and disjoint.
        params: ``(start, tensor)``: 1-D parameter shards that new values go to: on ``device``; or
            on the host, where they rest; or on the meta device, for ``param_store`` to take.
        device: the compute device.
        optimizer_class: an elementwise torch optimizer.
        groups: its ``param_groups`` without ``params``, every default filled in.
        config: the resolved ``zero_optimization`` block.
        adam_kernel: host kernel for Adam, AdamW and whatever else it has functions for (see
            `zero_offload.rules`), or None for torch's own update.
        device_tier: makes the device's half on an accelerator.
        param_store: takes new values of shards on the meta device.

    Raises:
        ValueError: a setting or an optimizer that it cannot serve, by name.
    """
    settings = OffloadSettings.from_config(config)
    return make_twin(
        Geometry(numel, pieces, params, len(groups)),
        ratio=settings.ratio,
        pin_memory=settings.pin_memory,
        device=device,
        optimizer_class=optimizer_class,
        groups=groups,
        adam_kernel=adam_kernel,
        device_tier=device_tier,
        nvme=settings.nvme,
        state_dtype=settings.state_dtype,
        param_store=param_store,
    )


def make_twin(
    geometry: Geometry,
    *,
    ratio: float,
    pin_memory: bool,
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    device_tier: DeviceTierFactory,
    nvme: NvmeSettings | None = None,
    state_dtype: str = "float32",
    param_store: ParamStore | None = None,
) -> TwinTier:
    """The two halves of a flat space, cut at element ``round(ratio * numel)``.

    With ``nvme``, the host's half of the state lies in a file.
    """
    check_elementwise(optimizer_class)
    if adam_kernel is not None:
        check_kernel_class(optimizer_class)
    frozen = freeze_groups(groups)
    make_stepper = partial(_make_stepper, optimizer_class, frozen, adam_kernel, state_dtype)
    cut = round(ratio * geometry.numel)
    host: tuple[StateTier, dict[int, int]] | None = None
    rest: tuple[StateTier, dict[int, int]] | None = None
    if cut or not geometry.numel:
        part, local = geometry.part(0, cut, len(groups))
        rest_of = Rest(part, device, param_store)
        mover = RestingHostMover(part, device, rest_of, pin_memory=pin_memory)
        # What rounded values go through to the device is, with a split master, its upper half.
        stepper = (
            make_stepper(part, is_in_place=False, upper=mover.out)
            if nvme is None
            else _make_nvme_stepper(part, optimizer_class, frozen, adam_kernel, state_dtype, nvme)
        )
        host = HostTier(part, stepper, mover), local
    if cut < geometry.numel:
        part, local = geometry.part(cut, geometry.numel, len(groups))
        if device.type == "cpu":
            stepper = make_stepper(part, is_in_place=True, upper=part.view)
            rest_of = Rest(part, device, shifted(param_store, cut))
            rest = DeviceTier(part, stepper, RestingDeviceMover(part, device, rest_of)), local
        else:
            made = device_tier(
                numel=part.numel,
                pieces=[(p.start, p.stop, p.group) for p in part.pieces],
                params=part.shards,
                device=device,
                optimizer_class=optimizer_class,
                groups=groups,
                param_store=shifted(param_store, cut),
            )
            rest = made, local
    return TwinTier(geometry, cut, host, rest)


def make_device_tier(
    *,
    numel: int,
    pieces: Sequence[tuple[int, int, int]],
    params: Sequence[tuple[int, Tensor]],
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    param_store: ParamStore | None = None,
) -> DeviceTier:
    """A device tier of this package's own, for use without an engine: torch on flat slices."""
    geometry = Geometry(numel, pieces, params, len(groups))
    frozen = freeze_groups(groups)
    stepper = TorchStepper(geometry, device, optimizer_class, frozen, is_in_place=True)
    mover = RestingDeviceMover(geometry, device, Rest(geometry, device, param_store))
    return DeviceTier(geometry, stepper, mover)


def _make_stepper(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    state_dtype: str,
    geometry: Geometry,
    *,
    is_in_place: bool,
    upper: Callable[[int, int], Tensor],
) -> Stepper:
    """The update in host memory: the kernel's where it can serve, else torch's."""
    rule = resolve_rule(adam_kernel, optimizer_class, groups, state_dtype)
    if rule is not None and can_serve(geometry):
        return KernelStepper(geometry, rule, groups, is_in_place=is_in_place, upper=upper)
    if state_dtype != "float32":
        raise ValueError(
            f"offload_optimizer.state_dtype = {state_dtype!r} is not served for float64 "
            f'parameters: use "float32"'
        )
    return TorchStepper(geometry, _CPU, optimizer_class, groups, is_in_place=is_in_place)


def _make_nvme_stepper(
    geometry: Geometry,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    state_dtype: str,
    nvme: NvmeSettings,
) -> NvmeStepper:
    """A kernel's update of state in a file; torch's own works on tensors that stay in memory."""
    rule = resolve_rule(adam_kernel, optimizer_class, groups, state_dtype)
    if rule is None:
        raise ValueError(
            f'offload_optimizer.device = "nvme" does not serve {optimizer_class.__qualname__} '
            f"with these settings: its update is not one of an installed host kernel. Use Adam, "
            f"AdamW, Adagrad, SGD or Lion by name with cpu-adam installed (pip install "
            f'zero-offload[cpu-adam]) and without amsgrad, or device "cpu"'
        )
    return NvmeStepper(geometry, rule, groups, folder=nvme.path, buffer_count=nvme.buffer_count)
