"""Choices of a plan: configurations of the same run, their bytes and times, and the best of them.

[Note: choices]
A choice is a stage, a ratio and a variant. The **ratio** is the share of the optimizer state that
the host holds and updates (`zero_optimization.offload_optimizer.ratio`; 0 is no offload). A
**variant** has another micro-batch with as many samples in a step, recomputes activations, has
another placement (`zero_core.plan.choices`), or quantizes what ranks of several nodes exchange.
Quantizing, and moments of fewer bits, change numbers: such choices are shown, and may be the best
one only if rounding is allowed.

Without times the best choice is the smallest change that fits: raising the stage comes before
moving optimizer state to the host, and of two stages the one that needs less of it there; a stage
is never lowered. If no stage fits, activations are recomputed, then the micro-batch is halved; if
nothing fits so either, parameters go to the host, then states to NVMe.

With times it is one whose seconds per sample are within `WORTH` of the least: the configuration
itself, or else the one whose placement has the fewest other keys, then the one with the smallest
ratio, then the one with the least device memory. Predictions are not so exact that a smaller
difference would mean anything. Other placements are tried with the configured variant and the best
one, other schedules with the `NUM_LEADERS` fastest; with all variants only where nothing fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from zero_core._torch import pytree
from zero_core.blueprint import Blueprint
from zero_core.comm.meter import Links
from zero_core.config import ActivationCheckpointingConfig, Config, OffloadParamConfig
from zero_core.config.rules import check_rules
from zero_core.errors import ConfigError
from zero_core.optim.factory import has_kernel_rule
from zero_core.plan.activations import Trace, trace_step
from zero_core.plan.choices import (
    AS_CONFIGURED,
    Placement,
    placements,
    roundings,
    schedules,
    traffic_choices,
)
from zero_core.plan.footprints import Footprints
from zero_core.plan.forecast import Forecast, MemoryUse
from zero_core.plan.prediction import Prediction
from zero_core.plan.rates import Rates
from zero_core.plan.result import Choice, Plan, format_bytes
from zero_core.plan.step_time import StepTime
from zero_core.plan.traffic import step_traffic

PERCENT = 100
WORTH = 0.02
"""Share of the time that a change must save. See [Note: choices]."""
MOST_MICRO_BATCHES = 6
RATIOS = (0.25, 0.5, 0.75)
"""Tried besides 0, 1 and the least that fits, where times are known."""
NUM_LEADERS = 3
"""Fastest choices with offload whose schedule is varied."""
DISK_RATES = ("file.read", "file.write")
_QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@dataclass(frozen=True)
class Machine:
    """Machine that the run must fit, and its speeds if they are known."""

    world_size: int
    ranks_per_node: int
    device_memory: int | None
    host_memory: int | None
    device_type: str
    rates: Rates | None = None
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
        if self.rates is not None and self.is_accelerated != (self.rates.cores is None):
            raise ConfigError(
                f"device_type = {self.device_type!r} with a calibration of "
                f"{'a CPU' if self.rates.cores else 'an accelerator'}: give one of this kind"
            )
        if self.nvme_path is not None and self.rates is not None:
            missing = [name for name in DISK_RATES if name not in self.rates.curves]
            if missing:
                raise ConfigError(
                    f"nvme_path = {self.nvme_path!r} with a calibration without rates of a disk: "
                    "measure it with zero-engine doctor --measure --disk FOLDER, or plan without "
                    "rates"
                )
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
    """Settings that differ between choices besides stage and ratio. See [Note: choices].

    Attributes:
        micro_batch: samples of a rank and micro-step.
        is_recomputed: whether activations are recomputed.
        is_quantized: whether weights and gradients are quantized between ranks.
        placement: of states and parameters.
    """

    micro_batch: int
    is_recomputed: bool
    is_quantized: bool = False
    placement: Placement = AS_CONFIGURED

    def of(self, config: Config) -> Config:
        """Return the configuration changed to this."""
        samples = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        changes: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": samples // self.micro_batch,
        }
        if self.is_recomputed and not config.is_recomputed:
            changes["activation_checkpointing"] = ActivationCheckpointingConfig()
        if not self.is_recomputed:
            changes["activation_checkpointing"] = None
        zero = self.placement.of(config.zero_optimization)
        if self.is_quantized and zero.quantized_key is None:
            weights = {"zero_quantized_weights": zero.stage == 3}
            zero = zero.model_copy(update={**_QUANTIZED, **weights})
        changes["zero_optimization"] = zero
        return config.model_copy(update=changes)


class Planner:
    """Forecasts of all choices, and the best of them. See [Note: choices]."""

    def __init__(
        self,
        drawn: Blueprint,
        config: Config,
        machine: Machine,
        buffer_bytes: int,
        inputs: Mapping[str, Any] | Sequence[Any] | None,
    ) -> None:
        self._drawn = drawn
        self._config = config
        self._machine = machine
        self._other = {"model buffers": buffer_bytes}
        self._inputs = inputs
        self._stage = config.zero_optimization.stage
        self._stages = range(4) if machine.world_size > 1 else [self._stage]
        self._device = config.zero_optimization.offload_optimizer.device
        self._offloaded = "cpu" if self._device == "none" else self._device
        self._footprints = Footprints()
        self._links = Links(
            machine.world_size,
            machine.ranks_per_node,
            machine.is_accelerated,
            config.world_size_invariant,
        )
        self._forecasts: dict[tuple[Any, ...], Forecast] = {}
        self._predictions: dict[tuple[Any, ...], Prediction] = {}
        self._traces: dict[int, Trace] = {}
        micro_batch = config.train_micro_batch_size_per_gpu
        self._given = Variant(micro_batch, config.is_recomputed)
        self._ratio = self._planned_ratio()

    def _planned_ratio(self) -> float:
        """Return the share of the optimizer state that the configuration gives to the host."""
        offload, layout = self._config.zero_optimization.offload_optimizer, self._drawn.layout
        if offload.device == "none":
            return 0.0
        tier = self._forecast(self._given, self._stage, self._device).tier
        if tier is None:
            return 1.0 if offload.ratio is None or offload.ratio == "auto" else offload.ratio
        return tier.planned_ratio([(p.name, p.numel) for p in layout.params if p.is_trainable])

    # ------------------------------------------------------------- forecasts

    def _changed(self, variant: Variant, stage: int, device: str) -> Config:
        return variant.of(_with_choice(self._config, stage, device))

    def _forecast(self, variant: Variant, stage: int, device: str) -> Forecast:
        """Return the forecast of a stage with the optimizer state on a device.

        Gradients go to the host with it.
        """
        config = self._changed(variant, stage, device)
        micro_steps = config.gradient_accumulation_steps
        how = (micro_steps, config.is_vertical, variant.is_quantized, variant.placement)
        key = (stage, device, *how)
        if key not in self._forecasts:
            self._forecasts[key] = Forecast(
                self._drawn,
                config,
                self._footprints,
                is_accelerated=self._machine.is_accelerated,
                ranks_per_node=self._machine.ranks_per_node,
                other_bytes=self._other,
            )
        return self._forecasts[key]

    def _trace(self, micro_batch: int) -> Trace | None:
        if self._inputs is None:
            return None
        if micro_batch not in self._traces:
            units = [(name, module) for name, module, _ in self._drawn.found.units]
            inputs = self._resized(micro_batch)
            self._traces[micro_batch] = trace_step(self._drawn.module, self._config, inputs, units)
        return self._traces[micro_batch]

    def _resized(self, micro_batch: int) -> Any:
        """Return the inputs of a micro-batch of another size."""
        given = self._given.micro_batch

        def resize(value: Any) -> Any:
            if micro_batch == given or not _has_rows(value, given):
                return value
            return torch.empty((micro_batch, *value.shape[1:]), dtype=value.dtype, device="meta")

        return pytree.tree_map(resize, self._inputs)

    def _variants(self) -> list[Variant]:
        """Return all variants, the configuration's first, the smaller change before the larger."""
        given = self._given
        if self._inputs is None:
            return [given]
        sizes = [given.micro_batch]
        if any(_has_rows(value, given.micro_batch) for value in pytree.tree_leaves(self._inputs)):
            samples = given.micro_batch * self._config.gradient_accumulation_steps
            divisors = [n for n in range(1, samples + 1) if samples % n == 0]
            smaller = [n for n in reversed(divisors) if n < given.micro_batch]
            larger = [n for n in divisors if n > given.micro_batch]
            if self._machine.rates is None:
                larger = []
            sizes += [*smaller[: MOST_MICRO_BATCHES - 1], *larger[: MOST_MICRO_BATCHES - 1]]
        has_blocks = any(unit.index for unit in self._drawn.layout.units)
        again = [given.is_recomputed, *([not given.is_recomputed] if has_blocks else [])]
        return [Variant(size, is_again) for size in sizes for is_again in again]

    # --------------------------------------------------------------- choices

    def make(self, *, allow_rounding: bool) -> Plan:
        """Return the plan. ``allow_rounding``: see `zero_core.plan`."""
        layout, machine, config = self._drawn.layout, self._machine, self._config
        forecast = self._forecast(self._given, self._stage, self._device)
        configured = self._choice(self._given, self._stage, self._ratio)
        choices = [configured, *self._choices(self._given)]
        variants = self._variants()
        rounded = list(self._rounded_choices())
        if machine.rates is None:
            best = configured if configured.is_fitting else self._smallest(choices)
            for variant in [*variants[1:], *self._placed(variants)]:
                if best is not None:
                    break
                further = list(self._choices(variant))
                choices += further
                best = self._smallest(further)
            if best is None and allow_rounding:
                best = self._smallest(rounded)
            choices += rounded
        else:
            choices += [choice for variant in variants[1:] for choice in self._choices(variant)]
            choices += [*self._quantized_choices(), *rounded]
            choices += self._placed_choices(configured, choices, variants)
            choices += self._scheduled_choices(configured, choices)
            best = _fastest(configured, choices, allow_rounding=allow_rounding)
        link_bytes = forecast.host_link_bytes(self._ratio) if machine.is_accelerated else (0, 0)
        by_key = {choice.key: choice for choice in reversed(choices)}
        traffic = step_traffic(layout, config, self._links, forecast.collectives, link_bytes)
        return Plan(
            world_size=machine.world_size,
            ranks_per_node=machine.ranks_per_node,
            num_parameters=sum(p.numel for p in layout.params),
            num_trainable=sum(p.numel for p in layout.params if p.is_trainable),
            configured=configured,
            memory=self._memory(self._given, forecast, self._ratio),
            traffic=traffic,
            traffic_choices=traffic_choices(layout, config, self._links),
            choices=tuple(by_key[key] for key in sorted(by_key)),
            best=best,
            advice=self._advice(configured, best, choices),
            device_memory=machine.device_memory,
            host_memory=machine.host_memory,
            async_save_bytes=forecast.async_save_bytes,
            missing=tuple(self._footprints.missing.values()),
            reasons=tuple(reasons(configured, best, choices)),
        )

    def _choices(self, variant: Variant) -> Iterator[Choice]:
        """Yield the choices of a variant: each stage with no offload, all, and shares between."""
        can_offload, placement = self._can_offload(), variant.placement
        is_divisible = can_offload and self._drawn.updates_slices
        found: list[Choice] = []
        for stage in [3] if placement.needs_stage_3 else self._stages:
            ratios = [] if placement.needs_offload else [0.0]
            ratios += [1.0] if can_offload else []
            # Moving state from host memory to host memory saves nothing.
            if is_divisible and self._machine.is_accelerated:
                found.append(self._least_offload(variant, stage))
            if is_divisible and self._machine.rates is not None and placement == AS_CONFIGURED:
                ratios += RATIOS
            found += [self._choice(variant, stage, ratio) for ratio in ratios]
        for choice in found:
            is_told = choice.ratio > 0 or not placement.needs_offload
            if is_told and self._forecast_of(variant, choice.stage, choice.ratio).is_complete:
                yield choice

    def _placed(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return the variants with each other placement, the smaller change before the larger."""
        zero, machine = self._config.zero_optimization, self._machine
        path = machine.nvme_path if self._drawn.updates_slices else None
        found = placements(zero, path, is_accelerated=machine.is_accelerated)
        served = [placement for placement in found if self._is_served(placement)]
        return [replace(variant, placement=p) for p in served for variant in variants]

    def _placed_choices(
        self, configured: Choice, choices: Sequence[Choice], variants: Sequence[Variant]
    ) -> list[Choice]:
        """Return choices of other placements, of all variants only where nothing else fits."""
        best = _fastest(configured, choices, allow_rounding=False)
        if best is not None:
            variants = list(dict.fromkeys([self._given, _variant_of(best)]))
        found: list[Choice] = []
        for _, group in groupby(self._placed(variants), key=lambda v: v.placement):
            found += [choice for variant in group for choice in self._choices(variant)]
            if best is None and any(choice.is_fitting for choice in found):
                break
        return found

    def _scheduled_choices(self, configured: Choice, choices: Sequence[Choice]) -> Iterator[Choice]:
        """Yield the fastest choices with offload, and the configured one, on other schedules."""
        fitting = [c for c in choices if c.is_fitting and not c.is_rounded]
        leaders = sorted(fitting, key=lambda c: c.sample_s)
        leaders = [c for c in leaders if c.ratio > 0][:NUM_LEADERS]
        for leader in [configured, *(c for c in leaders if c.key != configured.key)]:
            variant = _variant_of(leader)
            config = self._changed(variant, leader.stage, leader.device)
            for schedule in schedules(config, leader.ratio) if leader.ratio else ():
                placement = variant.placement.joined(schedule)
                if self._is_served(placement):
                    other = replace(variant, placement=placement)
                    yield self._choice(other, leader.stage, leader.ratio)

    def _rounded_choices(self) -> Iterator[Choice]:
        """Yield the configured variant with moments of fewer bits on the host."""
        is_adam = isinstance(self._drawn.optimizer, torch.optim.Adam | torch.optim.AdamW)
        is_amsgrad = any(group.get("amsgrad") for group in self._drawn.groups)
        if not is_adam or is_amsgrad or not has_kernel_rule(self._config, self._drawn.given):
            return
        for placement in roundings(self._config.zero_optimization):
            if self._is_served(placement):
                yield from self._choices(replace(self._given, placement=placement))

    def _is_served(self, placement: Placement) -> bool:
        """Whether the engine and its packages accept a configuration with this placement."""
        stage = 3 if placement.needs_stage_3 else self._stage
        variant, device = replace(self._given, placement=placement), self._offloaded
        try:
            check_rules(self._changed(variant, stage, device), self._machine.world_size)
            self._forecast(variant, stage, placement.device or device)
        except ConfigError:
            return False
        return True

    def _quantized_choices(self) -> Iterator[Choice]:
        """Yield the configured variant with quantized communication, between nodes."""
        if self._links.num_nodes > 1 and self._config.zero_optimization.quantized_key is None:
            given = self._given
            variant = Variant(given.micro_batch, given.is_recomputed, is_quantized=True)
            for stage in (2, 3):
                forecast = self._forecast_of(variant, stage, self._ratio)
                if forecast.is_complete:
                    yield self._choice(variant, stage, self._ratio)

    def _smallest(self, choices: Sequence[Choice]) -> Choice | None:
        allowed = [c for c in choices if c.is_fitting and c.stage >= self._stage]
        return min(allowed, key=lambda c: (c.ratio, c.stage), default=None)

    def _can_offload(self) -> bool:
        """Whether an installed package can hold the optimizer's state on the host."""
        try:
            forecast = self._forecast(self._given, self._stage, self._offloaded)
        except ConfigError:  # raised for the configuration itself before
            return False
        return forecast.tier is not None

    def _forecast_of(self, variant: Variant, stage: int, ratio: float) -> Forecast:
        return self._forecast(variant, stage, self._device_of(variant, stage, ratio))

    def _device_of(self, variant: Variant, stage: int, ratio: float) -> str:
        if variant.placement.device is not None:
            return variant.placement.device if ratio else "none"
        if (stage, ratio) == (self._stage, self._ratio):
            return self._device
        return self._offloaded if ratio else "none"

    def _memory(self, variant: Variant, forecast: Forecast, ratio: float) -> MemoryUse:
        use, trace = forecast.memory(ratio), self._trace(variant.micro_batch)
        if trace is None:
            return use
        config = variant.of(self._config)
        is_accelerated = self._machine.is_accelerated
        traced = {"activations": trace.nbytes(config, is_accelerated=is_accelerated)}
        if not is_accelerated and (code := trace.code_bytes()):
            traced["kernels"] = code
        host = dict(use.host)
        if moved := trace.host_bytes(config, is_accelerated=is_accelerated):
            host["activations"] = moved
        return MemoryUse({**use.device, **traced}, host)

    def _choice(self, variant: Variant, stage: int, ratio: float) -> Choice:
        forecast = self._forecast_of(variant, stage, ratio)
        use = self._memory(variant, forecast, ratio)
        is_fitting = forecast.is_complete and self._machine.has_room(use)
        # Other variants that do not fit are not simulated: a plan stays a matter of seconds.
        is_timed = forecast.is_complete and (is_fitting or variant == self._given)
        return Choice(
            stage,
            ratio,
            use.device_bytes,
            use.host_bytes,
            is_fitting,
            device=self._device_of(variant, stage, ratio),
            micro_batch=variant.micro_batch,
            micro_steps=variant.of(self._config).gradient_accumulation_steps,
            is_recomputed=variant.is_recomputed,
            is_quantized=variant.is_quantized,
            is_varied=variant != self._given,
            placement=variant.placement,
            file_bytes=forecast.bytes_in_file(ratio),
            step_time=self._step_time(variant, stage, ratio) if is_timed else None,
        )

    def _step_time(self, variant: Variant, stage: int, ratio: float) -> StepTime | None:
        rates, trace = self._machine.rates, self._trace(variant.micro_batch)
        if rates is None or trace is None:
            return None
        key = (variant, stage, self._device_of(variant, stage, ratio))
        if key not in self._predictions:
            self._predictions[key] = Prediction(
                self._drawn.layout,
                self._changed(variant, stage, key[2]),
                self._forecast(variant, stage, key[2]),
                self._links,
                rates,
                trace,
            )
        return self._predictions[key].at(ratio)

    def _least_offload(self, variant: Variant, stage: int) -> Choice:
        """Return the smallest ratio, in hundredths, with which ``stage`` fits the device."""
        limit = self._machine.device_memory

        def is_enough(percent: int) -> bool:  # device bytes fall as the ratio grows
            ratio = percent / PERCENT
            use = self._memory(variant, self._forecast_of(variant, stage, ratio), ratio)
            return limit is None or use.device_bytes <= limit

        percent = bisect_left(range(PERCENT), True, key=is_enough)
        return self._choice(variant, stage, percent / PERCENT)

    def _advice(self, configured: Choice, best: Choice | None, choices: Sequence[Choice]) -> str:
        limits = self._machine.limits
        if not limits and self._machine.rates is None:
            return f"{configured} takes {_needs(configured)}; no memory was given to fit it into"
        if best is configured:
            fits = f"fits {limits} as configured" if limits else "takes, as configured"
            return f"{configured} {fits}: {_needs(best)}"
        if best is not None:
            change = str(best).replace("stage", "Stage")
            if configured.is_fitting:
                return (
                    f"{configured} takes {_needs(configured)}. {change} is faster: {_needs(best)}"
                )
            return (
                f"{configured} does not fit {limits}: {_needs(configured)}. "
                f"{change} fits: {_needs(best)}"
            )
        smallest = min(choices, key=lambda c: (c.device_bytes, c.host_bytes))
        said = (
            f"nothing fits {limits}: {configured} takes {_needs(configured)}; the least device "
            f"memory of any choice is {_needs(smallest)} ({smallest}). Use more ranks, a smaller "
            "micro-batch or activation checkpointing"
        )
        rounded = next((choice for choice in choices if choice.is_fitting), None)
        if self._machine.nvme_path is None:
            said += "; or name a folder on an NVMe disk (nvme_path)"
        if rounded is not None:
            said += f"; or allow rounding: {rounded} fits, with {_needs(rounded)}"
        return said


def _has_rows(value: Any, number: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == number


def _fastest(
    configured: Choice, choices: Sequence[Choice], *, allow_rounding: bool
) -> Choice | None:
    """Return the best choice by time of those that fit. See [Note: choices]."""
    fitting = [c for c in choices if c.is_fitting and c.step_time is not None]
    allowed = [c for c in fitting if allow_rounding or not c.is_rounded]
    if configured.is_fitting:
        allowed.append(configured)
    least_s = min((c.sample_s for c in allowed), default=0.0)
    close = [c for c in allowed if c.sample_s * (1 - WORTH) <= least_s]
    if configured in close:
        return configured
    return min(
        close,
        key=lambda c: (len(c.placement.settings), c.ratio, c.device_bytes, c.sample_s),
        default=None,
    )


def _variant_of(choice: Choice) -> Variant:
    return Variant(choice.micro_batch, choice.is_recomputed, choice.is_quantized, choice.placement)


def _needs(choice: Choice) -> str:
    device, host = format_bytes(choice.device_bytes), format_bytes(choice.host_bytes)
    found = f"{device} on the device"
    if choice.host_bytes:
        found += f" and {host} on the host per rank"
    if choice.file_bytes:
        found += f", {format_bytes(choice.file_bytes)} on NVMe per rank"
    return found


def reasons(configured: Choice, best: Choice | None, choices: Sequence[Choice]) -> Iterator[str]:
    """Yield why ``best`` is the best, a sentence each. None without times."""
    before = configured.step_time
    if before is None:
        return
    yield (
        f"{configured.whole}: {before.total_s:.3g} s per step predicted, "
        f"{1 / before.sample_s:.3g} samples/s. {_bound(before)}"
    )
    after = None if best is None else best.step_time
    if best is None or after is None:
        return
    if best is configured:
        yield f"No other choice that fits is more than {WORTH:.0%} faster"
    else:
        gain = 1 - after.sample_s / before.sample_s
        word = "less" if gain >= 0 else "more"
        yield (
            f"{best.whole}: {after.total_s:.3g} s per step, {abs(gain):.0%} {word} per sample. "
            f"{_bound(after)}"
        )
        yield from _differences(configured, best)
    rounded = [c for c in choices if c.is_rounded and c.is_fitting and c.step_time is not None]
    fastest = min(rounded, key=lambda c: c.sample_s, default=None)
    if fastest is not None and not best.is_rounded:
        gain = 1 - fastest.sample_s / best.sample_s
        if gain > WORTH:
            yield (
                f"{fastest.whole} would take {gain:.0%} less, and rounds what it sends or keeps: "
                "it is chosen only if rounding is allowed"
            )


def _bound(time: StepTime) -> str:
    share = time.bound_s / time.total_s
    return f"The lane {time.bound!r} bounds it: busy for {time.bound_s:.3g} s, {share:.0%} of it"


def _differences(before: Choice, after: Choice) -> Iterator[str]:
    """Yield what each change does, by the lanes of both predictions."""
    old, new = before.step_time, after.step_time
    assert old is not None
    assert new is not None

    def lane(name: str) -> str:
        return f"{old.lanes[name]:.3g} s -> {new.lanes[name]:.3g} s"

    if after.stage != before.stage:
        yield (
            f"Stage {after.stage} in place of {before.stage}: gathers take {lane('gather')}, "
            f"reductions {lane('reduce')}"
        )
    if after.micro_batch != before.micro_batch:
        yield (
            f"{after.micro_steps} micro-steps of {after.micro_batch} samples in place of "
            f"{before.micro_steps} of {before.micro_batch}: computation takes {lane('compute')}"
        )
    if after.is_recomputed != before.is_recomputed:
        saved = format_bytes(abs(before.device_bytes - after.device_bytes))
        verb = "Recomputing" if after.is_recomputed else "Keeping"
        yield f"{verb} activations: computation takes {lane('compute')}; {saved} of difference"
    if after.ratio != before.ratio:
        yield (
            f"Ratio {after.ratio:.2f} in place of {before.ratio:.2f}: the host's update takes "
            f"{lane('host')}, computation {lane('compute')}"
        )
    if after.placement != before.placement:
        words = after.placement.words
        yield (
            f"{words[:1].upper()}{words[1:]}: copies take {lane('copies')}, the host's update "
            f"{lane('host')}, files {lane('file')}"
        )
    if after.is_quantized and not before.is_quantized:
        yield (
            f"Quantized weights and gradients: gathers take {lane('gather')}, reductions "
            f"{lane('reduce')}"
        )


def _with_choice(config: Config, stage: int, device: str) -> Config:
    """Return the configuration at another stage and with the optimizer state on ``device``.

    Keys that the stage does not serve are dropped.
    """
    zero = config.zero_optimization
    changes: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": zero.offload_optimizer.model_copy(update={"device": device}),
    }
    if stage != 3:
        changes |= {
            "offload_param": OffloadParamConfig(),
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_hpz_partition_size": 1,
        }
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=changes)})
