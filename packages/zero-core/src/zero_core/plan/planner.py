"""Choices of a plan: configurations of the same run, their bytes, and the smallest that fits.

[Note: choices]
A choice is a stage, a ratio and a variant. The **ratio** is the share of the optimizer state that
the host holds and updates (`zero_optimization.offload_optimizer.ratio`; 0 is no offload). A
**variant** has another micro-batch with as many samples in a step, recomputes activations, or has
another placement (`zero_core.plan.choices`). Moments of fewer bits change numbers: such choices may
be the best one only if rounding is allowed.

The best choice is the smallest change that fits: raising the stage comes before moving optimizer
state to the host, and of two stages the one that needs less of it there; a stage is never lowered.
If no stage fits, activations are recomputed, then the micro-batch is halved; if nothing fits so
either, parameters go to the host, then states to NVMe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_core._torch import pytree
from zero_core.blueprint import Blueprint
from zero_core.comm.meter import Links
from zero_core.config import ActivationCheckpointingConfig, Config, ZeroConfig
from zero_core.config.rules import check_rules
from zero_core.errors import ConfigError
from zero_core.optim.factory import has_kernel_rule
from zero_core.plan.activations import Trace, trace_step
from zero_core.plan.choices import AS_CONFIGURED, Placement, placements, roundings, traffic_choices
from zero_core.plan.footprints import Footprints
from zero_core.plan.forecast import Forecast, MemoryUse
from zero_core.plan.result import STAGE_3_KEYS, Choice, Plan, format_bytes
from zero_core.plan.traffic import step_traffic

GPUS_PER_NODE = 8
"""Ranks per node unless they are given."""
PERCENT = 100
MOST_MICRO_BATCHES = 6


@dataclass(frozen=True)
class Machine:
    """Machine that the run must fit."""

    world_size: int
    ranks_per_node: int
    device_memory: int | None
    host_memory: int | None
    device_type: str
    nvme_path: str | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size = {self.world_size}: must be at least 1")
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node = {self.ranks_per_node}: must divide world_size = "
                f"{self.world_size}; give the number of ranks that share a node"
            )
        for name, value in (
            ("device_memory", self.device_memory),
            ("host_memory", self.host_memory),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"{name} = {value}: must be a positive number of bytes")
        if self.device_type not in ("accelerator", "cpu"):
            raise ConfigError(f"device_type = {self.device_type!r}: must be 'accelerator' or 'cpu'")
        if self.device_type == "cpu" and self.device_memory is not None:
            raise ConfigError("device_memory with device_type 'cpu': give host_memory alone")

    @property
    def is_accelerated(self) -> bool:
        return self.device_type != "cpu"

    @property
    def limits(self) -> str:
        """The given memory in words, empty if there is none."""
        found = []
        if self.device_memory is not None:
            found.append(f"{format_bytes(self.device_memory)} of device memory")
        if self.host_memory is not None:
            memory = format_bytes(self.host_memory)
            found.append(f"{memory} of host memory for {self.ranks_per_node} ranks")
        return " and ".join(found)

    def has_room(self, use: MemoryUse) -> bool:
        """Return whether a rank's bytes fit, if its node's other ranks take as much."""
        if self.device_memory is not None and use.device_bytes > self.device_memory:
            return False
        host = use.host_bytes + (0 if self.is_accelerated else use.device_bytes)
        return self.host_memory is None or host * self.ranks_per_node <= self.host_memory


@dataclass(frozen=True)
class Variant:
    """Settings that differ between choices besides stage and ratio. See [Note: choices]."""

    micro_batch: int  # samples of a rank and micro-step
    is_recomputed: bool  # whether activations are recomputed
    placement: Placement = AS_CONFIGURED  # other keys of ``zero_optimization``

    def of(self, config: Config) -> Config:
        """Return the configuration changed to this."""
        samples = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        changes: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": samples // self.micro_batch,
            "zero_optimization": self.placement.of(config.zero_optimization),
        }
        if self.is_recomputed and not config.is_recomputed:
            changes["activation_checkpointing"] = ActivationCheckpointingConfig()
        if not self.is_recomputed:
            changes["activation_checkpointing"] = None
        return config.model_copy(update=changes)


class Planner:
    """Forecasts of all choices, and the smallest that fits. See [Note: choices]."""

    def __init__(
        self,
        drawn: Blueprint,
        config: Config,
        machine: Machine,
        buffer_bytes: int,
        inputs: Mapping[str, Any] | Sequence[Any] | None,
    ) -> None:
        self._drawn = drawn
        self.config = config
        self.machine = machine
        self.layout = drawn.layout  # of the parameters
        self._buffer_bytes = buffer_bytes
        self._inputs = inputs
        self._stage = config.zero_optimization.stage
        self._stages = range(4) if machine.world_size > 1 else [self._stage]
        self._device = config.zero_optimization.offload_optimizer.device
        self._offloaded = "cpu" if self._device == "none" else self._device
        self._footprints = Footprints()
        self.links = Links(
            machine.world_size,
            machine.ranks_per_node,
            machine.is_accelerated,
            config.world_size_invariant,
        )
        self._forecasts: dict[tuple[Any, ...], Forecast] = {}
        self._traces: dict[int, Trace] = {}
        self.given = Variant(config.train_micro_batch_size_per_gpu, config.is_recomputed)
        self._ratio = self._planned_ratio()
        self.configured = self.choice(self.given, self._stage, self._ratio)

    def _planned_ratio(self) -> float:
        """Return the share of the optimizer state that the configuration gives to the host."""
        offload = self.config.zero_optimization.offload_optimizer
        if offload.device == "none":
            return 0.0
        tier = self._forecast(self.given, self._stage, self._device).tier
        if tier is None:
            return 1.0 if offload.ratio is None or offload.ratio == "auto" else offload.ratio
        params = self.layout.params
        return tier.planned_ratio([(p.name, p.numel) for p in params if p.is_trainable])

    # ------------------------------------------------------------- forecasts

    def _changed(self, variant: Variant, stage: int, device: str) -> Config:
        """Return the configuration without keys that are not served at the ``stage``."""
        zero = self.config.zero_optimization
        changes: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": zero.offload_optimizer.model_copy(update={"device": device}),
        }
        if stage != 3:
            changes |= {key: ZeroConfig.model_fields[key].default for key in STAGE_3_KEYS}
        zero = zero.model_copy(update=changes)
        return variant.of(self.config.model_copy(update={"zero_optimization": zero}))

    def config_of(self, choice: Choice) -> Config:
        return self._changed(variant_of(choice), choice.stage, choice.device)

    def forecast_of(self, choice: Choice) -> Forecast:
        return self._forecast(variant_of(choice), choice.stage, choice.device)

    def _forecast(self, variant: Variant, stage: int, device: str) -> Forecast:
        """Return the forecast of a stage with optimizer state and gradients on a device."""
        config = self._changed(variant, stage, device)
        micro_steps = config.gradient_accumulation_steps
        how = (config.is_vertical, config.has_inputs_on_host, variant.placement)
        key = (stage, device, micro_steps, *how)
        if key not in self._forecasts:
            found = Forecast(self._drawn, config, self._footprints, self.links, self._buffer_bytes)
            self._forecasts[key] = found
        return self._forecasts[key]

    def trace(self, micro_batch: int) -> Trace | None:
        """Return the trace of a micro-batch of this size, None without inputs."""
        if self._inputs is None:
            return None
        if micro_batch not in self._traces:

            def resize(value: Any) -> Any:
                if micro_batch == self.given.micro_batch or not self._has_rows(value):
                    return value
                shape = (micro_batch, *value.shape[1:])
                return torch.empty(shape, dtype=value.dtype, device="meta")

            units = [(name, module) for name, module, _ in self._drawn.found.units]
            inputs = pytree.tree_map(resize, self._inputs)
            self._traces[micro_batch] = trace_step(self._drawn.module, self.config, inputs, units)
        return self._traces[micro_batch]

    def _has_rows(self, value: Any) -> bool:
        """Whether ``value`` is a tensor with a row for each sample of the given micro-batch."""
        size = self.given.micro_batch
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size

    def variants(self, *, are_larger: bool = False) -> list[Variant]:
        """Return the configuration's variant, then others, the smaller change before the larger.

        They have smaller micro-batches, and activations kept and recomputed. ``are_larger``: those
        with larger micro-batches alone, the smallest first.
        """
        given = self.given
        sizes = [] if are_larger else [given.micro_batch]
        if any(map(self._has_rows, pytree.tree_leaves(self._inputs))):
            samples = given.micro_batch * self.config.gradient_accumulation_steps
            tried = range(given.micro_batch + 1, samples + 1)
            if not are_larger:
                tried = range(given.micro_batch - 1, 0, -1)
            sizes += [n for n in tried if samples % n == 0][: MOST_MICRO_BATCHES - 1]
        can_change = self._inputs is not None and any(u.index for u in self.layout.units)
        again = [given.is_recomputed, *([not given.is_recomputed] if can_change else [])]
        return [Variant(size, is_again) for size in sizes for is_again in again]

    # --------------------------------------------------------------- choices

    def plan(self, *, allow_rounding: bool) -> Plan:
        """Return the plan. ``allow_rounding``: see `zero_core.plan`."""
        choices = [self.configured, *self.choices(self.given)]
        variants = self.variants()
        rounded = list(self.rounded_choices())
        best = self.configured if self.configured.is_fitting else self._smallest(choices)
        for variant in [*variants[1:], *self.placed(variants)]:
            if best is not None:
                break
            further = list(self.choices(variant))
            choices += further
            best = self._smallest(further)
        if best is None and allow_rounding:
            best = self._smallest(rounded)
        choices += rounded
        return self.describe(choices, best, self.advice(best, choices))

    def describe(self, choices: Sequence[Choice], best: Choice | None, advice: str) -> Plan:
        layout, machine, config = self.layout, self.machine, self.config
        forecast = self.forecast_of(self.configured)
        link_bytes = forecast.host_link_bytes(self._ratio) if machine.is_accelerated else (0, 0)
        by_key = {choice.key: choice for choice in reversed(choices)}
        return Plan(
            world_size=machine.world_size,
            ranks_per_node=machine.ranks_per_node,
            num_parameters=sum(p.numel for p in layout.params),
            num_trainable=sum(p.numel for p in layout.params if p.is_trainable),
            configured=self.configured,
            memory=self._memory(self.given, forecast, self._ratio),
            traffic=step_traffic(layout, config, self.links, forecast.collectives, link_bytes),
            traffic_choices=traffic_choices(layout, config, self.links),
            choices=tuple(by_key[key] for key in sorted(by_key)),
            best=best,
            advice=advice,
            device_memory=machine.device_memory,
            host_memory=machine.host_memory,
            async_save_bytes=forecast.async_save_bytes,
            missing=tuple(self._footprints.missing.values()),
        )

    def choices(self, variant: Variant, ratios: Sequence[float] = ()) -> Iterator[Choice]:
        """Yield each stage with no offload, all, the least that fits, and further ``ratios``."""
        can_offload, placement = self._can_offload(), variant.placement
        is_divisible = can_offload and self._drawn.updates_slices
        whole = [] if placement.needs_offload else [0.0]
        whole += [1.0] if can_offload else []
        found: list[Choice] = []
        for stage in [3] if placement.needs_stage_3 else self._stages:
            # Moving state from host memory to host memory saves nothing.
            if is_divisible and self.machine.is_accelerated:
                found.append(self._least_offload(variant, stage))
            tried = [*whole, *(ratios if is_divisible else ())]
            found += [self.choice(variant, stage, ratio) for ratio in tried]
        for choice in found:
            is_told = choice.ratio > 0 or not placement.needs_offload
            if is_told and self.forecast_of(choice).is_complete:
                yield choice

    def placed(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return the variants with each other placement, the smaller change before the larger."""
        zero, machine = self.config.zero_optimization, self.machine
        path = machine.nvme_path if self._drawn.updates_slices else None
        found = placements(zero, path, is_accelerated=machine.is_accelerated)
        served = [placement for placement in found if self.is_served(placement)]
        return [replace(variant, placement=p) for p in served for variant in variants]

    def rounded_choices(self) -> Iterator[Choice]:
        """Yield the configured variant with moments of fewer bits on the host."""
        is_adam = isinstance(self._drawn.optimizer, torch.optim.Adam | torch.optim.AdamW)
        is_amsgrad = any(group.get("amsgrad") for group in self._drawn.groups)
        if not is_adam or is_amsgrad or not has_kernel_rule(self.config, self._drawn.given):
            return
        for placement in roundings(self.config.zero_optimization):
            if self.is_served(placement):
                yield from self.choices(replace(self.given, placement=placement))

    def is_served(self, placement: Placement) -> bool:
        """Whether the engine and its packages accept a configuration with this placement."""
        stage = 3 if placement.needs_stage_3 else self._stage
        variant, device = replace(self.given, placement=placement), self._offloaded
        try:
            check_rules(self._changed(variant, stage, device), self.machine.world_size)
            self._forecast(variant, stage, placement.device or device)
        except ConfigError:
            return False
        return True

    def _smallest(self, choices: Sequence[Choice]) -> Choice | None:
        allowed = [c for c in choices if c.is_fitting and c.stage >= self._stage]
        return min(allowed, key=lambda c: (c.ratio, c.stage), default=None)

    def _can_offload(self) -> bool:
        """Whether an installed package can hold the optimizer's state on the host."""
        try:
            forecast = self._forecast(self.given, self._stage, self._offloaded)
        except ConfigError:  # raised for the configuration itself before
            return False
        return forecast.tier is not None

    def _memory(self, variant: Variant, forecast: Forecast, ratio: float) -> MemoryUse:
        use, trace = forecast.memory(ratio), self.trace(variant.micro_batch)
        if trace is None:
            return use
        config = variant.of(self.config)
        is_accelerated = self.machine.is_accelerated
        traced = {"activations": trace.nbytes(config, is_accelerated=is_accelerated)}
        if not is_accelerated and (code := trace.code_bytes()):
            traced["kernels"] = code
        host = dict(use.host)
        if moved := trace.host_bytes(config, is_accelerated=is_accelerated):
            host["activations"] = moved
        return MemoryUse({**use.device, **traced}, host)

    def choice(self, variant: Variant, stage: int, ratio: float) -> Choice:
        device = variant.placement.device or self._offloaded if ratio else "none"
        if variant.placement.device is None and (stage, ratio) == (self._stage, self._ratio):
            device = self._device
        forecast = self._forecast(variant, stage, device)
        use = self._memory(variant, forecast, ratio)
        return Choice(
            stage,
            ratio,
            use.device_bytes,
            use.host_bytes,
            forecast.is_complete and self.machine.has_room(use),
            device=device,
            micro_batch=variant.micro_batch,
            micro_steps=variant.of(self.config).gradient_accumulation_steps,
            is_recomputed=variant.is_recomputed,
            is_varied=variant != self.given,
            placement=variant.placement,
            file_bytes=forecast.bytes_in_file(ratio),
        )

    def _least_offload(self, variant: Variant, stage: int) -> Choice:
        """Return the smallest ratio, in hundredths, with which ``stage`` fits the device."""
        limit = self.machine.device_memory

        def is_enough(percent: int) -> bool:  # device bytes fall as the ratio grows
            found = self.choice(variant, stage, percent / PERCENT)
            return limit is None or found.device_bytes <= limit

        percent = bisect_left(range(PERCENT), True, key=is_enough)
        return self.choice(variant, stage, percent / PERCENT)

    def advice(self, best: Choice | None, choices: Sequence[Choice]) -> str:
        """Return in one sentence whether the configuration fits, and what does otherwise."""
        limits, configured = self.machine.limits, self.configured
        if not limits:
            return f"{configured} takes {configured.needs}; no memory was given to fit it into"
        if configured.is_fitting:
            return f"{configured} fits {limits} as configured: {configured.needs}"
        if best is not None:
            change = str(best).replace("stage", "Stage")
            return (
                f"{configured} does not fit {limits}: {configured.needs}. "
                f"{change} fits: {best.needs}"
            )
        smallest = min(choices, key=lambda c: (c.device_bytes, c.host_bytes))
        said = (
            f"nothing fits {limits}: {configured} takes {configured.needs}; the least device "
            f"memory of any choice is {smallest.needs} ({smallest}). Use more ranks, a smaller "
            "micro-batch or activation checkpointing"
        )
        rounded = next((choice for choice in choices if choice.is_fitting), None)
        if self.machine.nvme_path is None:
            said += "; or name a folder on an NVMe disk (nvme_path)"
        if rounded is not None:
            said += f"; or allow rounding: {rounded} fits, with {rounded.needs}"
        return said


def variant_of(choice: Choice) -> Variant:
    return Variant(choice.micro_batch, choice.is_recomputed, choice.placement)


def ranks_of_node(world_size: int, ranks_per_node: int | None) -> int:
    """Return the ranks of one node, `GPUS_PER_NODE` or all if they are fewer unless given."""
    return min(world_size, GPUS_PER_NODE) if ranks_per_node is None else ranks_per_node
