"""Memory and traffic of a run before anything is allocated, and the smallest change that fits.

    plan = zero_core.plan(model_on_meta, "zero.json", 64, device_memory=24 * 10**9)
    print(plan.advice)   # "stage 1 does not fit ...: ... Stage 3 with ratio 0.37 fits: ..."

[Note: choices]
A choice is a stage, a ratio and a variant. The **ratio** is the share of the optimizer state that
the host holds and updates (`zero_optimization.offload_optimizer.ratio`; 0 is no offload). A
**variant** sets the micro-batch (with the same samples per step), whether activations are
recomputed, and the placement (`zero_core.footprint.result`). Moments of fewer bits change numbers,
so they can be the best choice only if rounding is allowed.

The best choice is the configuration if it fits, or else the smallest ratio that fits at the
configured or a higher stage, at the lowest such stage. If no stage fits, the planner toggles
recomputation, then tries smaller micro-batches, and then other placements.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero_core._torch import pytree
from zero_core.blueprint import Blueprint
from zero_core.comm.meter import Links
from zero_core.config import ActivationCheckpointingConfig, Config, ZeroConfig, load_config
from zero_core.config.rules import check_rules
from zero_core.errors import ConfigError, MissingPartError
from zero_core.footprint.activations import Trace, trace_step
from zero_core.footprint.footprints import Footprints
from zero_core.footprint.forecast import Forecast, MemoryUse, step_traffic, traffic_choices
from zero_core.footprint.result import (
    AS_CONFIGURED,
    STAGE_3_KEYS,
    Choice,
    Placement,
    Plan,
    format_bytes,
)
from zero_core.layout.discovery import compute_dtype
from zero_core.optim.factory import has_kernel_rule

GPUS_PER_NODE = 8
"""Default number of ranks per node."""
PERCENT = 100
MOST_MICRO_BATCHES = 6
MOMENTS = {"bfloat16": "bf16 moments", "int8": "8-bit moments"}
"""Names of placements with Adam's moments in fewer bits, by ``state_dtype``, more bits first."""


def plan(
    model: Any,
    config: Mapping[str, Any] | str | Path,
    world_size: int,
    *,
    device_memory: int | None = None,
    host_memory: int | None = None,
    ranks_per_node: int | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    device_type: Literal["accelerator", "cpu"] = "accelerator",
    allow_rounding: bool = False,
    nvme_path: str | None = None,
) -> Plan:
    """Compute the memory and traffic of `build` and a training step, without allocating it.

    Bytes of parameters, gradients and pools are exact, because the allocating code computes them.
    ``outside`` of the result estimates memory of torch's allocator and of CUDA's libraries. The
    plan does not count temporaries of an operation or an optimizer step, Muon's gather of momenta,
    or the memory of missing packages, which ``missing`` of the result names.

    Args:
        model: a module on any device, best on the meta device; or a Hugging Face configuration (an
            object, or the content of ``config.json``), whose model is then made on the meta device.
        config: the engine's configuration, or the path of its JSON file.
        world_size: number of data-parallel ranks.
        device_memory: bytes of one rank's device. None sets no limit.
        host_memory: bytes of one node's memory, shared by its ranks. None sets no limit.
        ranks_per_node: ranks of one node. Default: 8, or all if there are fewer.
        example_inputs: arguments of one micro-batch's forward, on any device. With them, saved
            activations are counted and other micro-batches are tried: tensors whose first dimension
            is the micro-batch are resized.
        device_type: "accelerator", or "cpu" if parameters are in host memory, too. With "cpu",
            ``host_memory`` limits the sum of device and host bytes.
        allow_rounding: if nothing else fits, choose configurations that change numbers: Adam's
            moments in 16 or 8 bits on the host.
        nvme_path: folder on an NVMe disk for optimizer states. Its free space is not checked.

    Raises:
        ConfigError: an argument or the configuration is wrong, or does not fit the model.
        MissingPartError: ``model`` is a configuration, and transformers is not installed.
    """
    per_node = ranks_of_node(world_size, ranks_per_node)
    machine = Machine(world_size, per_node, device_memory, host_memory, device_type, nvme_path)
    return Planner(model, config, machine, example_inputs).plan(allow_rounding=allow_rounding)


@dataclass(frozen=True)
class Machine:
    """Size of the machine that the run must fit."""

    world_size: int
    ranks_per_node: int
    device_memory: int | None
    host_memory: int | None
    device_type: str
    nvme_path: str | None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size = {self.world_size}: must be at least 1")
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node = {self.ranks_per_node}: must divide world_size = "
                f"{self.world_size}; give the number of ranks that share a node"
            )
        for name in ("device_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or value <= 0):
                raise ConfigError(f"{name} = {value!r}: must be a positive number of bytes")
        if self.device_type not in ("accelerator", "cpu"):
            raise ConfigError(f"device_type = {self.device_type!r}: must be 'accelerator' or 'cpu'")
        if not self.is_accelerated and self.device_memory is not None:
            raise ConfigError("device_memory with device_type 'cpu': give host_memory alone")

    @property
    def is_accelerated(self) -> bool:
        return self.device_type != "cpu"

    @property
    def limits(self) -> str:
        """Description of the given memory, empty without limits."""
        found = []
        if self.device_memory is not None:
            found.append(f"{format_bytes(self.device_memory)} of device memory")
        if self.host_memory is not None:
            memory = format_bytes(self.host_memory)
            found.append(f"{memory} of host memory for {self.ranks_per_node} ranks")
        return " and ".join(found)


@dataclass(frozen=True)
class Variant:
    """Settings of a choice in addition to stage and ratio. See [Note: choices]."""

    micro_batch: int  # samples per rank and micro-step
    is_recomputed: bool  # whether activations are recomputed
    placement: Placement = AS_CONFIGURED  # other keys of ``zero_optimization``


class Planner:
    """Forecasts of choices, and search for the best one. See [Note: choices]."""

    def __init__(
        self,
        model: Any,
        config: Mapping[str, Any] | str | Path,
        machine: Machine,
        inputs: Mapping[str, Any] | Sequence[Any] | None,
    ) -> None:
        world_size, per_node = machine.world_size, machine.ranks_per_node
        resolved = load_config(config, world_size=world_size).on_nodes(per_node, world_size)
        module = model if isinstance(model, nn.Module) else _model_of(model)
        self.config = resolved
        self.machine = machine
        self._drawn = Blueprint.draw(module, resolved, world_size)
        self.layout = self._drawn.layout
        buffers = (b for inner in module.modules() for b in inner.buffers(recurse=False))
        self._buffer_bytes = sum(
            b.numel() * compute_dtype(b, resolved.buffer_dtype).itemsize for b in buffers
        )
        self._inputs = inputs
        zero, offload = resolved.zero_optimization, resolved.zero_optimization.offload_optimizer
        self._stage = zero.stage
        self._device = offload.device
        self._offloaded = "cpu" if self._device == "none" else self._device
        self._footprints = Footprints()
        is_sequential = resolved.world_size_invariant
        self.links = Links(world_size, per_node, machine.is_accelerated, is_sequential)
        self._forecasts: dict[tuple[Any, ...], Forecast] = {}
        self._traces: dict[int, Trace] = {}
        self.given = Variant(resolved.train_micro_batch_size_per_gpu, resolved.is_recomputed)
        offloaded = self._changed(self.given, self._stage, self._offloaded)
        # share of the optimizer state on the host, as configured
        self._ratio = 0.0
        if self._device != "none":
            self._ratio = offload.ratio if isinstance(offload.ratio, float) else 1.0
            if (tier := self._forecast(offloaded, AS_CONFIGURED).tier) is not None:
                trainable = [(p.name, p.numel) for p in self.layout.params if p.is_trainable]
                self._ratio = tier.planned_ratio(trainable)
        self.configured = self.choice(self.given, self._stage, self._ratio)
        # whether an installed package can hold the optimizer's state on the host
        self._can_offload = False
        with suppress(ConfigError):  # errors of the given configuration were raised above
            self._can_offload = self._forecast(offloaded, AS_CONFIGURED).tier is not None

    def _changed(self, variant: Variant, stage: int, device: str) -> Config:
        config, zero = self.config, self.config.zero_optimization
        keys: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": zero.offload_optimizer.model_copy(update={"device": device}),
        }
        if stage != 3:
            keys |= {key: ZeroConfig.model_fields[key].default for key in STAGE_3_KEYS}
        samples = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        changes: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": variant.micro_batch,
            "gradient_accumulation_steps": samples // variant.micro_batch,
            "zero_optimization": variant.placement.of(zero.model_copy(update=keys)),
        }
        if not variant.is_recomputed:
            changes["activation_checkpointing"] = None
        elif not config.is_recomputed:
            changes["activation_checkpointing"] = ActivationCheckpointingConfig()
        return config.model_copy(update=changes)

    def config_of(self, choice: Choice) -> Config:
        return self._changed(variant_of(choice), choice.stage, choice.device)

    def forecast_of(self, choice: Choice) -> Forecast:
        return self._forecast(self.config_of(choice), choice.placement)

    def _forecast(self, config: Config, placement: Placement) -> Forecast:
        """Return the forecast of a configuration. Recomputing activations does not change it."""
        zero, steps = config.zero_optimization, config.gradient_accumulation_steps
        order = (steps, config.is_vertical, config.has_inputs_on_host)
        key = (zero.stage, zero.offload_optimizer.device, *order, placement)
        if key not in self._forecasts:
            found = Forecast(self._drawn, config, self._footprints, self.links, self._buffer_bytes)
            self._forecasts[key] = found
        return self._forecasts[key]

    def trace(self, micro_batch: int) -> Trace | None:
        """Return the trace of a micro-batch of this size, or None without inputs."""
        if self._inputs is None:
            return None
        if micro_batch not in self._traces:

            def resize(value: Any) -> Any:
                if micro_batch == self.given.micro_batch or not self._has_rows(value):
                    return value
                shape = (micro_batch, *value.shape[1:])
                return torch.empty(shape, dtype=value.dtype, device="meta")

            units = [module for _, module, _ in self._drawn.found.units]
            inputs = pytree.tree_map(resize, self._inputs)
            self._traces[micro_batch] = trace_step(self._drawn.module, self.config, inputs, units)
        return self._traces[micro_batch]

    def _has_rows(self, value: Any) -> bool:
        """Whether the first dimension of ``value`` is the given micro-batch."""
        size = self.given.micro_batch
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size

    def variants(self, *, are_larger: bool = False) -> list[Variant]:
        """Return variants with the configured and smaller micro-batches, or with larger ones.

        With example inputs and blocks, also with recomputation toggled. Smaller changes come first.
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

    def plan(self, *, allow_rounding: bool) -> Plan:
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
        memory = self._memory(forecast, config, self._ratio)
        return Plan(
            world_size=machine.world_size,
            ranks_per_node=machine.ranks_per_node,
            num_parameters=sum(p.numel for p in layout.params),
            num_trainable=sum(p.numel for p in layout.params if p.is_trainable),
            configured=self.configured,
            memory=memory,
            traffic=step_traffic(layout, config, self.links, forecast.collectives, link_bytes),
            traffic_choices=traffic_choices(layout, config, self.links),
            choices=tuple(by_key[key] for key in sorted(by_key)),
            best=best,
            advice=advice,
            device_memory=machine.device_memory,
            host_memory=machine.host_memory,
            async_save_bytes=forecast.async_save_bytes,
            outside=forecast.outside_of_tensors(memory) if machine.is_accelerated else {},
            missing=tuple(self._footprints.missing.values()),
        )

    def choices(self, variant: Variant, ratios: Sequence[float] = ()) -> Iterator[Choice]:
        """Yield each stage's choices with no, full and least fitting offload, and ``ratios``."""
        is_divisible = self._can_offload and self._drawn.updates_slices
        needs_offload = variant.placement.changes("offload_optimizer")
        tried = [] if needs_offload else [0.0]
        tried += [1.0] if self._can_offload else []
        tried += ratios if is_divisible else ()
        limit = self.machine.device_memory
        stages = range(4) if self.machine.world_size > 1 else [self._stage]
        for stage in [3] if variant.placement.changes("offload_param") else stages:
            found = [self.choice(variant, stage, ratio) for ratio in tried]
            # If the device is the host, a partial offload saves no memory.
            if is_divisible and self.machine.is_accelerated:

                def is_enough(percent: int, stage: int = stage) -> bool:
                    use = self.choice(variant, stage, percent / PERCENT).device_bytes
                    return limit is None or use <= limit

                # Device bytes fall as the ratio grows.
                percent = bisect_left(range(PERCENT), True, key=is_enough)
                found.insert(0, self.choice(variant, stage, percent / PERCENT))
            for choice in found:
                is_asked = choice.ratio > 0 or not needs_offload
                if is_asked and self.forecast_of(choice).is_complete:
                    yield choice

    def placed(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return ``variants`` with each other served placement, smaller changes first."""
        zero, path = self.config.zero_optimization, self.machine.nvme_path
        params, states = [AS_CONFIGURED], [AS_CONFIGURED]
        block = "offload_param"
        if zero.offload_param.device != "none":
            params.append(Placement("parameters on the device", ((block, "device", "none"),)))
        elif self.machine.is_accelerated:
            params.append(Placement("parameters in host memory", ((block, "device", "cpu"),)))
        block = "offload_optimizer"
        if zero.offload_optimizer.device == "nvme":
            states.append(Placement("states in host memory", ((block, "device", "cpu"),)))
        elif path is not None and self._drawn.updates_slices:
            keys = ((block, "device", "nvme"), (block, "nvme_path", path))
            states.append(Placement("states on NVMe", keys))
        found = [of_states.joined(p) for of_states, p in itertools.product(states, params)][1:]
        served = [placement for placement in found if self.is_served(placement)]
        return [replace(variant, placement=p) for p in served for variant in variants]

    def rounded_choices(self) -> Iterator[Choice]:
        """Yield choices of the configured variant with moments of fewer bits on the host."""
        is_adam = isinstance(self._drawn.optimizer, torch.optim.Adam | torch.optim.AdamW)
        is_amsgrad = any(group.get("amsgrad") for group in self._drawn.groups)
        if not is_adam or is_amsgrad or not has_kernel_rule(self.config, self._drawn.given):
            return
        order = ["float32", *MOMENTS]
        configured = self.config.zero_optimization.offload_optimizer.state_dtype
        for dtype in order[order.index(configured) + 1 :]:
            settings = (("offload_optimizer", "state_dtype", dtype),)
            placement = Placement(MOMENTS[dtype], settings, is_rounding=True)
            if self.is_served(placement):
                yield from self.choices(replace(self.given, placement=placement))

    def is_served(self, placement: Placement) -> bool:
        """Whether the engine and its packages accept a configuration with this placement."""
        stage = 3 if placement.changes("offload_param") else self._stage
        config = self._changed(replace(self.given, placement=placement), stage, self._offloaded)
        try:
            check_rules(config, self.machine.world_size)
            self._forecast(config, placement)
        except ConfigError:
            return False
        return True

    def _smallest(self, choices: Sequence[Choice]) -> Choice | None:
        allowed = [c for c in choices if c.is_fitting and c.stage >= self._stage]
        return min(allowed, key=lambda c: (c.ratio, c.stage), default=None)

    def _memory(self, forecast: Forecast, config: Config, ratio: float) -> MemoryUse:
        use, trace = forecast.memory(ratio), self.trace(config.train_micro_batch_size_per_gpu)
        if trace is None:
            return use
        saved = trace.memory(config, is_accelerated=self.machine.is_accelerated)
        return MemoryUse({**use.device, **saved.device}, {**use.host, **saved.host})

    def choice(self, variant: Variant, stage: int, ratio: float) -> Choice:
        is_given = (stage, ratio) == (self._stage, self._ratio)
        device = self._device if is_given else self._offloaded if ratio else "none"
        config = self._changed(variant, stage, device)
        forecast, machine = self._forecast(config, variant.placement), self.machine
        use = self._memory(forecast, config, ratio)
        # Assume that every rank of a node needs as much as the rank of the forecast.
        on_host = use.host_bytes + (0 if machine.is_accelerated else use.device_bytes)
        of_node = on_host * machine.ranks_per_node
        has_room = machine.device_memory is None or use.device_bytes <= machine.device_memory
        has_room &= machine.host_memory is None or of_node <= machine.host_memory
        return Choice(
            stage,
            ratio,
            use.device_bytes,
            use.host_bytes,
            forecast.is_complete and has_room,
            device=config.zero_optimization.offload_optimizer.device,
            micro_batch=variant.micro_batch,
            micro_steps=config.gradient_accumulation_steps,
            is_recomputed=variant.is_recomputed,
            is_varied=variant != self.given,
            placement=variant.placement,
            file_bytes=0 if forecast.tier is None else forecast.tier.file_bytes(ratio),
        )

    def advice(self, best: Choice | None, choices: Sequence[Choice]) -> str:
        """Return a text that says whether the configuration fits, and if not, which choice does."""
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
    """Return ``ranks_per_node``, by default the smaller of `GPUS_PER_NODE` and ``world_size``."""
    return min(world_size, GPUS_PER_NODE) if ranks_per_node is None else ranks_per_node


def _model_of(config: Any) -> nn.Module:
    # foreign: a configuration of transformers
    if not (isinstance(config, Mapping) or hasattr(config, "model_type")):
        raise ConfigError(
            f"model: expected a torch module or a Hugging Face configuration, found "
            f"{type(config).__name__}"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPartError(
            "a plan from a Hugging Face configuration needs the package transformers, which is "
            "not installed: pip install transformers; or pass the model itself, made within "
            "torch.device('meta')"
        ) from error
    try:
        if isinstance(config, Mapping):
            config = transformers.AutoConfig.for_model(**config)
        else:
            config = copy.deepcopy(config)
        is_seq2seq = config.is_encoder_decoder and (
            type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        )
        kind = transformers.AutoModel
        if is_seq2seq:
            kind = transformers.AutoModelForSeq2SeqLM
        elif type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = transformers.AutoModelForCausalLM
        # Encoder-decoders need pad_token_id to shift labels. Other models would search their inputs
        # for padding, which the meta device cannot do.
        if not is_seq2seq:
            config.pad_token_id = None
        with torch.device("meta"):
            module: nn.Module = kind.from_config(config)
    except Exception as error:  # any error of the model's code for unexpected values
        cause = " ".join(str(error).split())
        raise ConfigError(f"model: transformers cannot make it: {cause}") from error
    return module.train()
