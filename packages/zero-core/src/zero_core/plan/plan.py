"""Memory and traffic of a run before anything is allocated, and the smallest change that fits.

    plan = zero_core.plan(model_on_meta, "zero.json", 64, device_memory=24 * 10**9)
    print(plan.advice)   # "does not fit as configured ...; stage 3 with ratio 0.37 fits"

[Note: choices]
A choice is a stage and a ratio: the share of the optimizer state that the host holds and updates
(`zero_optimization.offload_optimizer.ratio`; 0 is no offload). A change is small if the step stays
fast: raising the stage comes before moving optimizer state to the host, and of two stages the one
that needs less of it there; a stage is never lowered.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zero_core.blueprint import Blueprint
from zero_core.comm.meter import Links
from zero_core.config import Config, OffloadParamConfig, load_config
from zero_core.errors import ConfigError, MissingPartError
from zero_core.plan.activations import trace_activations
from zero_core.plan.choices import traffic_choices
from zero_core.plan.footprints import Footprints
from zero_core.plan.forecast import Forecast, MemoryUse, buffer_bytes
from zero_core.plan.result import Choice, Plan, format_bytes
from zero_core.plan.traffic import step_traffic

GPUS_PER_NODE = 8
"""Ranks per node unless they are given."""
PERCENT = 100


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
) -> Plan:
    """Compute the memory and traffic of `build` and a training step. Nothing is allocated.

    Bytes of long-lived memory are exact: they come from the code that allocates it. Not counted are
    temporaries within an operation or an optimizer's step, and what torch, the
    communication library and the allocator keep for themselves. Of Muon's step neither the memory
    nor the traffic of its gather of momenta is counted. What a package that is not installed would
    keep and send is not counted either: ``missing`` of the result names it.

    Args:
        model: a module on any device, best on the meta device; or a Hugging Face configuration
            (an object, or what its ``config.json`` holds), of which the model is made there.
        config: the engine's configuration, or the path of its JSON file.
        world_size: number of data-parallel ranks.
        device_memory: bytes of one rank's device; None does not limit it.
        host_memory: bytes of one node's memory, shared by its ranks; None does not limit it.
        ranks_per_node: ranks of one node; 8 unless given, or all if they are fewer.
        example_inputs: arguments of one micro-batch's forward, on any device; with them, the
            activations that autograd saves are counted.
        device_type: "accelerator", or "cpu" where parameters are in host memory too: the sum
            of both is then held against ``host_memory``.

    Raises:
        ConfigError: an argument or the configuration is wrong, or does not fit the model.
        MissingPartError: a Hugging Face configuration without transformers.
    """
    per_node = min(world_size, GPUS_PER_NODE) if ranks_per_node is None else ranks_per_node
    machine = _Machine(world_size, per_node, device_memory, host_memory, device_type)
    resolved = load_config(config, world_size=world_size).on_nodes(per_node, world_size)
    module = model if isinstance(model, nn.Module) else _model_of(model)
    other = {"model buffers": buffer_bytes(module, resolved)}
    if example_inputs is not None:
        other["activations"] = trace_activations(module, resolved, example_inputs)
    drawn = Blueprint.draw(module, resolved, world_size)
    return _Planner(drawn, resolved, machine, other).make()


@dataclass(frozen=True)
class _Machine:
    """Machine that the run must fit."""

    world_size: int
    ranks_per_node: int
    device_memory: int | None
    host_memory: int | None
    device_type: str

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


class _Planner:
    """Forecasts of every stage, and the choice among them as in [Note: choices]."""

    def __init__(
        self, drawn: Blueprint, config: Config, machine: _Machine, other: Mapping[str, int]
    ) -> None:
        self._drawn = drawn
        self._config = config
        self._machine = machine
        self._other = other
        self._stage = config.zero_optimization.stage
        self._stages = range(4) if machine.world_size > 1 else [self._stage]
        self._device = config.zero_optimization.offload_optimizer.device
        self._offloaded = "cpu" if self._device == "none" else self._device
        self._footprints = Footprints()
        self._forecasts: dict[tuple[int, str], Forecast] = {}
        self._ratio = self._planned_ratio()

    def _planned_ratio(self) -> float:
        """Return the share of the optimizer state that the configuration gives to the host."""
        offload, layout = self._config.zero_optimization.offload_optimizer, self._drawn.layout
        if offload.device == "none":
            return 0.0
        tier = self._forecast(self._stage, self._device).tier
        if tier is None:
            return 1.0 if offload.ratio is None or offload.ratio == "auto" else offload.ratio
        return tier.planned_ratio([(p.name, p.numel) for p in layout.params if p.is_trainable])

    def _forecast(self, stage: int, device: str) -> Forecast:
        """Return the forecast of a stage with the optimizer state on a device.

        Gradients go to the host with it.
        """
        if (stage, device) not in self._forecasts:
            self._forecasts[stage, device] = Forecast(
                self._drawn,
                _with_choice(self._config, stage, device),
                self._footprints,
                is_accelerated=self._machine.is_accelerated,
                ranks_per_node=self._machine.ranks_per_node,
                other_bytes=self._other,
            )
        return self._forecasts[stage, device]

    def make(self) -> Plan:
        layout, machine, config = self._drawn.layout, self._machine, self._config
        forecast = self._forecast(self._stage, self._device)
        configured = self._choice(self._stage, self._ratio)
        can_offload = self._can_offload()
        ends = (0.0, 1.0) if can_offload else (0.0,)
        found = [configured]
        for stage in self._stages:
            found += [self._choice(stage, ratio) for ratio in ends]
            # Moving state from host memory to host memory helps nobody.
            if can_offload and machine.is_accelerated and self._drawn.updates_slices:
                found.append(self._least_offload(stage))
        choices = [
            c for c in found if c == configured or self._forecast_of(c.stage, c.ratio).is_complete
        ]
        allowed = [c for c in choices if c.is_fitting and c.stage >= self._stage]
        smallest_change = min(allowed, key=lambda c: (c.ratio, c.stage), default=None)
        best = configured if configured.is_fitting else smallest_change
        links = Links(
            machine.world_size,
            machine.ranks_per_node,
            machine.is_accelerated,
            config.world_size_invariant,
        )
        link_bytes = forecast.host_link_bytes(self._ratio) if machine.is_accelerated else (0, 0)
        by_key = {(c.stage, c.ratio): c for c in choices}
        return Plan(
            world_size=machine.world_size,
            ranks_per_node=machine.ranks_per_node,
            num_parameters=sum(p.numel for p in layout.params),
            num_trainable=sum(p.numel for p in layout.params if p.is_trainable),
            configured=configured,
            memory=forecast.memory(self._ratio),
            traffic=step_traffic(layout, config, links, forecast.collectives, link_bytes),
            traffic_choices=traffic_choices(layout, config, links, self._footprints),
            choices=tuple(by_key[key] for key in sorted(by_key)),
            best=best,
            advice=self._advice(configured, best, choices),
            device_memory=machine.device_memory,
            host_memory=machine.host_memory,
            async_save_bytes=forecast.async_save_bytes,
            missing=tuple(self._footprints.missing.values()),
        )

    def _can_offload(self) -> bool:
        """Whether an installed package can hold the optimizer's state on the host."""
        try:
            return self._forecast(self._stage, self._offloaded).tier is not None
        except ConfigError:  # raised for the configuration itself before
            return False

    def _forecast_of(self, stage: int, ratio: float) -> Forecast:
        if (stage, ratio) == (self._stage, self._ratio):
            return self._forecast(stage, self._device)
        return self._forecast(stage, self._offloaded if ratio else "none")

    def _choice(self, stage: int, ratio: float) -> Choice:
        forecast = self._forecast_of(stage, ratio)
        use = forecast.memory(ratio)
        is_fitting = forecast.is_complete and self._machine.has_room(use)
        return Choice(stage, ratio, use.device_bytes, use.host_bytes, is_fitting)

    def _least_offload(self, stage: int) -> Choice:
        """Return the smallest ratio, in hundredths, with which ``stage`` fits the device."""
        limit = self._machine.device_memory

        def is_enough(percent: int) -> bool:  # device bytes fall as the ratio grows
            choice = self._choice(stage, percent / PERCENT)
            return limit is None or choice.device_bytes <= limit

        return self._choice(stage, bisect_left(range(PERCENT), True, key=is_enough) / PERCENT)

    def _advice(self, configured: Choice, best: Choice | None, choices: Sequence[Choice]) -> str:
        limits = self._machine.limits
        if not limits:
            return f"{configured} takes {_needs(configured)}; no memory was given to fit it into"
        if best is configured:
            return f"{configured} fits {limits} as configured: {_needs(best)}"
        if best is not None:
            change = str(best).replace("stage", "Stage")
            return (
                f"{configured} does not fit {limits}: {_needs(configured)}. "
                f"{change} fits: {_needs(best)}"
            )
        smallest = min(choices, key=lambda c: (c.device_bytes, c.host_bytes))
        return (
            f"nothing fits {limits}: {configured} takes {_needs(configured)}; the least device "
            f"memory of any choice is {_needs(smallest)} ({smallest}). Use more ranks, a smaller "
            "micro-batch or activation checkpointing"
        )


def _needs(choice: Choice) -> str:
    device, host = format_bytes(choice.device_bytes), format_bytes(choice.host_bytes)
    return f"{device} on the device" + (
        f" and {host} on the host per rank" if choice.host_bytes else ""
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


def _model_of(config: Any) -> nn.Module:
    """Return the causal language model of a Hugging Face configuration, or its bare model."""
    # foreign: a configuration of transformers
    is_config = isinstance(config, Mapping) or hasattr(config, "model_type")
    if not is_config:
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
        is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
        with torch.device("meta"):
            module: nn.Module = kind.from_config(config)
    except Exception as error:  # whatever a model's code makes of values that it does not expect
        cause = " ".join(str(error).split())
        raise ConfigError(f"model: transformers cannot make it: {cause}") from error
    return module.train()
