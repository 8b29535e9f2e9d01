"""Factory of state tiers from a config: the entry point ``host`` of ``zero_core.state_tiers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, freeze_groups
from zero_offload.flat.intervals import Intervals
from zero_offload.memory.host_memory import HostMemory
from zero_offload.protocols import AdamKernel, DeviceTierFactory, ParamStore, StateTier
from zero_offload.rules.elementwise import check_elementwise
from zero_offload.rules.resolve import check_kernel_class, resolve_rule
from zero_offload.rules.rule import Rule
from zero_offload.settings import OffloadSettings
from zero_offload.steppers.file_stepper import FileStepper
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.rule_stepper import can_serve
from zero_offload.steppers.stepper import Stepper
from zero_offload.steppers.torch_stepper import FUSED_ALIGNMENT, TorchStepper
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.flat_tier import DeviceTier, HostTier
from zero_offload.tiers.offloaded_shard import OffloadedShards, store_of_part
from zero_offload.tiers.share import device_bytes, host_share, state_bytes
from zero_offload.tiers.transfer import DeviceMover, HostMover
from zero_offload.tiers.twin import TwinTier

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
    """Create a tier with a share of its state on the host: all of it, unless the config says less.

    ZeRO-Offload (arXiv 2101.06840) with the Twin-Flow of ZeRO-Offload++. In the block
    ``offload_optimizer`` one key says which elements are kept and updated on the host; the rest is
    on ``device``. On a CPU both parts use the same update, and a split point moves down to the next
    place in a parameter at which a split changes no bit (see `OffloadTiers.alignment`), so that
    none of them changes the result.

    - ``ratio``, 0 to 1: the elements ``[0, round(ratio * numel))``.
    - ``"ratio": "auto"``: as many as an `AutoTier` finds fastest.
    - ``parameters``: those of the parameters whose names match one of these patterns.
    - ``device_budget``: all but the last ones whose state fits in so many bytes on the device.

    Args:
        numel: length of the local flat space in elements, padding included.
        pieces: ``(start, stop, group)`` of each parameter's part, sorted and disjoint.
        params: ``(start, tensor)``: 1-D parameter shards that new values go to: on ``device``; or
            on the host, where they are kept; or on the meta device, for ``param_store`` to take.
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
    _check_one_width(params)
    tiers = OffloadTiers.of(
        geometry,
        settings,
        device=device,
        optimizer_class=optimizer_class,
        groups=groups,
        adam_kernel=adam_kernel,
        device_tier=device_tier,
        param_store=param_store,
    )
    host = host_share(settings, geometry, names, optimizer_class, groups)
    return make_twin(geometry, host, groups, tiers)


def make_twin(
    geometry: Geometry,
    host: Intervals | None,
    groups: Sequence[Mapping[str, Any]],
    tiers: OffloadTiers,
) -> TwinTier:
    """Create a tier with the share ``host`` on the host, or for None an `AutoTier`."""
    frozen = freeze_groups(groups)
    alignment = tiers.alignment(frozen)
    if host is not None:
        aligned = _aligned(host, geometry, alignment)
        return TwinTier(geometry, frozen, aligned, tiers, alignment=alignment)
    per_element = state_bytes(tiers.optimizer_class, groups, geometry.master_dtype())
    whole = device_bytes(geometry, 0, per_element)
    return AutoTier(
        geometry,
        frozen,
        tiers,
        device=tiers.device,
        element_bytes=-(-whole // max(geometry.numel, 1)),
        alignment=alignment,
    )


def _aligned(host: Intervals, geometry: Geometry, alignment: int) -> Intervals:
    """The first elements end where a split changes no bit. Chosen parameters are whole anyway."""
    if host != Intervals([(0, host.numel)]):
        return host
    return Intervals([(0, geometry.align_down(host.numel, alignment))])


@dataclass(frozen=True, slots=True)
class OffloadTiers:
    """Factory of the tiers of the host's and the device's part.

    Attributes:
        device: the compute device.
        optimizer_class: an elementwise torch optimizer.
        rule: the update by a kernel; None for torch's own.
        settings: of the host's part.
        device_tier: makes the device's part on an accelerator.
        param_store: takes new values of shards on the meta device.
    """

    device: torch.device
    optimizer_class: type[torch.optim.Optimizer]
    rule: Rule | None
    settings: OffloadSettings
    device_tier: DeviceTierFactory
    param_store: ParamStore | None = None

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        settings: OffloadSettings,
        *,
        device: torch.device,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        adam_kernel: AdamKernel | None,
        device_tier: DeviceTierFactory,
        param_store: ParamStore | None = None,
    ) -> OffloadTiers:
        """Return the factory for an optimizer. Arguments as for `create_tier`.

        Raises:
            ValueError: an optimizer or a setting that cannot be served.
        """
        check_elementwise(optimizer_class)
        if adam_kernel is not None:
            check_kernel_class(optimizer_class)
        frozen = freeze_groups(groups)
        rule = _resolve(optimizer_class, frozen, adam_kernel, settings.state_dtype, geometry)
        if rule is None and settings.nvme is not None:
            raise ValueError(
                f'offload_optimizer.device = "nvme" does not serve {optimizer_class.__qualname__} '
                f"with these settings: its update is not one of an installed host kernel. Use "
                f"Adam, AdamW, Adagrad, SGD or Lion by name with cpu-adam installed (pip install "
                f'zero-offload[cpu-adam]) and without amsgrad or float64, or device "cpu"'
            )
        return cls(device, optimizer_class, rule, settings, device_tier, param_store)

    def alignment(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """Return of how many elements of a parameter a split point must be a multiple.

        At such multiples a split changes no bit on a CPU.
        """
        if self.device.type != "cpu":
            return 1
        if self.rule is not None:
            return self.rule.block
        return FUSED_ALIGNMENT if any(group.get("fused") for group in groups) else 1

    def make_host(
        self, part: Geometry, share: Intervals, groups: Sequence[Mapping[str, Any]]
    ) -> HostTier:
        """Create a tier in host memory with a worker of its own."""
        is_on_cpu = self.device.type == "cpu"
        memory = HostMemory(
            should_pin=self.settings.pin_memory and not is_on_cpu,
            limit_bytes=self.settings.pin_memory_bytes,
        )
        offloaded = OffloadedShards(part, self.device, store_of_part(self.param_store, share))
        mover = HostMover(part, self.device, memory, offloaded=offloaded)
        nvme = self.settings.nvme
        if nvme is None:
            # A split master weight has its upper half in the memory that is sent to the device.
            stepper = self._make_stepper(part, groups, is_in_place=is_on_cpu, upper=mover.hold)
        else:
            assert self.rule is not None, "refused by `of`"
            frozen, count = freeze_groups(groups), nvme.buffer_count
            stepper = FileStepper(part, self.rule, frozen, folder=nvme.path, buffer_count=count)
        return HostTier(part, stepper, mover)

    def make_device(
        self, part: Geometry, share: Intervals, groups: Sequence[Mapping[str, Any]]
    ) -> StateTier:
        """Create a tier on the compute device. On a CPU its update is that of the host's."""
        store = store_of_part(self.param_store, share)
        if self.device.type == "cpu":
            stepper = self._make_stepper(part, groups, is_in_place=True, upper=part.view)
            offloaded = OffloadedShards(part, self.device, store)
            return DeviceTier(part, stepper, DeviceMover(part, self.device, offloaded))
        return self.device_tier(
            numel=part.numel,
            pieces=[(p.start, p.stop, p.group) for p in part.pieces],
            params=part.shards,
            device=self.device,
            optimizer_class=self.optimizer_class,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in groups],
            param_store=store,
        )

    def _make_stepper(
        self,
        part: Geometry,
        groups: Sequence[Mapping[str, Any]],
        *,
        is_in_place: bool,
        upper: Callable[[int, int], Tensor],
    ) -> Stepper:
        """The update in host memory: by the kernel where it can serve, else by torch."""
        frozen = freeze_groups(groups)
        if self.rule is None:
            cpu = torch.device("cpu")
            return TorchStepper(part, cpu, self.optimizer_class, frozen, is_in_place=is_in_place)
        return MemoryStepper(part, self.rule, frozen, is_in_place=is_in_place, upper=upper)


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
    """Create a device tier for use without an engine: torch on flat slices."""
    geometry = Geometry(numel, pieces, params, len(groups))
    frozen = freeze_groups(groups)
    stepper = TorchStepper(geometry, device, optimizer_class, frozen, is_in_place=True)
    mover = DeviceMover(geometry, device, OffloadedShards(geometry, device, param_store))
    return DeviceTier(geometry, stepper, mover)


def _check_one_width(params: Sequence[tuple[int, Tensor]]) -> None:
    """Refuse float64 shards beside others: all master weights here have one dtype."""
    dtypes = {tensor.dtype for _, tensor in params}
    if torch.float64 in dtypes and len(dtypes) > 1:
        others = sorted(str(dtype) for dtype in dtypes - {torch.float64})
        raise ValueError(
            f"offload_optimizer does not serve torch.float64 parameters beside {others}: its "
            "master weights all have one dtype, so those would be updated in float64. Give all "
            'trainable parameters one dtype, or leave the optimizer state on the device ("device": '
            '"none"), which keeps each dtype apart'
        )


def _resolve(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    adam_kernel: AdamKernel | None,
    state_dtype: str,
    geometry: Geometry,
) -> Rule | None:
    """The rule by which a kernel updates in host memory. None for torch's own update."""
    rule = resolve_rule(adam_kernel, optimizer_class, groups, state_dtype)
    if rule is None or can_serve(geometry):
        return rule
    if state_dtype != "float32":
        raise ValueError(
            f"offload_optimizer.state_dtype = {state_dtype!r} is not served for float64 "
            f'parameters: use "float32"'
        )
    return None
