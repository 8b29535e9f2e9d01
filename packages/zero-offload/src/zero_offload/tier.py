"""From a config to a tier: the entry point ``host`` of ``zero_core.state_tiers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_offload import numa
from zero_offload.auto_tier import AutoTier
from zero_offload.elementwise import check_elementwise
from zero_offload.flat_tier import DeviceTier, HostTier
from zero_offload.geometry import Geometry, freeze_groups
from zero_offload.host_memory import HostMemory
from zero_offload.intervals import Intervals
from zero_offload.kernel_stepper import KernelStepper, can_serve
from zero_offload.nvme_stepper import NvmeStepper
from zero_offload.protocols import AdamKernel, DeviceTierFactory, ParamStore, StateTier
from zero_offload.resting import Rest, RestingDeviceMover, RestingHostMover, store_of_part
from zero_offload.rules import Rule, check_kernel_class, resolve_rule
from zero_offload.settings import NvmeSettings, OffloadSettings
from zero_offload.share import device_bytes, host_share, state_bytes
from zero_offload.stepper import Stepper
from zero_offload.torch_stepper import FUSED_ALIGNMENT, TorchStepper
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
    param_store: ParamStore | None = None,
) -> TwinTier:
    """Make a tier of which a share lives on the host: all of it, unless the config says less.

    ZeRO-Offload (arXiv 2101.06840) with the Twin-Flow of ZeRO-Offload++. In the block
    ``offload_optimizer`` one key says which elements are kept and updated on the host; the rest is
    on ``device``. On a CPU both parts use the same update, and a cut moves down to the next place
    in a parameter at which parting it changes no bit (see `_alignment`), so that none of them
    changes the result.

    - ``ratio``, 0 to 1: the elements ``[0, round(ratio * numel))``.
    - ``"ratio": "auto"``: an `AutoTier`, which measures how many.
    - ``parameters``: those of the parameters whose names match one of these patterns.
    - ``device_budget``: all but the last ones whose state fits in so many bytes on the device.

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
        device_tier: makes the device's part on an accelerator.
        names: of the parameters, one per piece; needed for ``parameters`` alone.
        param_store: takes new values of shards on the meta device.

    Raises:
        ValueError: a setting or an optimizer that it cannot serve, by name.
    """
    settings = OffloadSettings.from_config(config)
    geometry = Geometry(numel, pieces, params, len(groups))
    return make_twin(
        geometry,
        host_share(settings, geometry, names, optimizer_class, groups),
        pin_memory=settings.pin_memory,
        pin_memory_bytes=settings.pin_memory_bytes,
        placement=numa.locate(device) if settings.numa else None,
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
    host: Intervals | None,
    *,
    pin_memory: bool,
    placement: numa.Placement | None,
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    device_tier: DeviceTierFactory,
    pin_memory_bytes: int | None = None,
    nvme: NvmeSettings | None = None,
    state_dtype: str = "float32",
    param_store: ParamStore | None = None,
) -> TwinTier:
    """A tier whose share ``host`` is on the host; None: an `AutoTier`, which finds one.

    The host's thread and memory are bound as ``placement`` says; None leaves them alone. With
    ``nvme`` the host's part of the state lies in a file.
    """
    check_elementwise(optimizer_class)
    if adam_kernel is not None:
        check_kernel_class(optimizer_class)
    frozen = freeze_groups(groups)
    rule = _resolve(optimizer_class, frozen, adam_kernel, state_dtype, geometry)
    if rule is None and nvme is not None:
        raise ValueError(
            f'offload_optimizer.device = "nvme" does not serve {optimizer_class.__qualname__} '
            f"with these settings: its update is not one of an installed host kernel. Use Adam, "
            f"AdamW, Adagrad, SGD or Lion by name with cpu-adam installed (pip install "
            f'zero-offload[cpu-adam]) and without amsgrad or float64, or device "cpu"'
        )
    is_on_cpu = device.type == "cpu"
    make_memory = partial(
        HostMemory,
        should_pin=pin_memory and not is_on_cpu,
        limit_bytes=pin_memory_bytes,
        place=partial(numa.preferring, placement),
    )
    workshop = _Workshop(
        device, optimizer_class, rule, device_tier, make_memory, placement, nvme, param_store
    )
    alignment = _alignment(rule, frozen) if is_on_cpu else 1
    if host is not None:
        return TwinTier(
            geometry,
            frozen,
            _floored(host, geometry, alignment),
            make_host=workshop.make_host,
            make_device=workshop.make_device,
            alignment=alignment,
        )
    per_element = state_bytes(optimizer_class, groups, geometry.master_dtype())
    whole = device_bytes(geometry, 0, per_element)
    return AutoTier(
        geometry,
        frozen,
        make_host=workshop.make_host,
        make_device=workshop.make_device,
        device=device,
        element_bytes=-(-whole // max(geometry.numel, 1)),
        alignment=alignment,
    )


def _floored(host: Intervals, geometry: Geometry, alignment: int) -> Intervals:
    """The first elements end where a cut changes no bit; chosen parameters are whole anyway."""
    if host != Intervals([(0, host.numel)]):
        return host
    return Intervals([(0, geometry.floor(host.numel, alignment))])


@dataclass(frozen=True, slots=True)
class _Workshop:
    """Makes the tiers of the parts, now and when the cut moves."""

    device: torch.device
    optimizer_class: type[torch.optim.Optimizer]
    rule: Rule | None
    device_tier: DeviceTierFactory
    make_memory: Callable[[], HostMemory]
    placement: numa.Placement | None
    nvme: NvmeSettings | None
    param_store: ParamStore | None

    def make_host(
        self, part: Geometry, share: Intervals, groups: Sequence[Mapping[str, Any]]
    ) -> HostTier:
        """A tier in host memory with a worker of its own."""
        rest = Rest(part, self.device, store_of_part(self.param_store, share))
        mover = RestingHostMover(part, self.device, rest, self.make_memory())
        is_in_place = self.device.type == "cpu"
        with numa.preferring(self.placement):
            stepper = self._make_nvme_stepper(part, groups)
            if stepper is None:
                # What goes up to the device is, with a split master, its upper half.
                stepper = self._make_stepper(
                    part, groups, is_in_place=is_in_place, upper=mover.hold
                )
        initializer = numa.worker_initializer(self.placement)
        return HostTier(part, stepper, mover, initializer=initializer)

    def make_device(
        self, part: Geometry, share: Intervals, groups: Sequence[Mapping[str, Any]]
    ) -> StateTier:
        """A tier on the compute device; on a CPU one that updates as the host's does."""
        store = store_of_part(self.param_store, share)
        if self.device.type == "cpu":
            stepper = self._make_stepper(part, groups, is_in_place=True, upper=part.view)
            mover = RestingDeviceMover(part, self.device, Rest(part, self.device, store))
            return DeviceTier(part, stepper, mover)
        return self.device_tier(
            numel=part.numel,
            pieces=[(p.start, p.stop, p.group) for p in part.pieces],
            params=part.shards,
            device=self.device,
            optimizer_class=self.optimizer_class,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in groups],
            param_store=store,
        )

    def _make_nvme_stepper(
        self, part: Geometry, groups: Sequence[Mapping[str, Any]]
    ) -> Stepper | None:
        """The update of state in a file, if that is asked for."""
        if self.nvme is None:
            return None
        assert self.rule is not None, "make_twin has refused it"
        folder, count = self.nvme.path, self.nvme.buffer_count
        return NvmeStepper(
            part, self.rule, freeze_groups(groups), folder=folder, buffer_count=count
        )

    def _make_stepper(
        self,
        part: Geometry,
        groups: Sequence[Mapping[str, Any]],
        *,
        is_in_place: bool,
        upper: Callable[[int, int], Tensor],
    ) -> Stepper:
        """The update in host memory: the kernel's where it can serve, else torch's."""
        frozen = freeze_groups(groups)
        if self.rule is not None:
            return KernelStepper(part, self.rule, frozen, is_in_place=is_in_place, upper=upper)
        return TorchStepper(part, _CPU, self.optimizer_class, frozen, is_in_place=is_in_place)


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


def _resolve(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    state_dtype: str,
    geometry: Geometry,
) -> Rule | None:
    """The rule by which a kernel updates in host memory; None where torch's own update does."""
    rule = resolve_rule(adam_kernel, optimizer_class, groups, state_dtype)
    if rule is None or can_serve(geometry):
        return rule
    if state_dtype != "float32":
        raise ValueError(
            f"offload_optimizer.state_dtype = {state_dtype!r} is not served for float64 "
            f'parameters: use "float32"'
        )
    return None


def _alignment(rule: Rule | None, groups: Sequence[Mapping[str, Any]]) -> int:
    """At multiples of how many elements of a parameter a cut changes no bit on a CPU."""
    if rule is not None:
        return rule.block
    is_fused = any(group.get("fused") for group in groups)
    return FUSED_ALIGNMENT if is_fused else 1
