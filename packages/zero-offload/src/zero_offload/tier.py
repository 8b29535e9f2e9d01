"""From a config to a tier: the entry point ``host`` of ``zero_core.state_tiers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.auto_tier import AutoTier
from zero_offload.elementwise import check_elementwise
from zero_offload.flat_tier import DeviceTier, HostTier
from zero_offload.geometry import Geometry, freeze_groups
from zero_offload.intervals import Intervals
from zero_offload.kernel_stepper import KernelStepper, can_serve, check_kernel_class
from zero_offload.protocols import AdamKernel, DeviceTierFactory, StateTier
from zero_offload.settings import OffloadSettings
from zero_offload.share import device_bytes, host_share, state_bytes
from zero_offload.stepper import Stepper
from zero_offload.torch_stepper import TorchStepper
from zero_offload.transfer import HostMover
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
    names: Sequence[str] = (),
) -> TwinTier:
    """Make a tier of which a share lives on the host: all of it, unless the config says less.

    ZeRO-Offload (arXiv 2101.06840) with the Twin-Flow of ZeRO-Offload++. In the block
    ``offload_optimizer`` one key says which elements are kept and updated on the host; the rest is
    on ``device``. On a CPU both parts use the same update, so that none of them changes a bit of
    the result.

    - ``ratio``, 0 to 1: the elements ``[0, round(ratio * numel))``.
    - ``"ratio": "auto"``: an `AutoTier`, which measures how many.
    - ``parameters``: those of the parameters whose names match one of these patterns.
    - ``device_budget``: all but the last ones whose state fits in so many bytes on the device.

    Args:
        numel: length of the local flat space in elements, padding included.
        pieces: ``(start, stop, group)`` of each parameter's part, sorted and disjoint.
        params: ``(start, tensor)``: 1-D parameter shards on ``device`` that new values go to.
        device: the compute device.
        optimizer_class: an elementwise torch optimizer.
        groups: its ``param_groups`` without ``params``, every default filled in.
        config: the resolved ``zero_optimization`` block.
        adam_kernel: host kernel for Adam and AdamW, or None for torch's own update.
        device_tier: makes the device's part on an accelerator.
        names: of the parameters, one per piece; needed for ``parameters`` alone.

    Raises:
        ValueError: a setting or an optimizer that it cannot serve, by name.
    """
    settings = OffloadSettings.from_config(config)
    geometry = Geometry(numel, pieces, params, len(groups))
    return make_twin(
        geometry,
        host_share(settings, geometry, names, optimizer_class, groups),
        pin_memory=settings.pin_memory,
        device=device,
        optimizer_class=optimizer_class,
        groups=groups,
        adam_kernel=adam_kernel,
        device_tier=device_tier,
    )


def make_twin(
    geometry: Geometry,
    host: Intervals | None,
    *,
    pin_memory: bool,
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    device_tier: DeviceTierFactory,
) -> TwinTier:
    """A tier whose share ``host`` is on the host; None: an `AutoTier`, which finds one."""
    check_elementwise(optimizer_class)
    if adam_kernel is not None:
        check_kernel_class(optimizer_class)
    workshop = _Workshop(
        device,
        optimizer_class,
        adam_kernel if can_serve(geometry, groups) else None,
        device_tier,
        pin_memory,
    )
    if host is not None:
        return TwinTier(
            geometry,
            groups,
            host,
            make_host=workshop.make_host,
            make_device=workshop.make_device,
        )
    per_element = state_bytes(optimizer_class, groups, geometry.master_dtype())
    whole = device_bytes(geometry, 0, per_element)
    return AutoTier(
        geometry,
        groups,
        make_host=workshop.make_host,
        make_device=workshop.make_device,
        device=device,
        element_bytes=-(-whole // max(geometry.numel, 1)),
    )


@dataclass(frozen=True, slots=True)
class _Workshop:
    """Makes the tiers of the parts, now and when the cut moves."""

    device: torch.device
    optimizer_class: type[torch.optim.Optimizer]
    adam_kernel: AdamKernel | None
    device_tier: DeviceTierFactory
    pin_memory: bool

    def make_host(self, part: Geometry, groups: Sequence[Mapping[str, Any]]) -> HostTier:
        """A tier in host memory with a worker of its own."""
        stepper = self._make_stepper(part, groups, is_in_place=False)
        return HostTier(part, stepper, HostMover(part, self.device, pin_memory=self.pin_memory))

    def make_device(self, part: Geometry, groups: Sequence[Mapping[str, Any]]) -> StateTier:
        """A tier on the compute device; on a CPU one that updates as the host's does."""
        if self.device.type == "cpu":
            stepper = self._make_stepper(part, groups, is_in_place=True)
            return DeviceTier(part, stepper, self.device)
        return self.device_tier(
            numel=part.numel,
            pieces=[(p.start, p.stop, p.group) for p in part.pieces],
            params=part.shards,
            device=self.device,
            optimizer_class=self.optimizer_class,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in groups],
        )

    def _make_stepper(
        self, part: Geometry, groups: Sequence[Mapping[str, Any]], *, is_in_place: bool
    ) -> Stepper:
        """The update in host memory: the kernel's where it can serve, else torch's."""
        if self.adam_kernel is not None:
            return KernelStepper(
                part, self.adam_kernel, self.optimizer_class, is_in_place=is_in_place
            )
        frozen = freeze_groups(groups)
        return TorchStepper(part, _CPU, self.optimizer_class, frozen, is_in_place=is_in_place)


def make_device_tier(
    *,
    numel: int,
    pieces: Sequence[tuple[int, int, int]],
    params: Sequence[tuple[int, Tensor]],
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
) -> DeviceTier:
    """A device tier of this package's own, for use without an engine: torch on flat slices."""
    geometry = Geometry(numel, pieces, params, len(groups))
    frozen = freeze_groups(groups)
    stepper = TorchStepper(geometry, device, optimizer_class, frozen, is_in_place=True)
    return DeviceTier(geometry, stepper, device)
