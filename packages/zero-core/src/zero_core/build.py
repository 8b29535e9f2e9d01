"""Compose an engine: find the units, lay them out, allocate once, adopt the model's parameters."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from zero_core.arena import Arena, BufferPool
from zero_core.buffers import adopt_buffers
from zero_core.collectives import ControlGroup, NativeCollectives
from zero_core.config import DTYPES, Config, load_config
from zero_core.discovery import Discovered, compute_dtype, discover
from zero_core.engine import Engine
from zero_core.errors import ConfigError, RankMismatchError
from zero_core.layout import Layout, ParamSpec, Segment
from zero_core.lr_schedules import make_scheduler
from zero_core.optimizer import check_elementwise, make_optimizer
from zero_core.parts import COLLECTIVES, KERNELS, TIERS, load_part
from zero_core.protocols import Collectives, CollectivesFactory, StateTier, StateTierFactory
from zero_core.tier import DeviceTier
from zero_core.unit import SegmentGrads, SegmentValues, Unit

__all__ = ["build"]

_log = logging.getLogger(__name__)


def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    collectives: Collectives | CollectivesFactory | None = None,
    state_tier: StateTierFactory | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Engine:
    """Make a training engine out of a model and a DeepSpeed-style configuration.

    The model is changed in place: its parameters move to the engine's device and memory, and at
    stage 3 hold their values only while their unit is computed. Values and buffers are those of
    rank 0, as in DDP. Every rank must call it, with the same model and configuration.

    Args:
        model: any module; nothing in it needs to be changed or wrapped.
        config: the configuration, or the path of its JSON file.
        optimizer: a torch optimizer over parameters of ``model``, whose update is elementwise; wins
            over the configuration's. It is driven by ``engine.step()`` from now on.
        lr_scheduler: a torch scheduler over ``optimizer``; stepped by ``engine.step()``.
        collectives: collectives, or a factory of them; wins over what the configuration names.
        state_tier: a factory of the state tier; wins over what the configuration names.
        process_group: the data-parallel ranks; default: all, or one rank alone if
            torch.distributed is not initialised.

    Raises:
        ConfigError: the configuration is wrong or does not fit the model.
        MissingPartError: it asks for a package that is not installed.
        RankMismatchError: the ranks have different models or configurations.
    """
    ranks = _find_ranks(process_group)
    resolved = load_config(config, world_size=ranks.size)
    if resolved.seed is not None:
        torch.manual_seed(resolved.seed)
    found = discover(model)
    is_named_adam = optimizer is None and _names_adam(resolved)
    if optimizer is None:
        optimizer = _optimizer_of(resolved, found)
    specs, group_of = _describe(found, optimizer, resolved)
    layout = Layout.build(specs, [(name, members) for name, _, members in found.units], ranks.size)
    control = ControlGroup(ranks.group, rank=ranks.rank, world_size=ranks.size, device=ranks.device)
    _check_ranks_agree(control, layout, resolved)

    stage = resolved.zero_optimization.stage if ranks.size > 1 else 0
    memory = _Memory(found, layout, resolved, ranks, stage)
    tier = _make_tier(
        state_tier, memory, layout, group_of, optimizer, resolved, ranks, is_named_adam
    )
    _fill(found, layout, memory, tier, control)
    adopt_buffers(model, resolved.compute_dtype, ranks.device, control)
    if lr_scheduler is None and resolved.scheduler is not None:
        lr_scheduler = make_scheduler(optimizer, resolved.scheduler.type, resolved.scheduler.params)
    return Engine(
        module=model,
        config=resolved,
        layout=layout,
        units=memory.units,
        unit_modules=[module for _, module, _ in found.units],
        tier=tier,
        collectives=_make_collectives(collectives, resolved, ranks),
        control=control,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        device=ranks.device,
        stage=stage,
        memory_report=memory.report,
    )


@dataclass(frozen=True)
class _Ranks:
    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device


def _find_ranks(group: dist.ProcessGroup | None) -> _Ranks:
    if dist.is_available() and dist.is_initialized():
        is_on_host = dist.get_backend(group) == "gloo"
        device = torch.device("cpu") if is_on_host else _accelerator()
        return _Ranks(group, dist.get_rank(group), dist.get_world_size(group), device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before zero_core.build()"
        )
    return _Ranks(None, 0, 1, _accelerator())


def _accelerator() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def _names_adam(config: Config) -> bool:
    if config.optimizer is None or config.optimizer.params.get("torch_adam"):
        return False
    return config.optimizer.type.lower() in ("adam", "adamw")


def _optimizer_of(config: Config, found: Discovered) -> torch.optim.Optimizer:
    if config.optimizer is None:
        raise ConfigError(
            "no optimizer: give one in the configuration ('optimizer': {'type': 'AdamW', "
            "'params': {'lr': ...}}) or pass optimizer=... to build()"
        )
    trainable = [p for p in found.params if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient")
    return make_optimizer(config.optimizer, trainable)


def _describe(
    found: Discovered, optimizer: torch.optim.Optimizer, config: Config
) -> tuple[list[ParamSpec], dict[int, int]]:
    """Every parameter's description, and the optimizer group of each trainable one by number."""
    # Adagrad has state from the start; its count of steps tells.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has already stepped: build the engine first, or load its state from "
            "a checkpoint of the engine"
        )
    check_elementwise(type(optimizer))
    number_of = {id(p): n for n, p in enumerate(found.params)}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in number_of:
                raise ConfigError(
                    f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} "
                    "that is not in the model: make the optimizer from model.parameters()"
                )
            group_of[number_of[id(param)]] = index
    specs = []
    for number, (param, names) in enumerate(zip(found.params, found.names, strict=True)):
        if param.is_meta:
            raise ConfigError(f"parameter {names[0]} is on the meta device: materialise it first")
        if param.requires_grad and number not in group_of:
            raise ConfigError(
                f"parameter {names[0]} requires a gradient but is in no optimizer group: add it, "
                "or freeze it with requires_grad_(False)"
            )
        specs.append(
            ParamSpec(
                name=names[0],
                shape=tuple(param.shape),
                dtype=compute_dtype(param, config.compute_dtype),
                is_trainable=param.requires_grad,
                aliases=names[1:],
            )
        )
    return specs, {n: g for n, g in group_of.items() if specs[n].is_trainable}


def _check_ranks_agree(control: ControlGroup, layout: Layout, config: Config) -> None:
    described = json.dumps(
        [
            [[p.name, p.shape, str(p.dtype), p.is_trainable, p.aliases] for p in layout.params],
            [[u.name, [s.slots[0].param for s in u.segments]] for u in layout.units],
        ]
    )
    settings = config.model_dump_json()
    hashes = [hashlib.sha256(text.encode()).digest() for text in (described, settings)]
    for rank, theirs in enumerate(control.gather_bytes(b"".join(hashes))):
        for what, mine, other in (
            ("model (parameter names, shapes, dtypes, order)", hashes[0], theirs[:32]),
            ("configuration", hashes[1], theirs[32:]),
        ):
            if mine != other:
                raise RankMismatchError(
                    f"rank {control.rank} and rank {rank} were built with a different {what}: "
                    "every rank must pass the same to build()"
                )


class _Memory:
    """Everything that is allocated, once: see zero_core.arena."""

    def __init__(
        self, found: Discovered, layout: Layout, config: Config, ranks: _Ranks, stage: int
    ) -> None:
        self.has_sharded_state = stage >= 1
        self._keeps_full_grads = ranks.size > 1 and stage < 2
        self._has_full_update = ranks.size > 1 and stage == 0
        self.has_sharded_params = stage >= 3
        self._config = config
        self._rank = ranks.rank
        self._arena = Arena(ranks.device)
        self._found = found
        self._layout = layout
        self._pools: list[tuple[str, BufferPool]] = []
        values = self._allocate_values(ranks.device)
        grads = self._allocate_grads(ranks.device)
        self.values = values
        starts = layout.local_starts(is_sharded=self.has_sharded_state)
        for index, start in starts.items():
            low, high = layout.state_range(
                layout.segments[index], ranks.rank, is_sharded=self.has_sharded_state
            )
            values[index].local_span = (start, start + high - low)
        self.units = [
            Unit(
                unit.index,
                unit.name,
                [values[s.index] for s in unit.segments],
                [grads[s.index] for s in unit.segments if s.is_trainable],
            )
            for unit in layout.units
        ]

    def published(self) -> list[tuple[int, Tensor]]:
        """Where the state tier writes new values, by start in the local flat space."""
        found = []
        for values in self.values:
            if values.local_span is not None:
                tensor = values.shard if self.has_sharded_state else values.full
                assert tensor is not None
                found.append((values.local_span[0], tensor))
        return found

    def report(self) -> dict[str, int]:
        """Bytes by kind, on this rank, state tier not counted."""
        report = self._arena.report()
        for kind, pool in self._pools:
            report[kind] = report.get(kind, 0) + pool.allocated_bytes
        return report

    def _params_of(self, segment: Segment) -> list[nn.Parameter]:
        return [self._found.params[slot.param] for slot in segment.slots]

    def _pool(self, kind: str, nbytes: Sequence[int], device: torch.device) -> BufferPool:
        pool = BufferPool(device, max(nbytes, default=0))
        self._pools.append((kind, pool))
        return pool

    def _split(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Segments of the root and of the blocks: their buffers live differently long."""
        return [[s for s in segments if s.unit == 0], [s for s in segments if s.unit != 0]]

    def _allocate_values(self, device: torch.device) -> list[SegmentValues]:
        segments = self._layout.segments
        shards: dict[int, Tensor] = {}
        fulls: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(s.dtype for s in segments):
            same = [s for s in segments if s.dtype == dtype]
            if self.has_sharded_params:
                sizes = [s.shard_numel for s in same]
                parts = self._arena.allocate("parameters", dtype, sizes)
                shards |= {s.index: t for s, t in zip(same, parts, strict=True)}
            else:
                sizes = [s.padded_numel for s in same]
                parts = self._arena.allocate("parameters", dtype, sizes)
                for s, t in zip(same, parts, strict=True):
                    low, high = s.shard_range(self._rank)
                    shards[s.index], fulls[s.index] = t[low:high], t
        pools = [
            self._pool("gathered units", [s.padded_numel * s.dtype.itemsize for s in part], device)
            for part in self._split(segments)
        ]
        return [
            SegmentValues(
                s,
                self._params_of(s),
                rank=self._rank,
                shard=shards[s.index],
                full=fulls.get(s.index),
                pool=pools[min(s.unit, 1)],
                has_remote_updates=self.has_sharded_state and s.is_trainable,
            )
            for s in segments
        ]

    def _allocate_grads(self, device: torch.device) -> dict[int, SegmentGrads]:
        segments = [s for s in self._layout.segments if s.is_trainable]
        shards = self._by_dtype("gradient shards", segments, self._accumulated, is_full=False)
        kept: dict[int, Tensor] = {}
        final: dict[int, Tensor] = {}
        if self._keeps_full_grads:
            kept = self._by_dtype("gradients", segments, self._communicated, is_full=True)
        if self._has_full_update:
            # A reduction leaves the kept gradients free: they hold the sum, if it fits.
            final = {i: t for i, t in kept.items() if t.dtype == shards[i].dtype}
            rest = [s for s in segments if s.index not in final]
            final |= self._by_dtype("gradients", rest, self._accumulated, is_full=True)
        dtypes = {self._communicated(s) for s in segments} | {
            self._accumulated(s) for s in segments
        }
        pools = [
            {
                dtype: self._pool(
                    "gradients under way", [s.padded_numel * dtype.itemsize for s in part], device
                )
                for dtype in dtypes
            }
            for part in self._split(segments)
        ]
        return {
            s.index: SegmentGrads(
                s,
                self._params_of(s),
                grad_shard=shards[s.index],
                kept_full_grad=kept.get(s.index),
                final_grad=final.get(s.index),
                pools=pools[min(s.unit, 1)],
                communication_dtype=self._communicated(s),
            )
            for s in segments
        }

    def _by_dtype(
        self,
        kind: str,
        segments: Sequence[Segment],
        dtype_of: Callable[[Segment], torch.dtype],
        *,
        is_full: bool,
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype_of(s) for s in segments):
            same = [s for s in segments if dtype_of(s) == dtype]
            sizes = [s.padded_numel if is_full else s.shard_numel for s in same]
            for s, t in zip(same, self._arena.allocate(kind, dtype, sizes), strict=True):
                found[s.index] = t
        return found

    def _communicated(self, segment: Segment) -> torch.dtype:
        name = self._config.communication_data_type
        return segment.dtype if name is None else DTYPES[name]

    def _accumulated(self, segment: Segment) -> torch.dtype:
        name = self._config.data_types.grad_accum_dtype
        if name is not None:
            return DTYPES[name]
        return torch.float64 if segment.dtype == torch.float64 else torch.float32


def _make_tier(
    factory: StateTierFactory | None,
    memory: _Memory,
    layout: Layout,
    group_of: Mapping[int, int],
    optimizer: torch.optim.Optimizer,
    config: Config,
    ranks: _Ranks,
    is_named_adam: bool,
) -> StateTier:
    zero = config.zero_optimization
    pieces = [
        (p.start, p.stop, group_of[p.param])
        for p in layout.pieces(ranks.rank, is_sharded=memory.has_sharded_state)
    ]
    numel = layout.local_numel(is_sharded=memory.has_sharded_state)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    key = f"zero_optimization.offload_optimizer.device = {zero.offload_optimizer.device!r}"
    if factory is None and zero.offload_optimizer.device == "none":
        return DeviceTier(
            numel=numel,
            pieces=pieces,
            params=memory.published(),
            device=ranks.device,
            optimizer_class=type(optimizer),
            groups=groups,
        )
    kernel = None
    if factory is None:
        factory = load_part(TIERS, "host", asked_by=key, distribution="zero-offload")
        if is_named_adam:
            asked = f"{key} with optimizer.type = {config.optimizer and config.optimizer.type!r}"
            kernel = load_part(KERNELS, "cpu", asked_by=asked, distribution="cpu-adam")
    try:
        return factory(
            numel=numel,
            pieces=pieces,
            params=memory.published(),
            device=ranks.device,
            optimizer_class=type(optimizer),
            groups=groups,
            config=zero.model_dump(mode="json"),
            adam_kernel=kernel,
            device_tier=DeviceTier,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make_collectives(
    given: Collectives | CollectivesFactory | None, config: Config, ranks: _Ranks
) -> Collectives:
    native = NativeCollectives(
        ranks.group, rank=ranks.rank, world_size=ranks.size, device=ranks.device
    )
    if isinstance(given, Collectives):
        return given
    zero = config.zero_optimization
    if given is None:
        if not zero.zero_quantized_weights:
            return native
        if ranks.size == 1:
            _log.warning(
                "zero_optimization.zero_quantized_weights has no effect with one rank: "
                "nothing is gathered"
            )
        given = load_part(
            COLLECTIVES,
            "quantized",
            asked_by="zero_optimization.zero_quantized_weights",
            distribution="zero-comm",
        )
    make = cast(CollectivesFactory, given)
    try:
        return make(
            native, rank=ranks.rank, world_size=ranks.size, config=zero.model_dump(mode="json")
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


@torch.no_grad()
def _fill(
    found: Discovered,
    layout: Layout,
    memory: _Memory,
    tier: StateTier,
    control: ControlGroup,
) -> None:
    """Bring rank 0's values into the engine's memory, unrounded ones into the master weights."""
    for segment, values in zip(layout.segments, memory.values, strict=True):
        params = [found.params[slot.param] for slot in segment.slots]
        dtype = _widest(params, segment)
        flat = torch.zeros(segment.padded_numel, dtype=dtype, device=values.shard.device)
        for slot, param in zip(segment.slots, params, strict=True):
            flat[slot.start : slot.stop].copy_(param.detach().reshape(-1))
        control.broadcast(flat)
        values.store(flat)
        values.adopt()
        if values.local_span is not None:
            low, high = layout.state_range(
                segment, control.rank, is_sharded=memory.has_sharded_state
            )
            tier.write_state("master_weight", values.local_span[0], flat[low:high])


def _widest(params: Sequence[nn.Parameter], segment: Segment) -> torch.dtype:
    """The dtype in which the original values of a segment lose nothing."""
    dtype = segment.dtype
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype
