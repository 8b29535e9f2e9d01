"""Compose an engine: find the units, lay them out, allocate once, adopt the model's parameters."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_core.arena import BufferPool, allocator, release_free_pages
from zero_core.blueprint import Blueprint
from zero_core.buffers import adopt_buffers
from zero_core.collectives import ControlGroup
from zero_core.comm_report import Meter
from zero_core.config import Config, load_config
from zero_core.discovery import Discovered
from zero_core.engine import Engine
from zero_core.errors import ConfigError, RankMismatchError
from zero_core.evaluation import EvaluationEngine, for_evaluation
from zero_core.freezing import tell_frozen
from zero_core.initial import InitialValues
from zero_core.layout import Layout, Segment
from zero_core.lr_schedules import make_scheduler
from zero_core.matrices import matrix_tiers
from zero_core.memory import Memory
from zero_core.muon import Muon
from zero_core.native import make_collectives, make_native, private_bytes, share_memory
from zero_core.offload_share import check_patterns
from zero_core.optimizer import has_kernel_rule
from zero_core.owners import engine_of
from zero_core.parked import make_ordinary
from zero_core.parts import KERNELS, PARAM_TIERS, TIERS, has_part, load_part
from zero_core.pretrained import load_pretrained
from zero_core.protocols import (
    Collectives,
    CollectivesFactory,
    ParamTierFactory,
    StateTier,
    StateTierFactory,
)
from zero_core.resting import Resting, resting_segments
from zero_core.schedule import Schedule
from zero_core.segment_values import SegmentValues
from zero_core.tier import DeviceTier
from zero_core.topology import Ranks, count_per_node, find_ranks

__all__ = ["build"]

_log = logging.getLogger(__name__)


def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Schedule | None = None,
    collectives: Collectives | CollectivesFactory | None = None,
    state_tier: StateTierFactory | None = None,
    param_tier: ParamTierFactory | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    pretrained: str | Path | Sequence[str | Path] | None = None,
    is_training: bool = True,
) -> Engine:
    """Make a training engine out of a model and a DeepSpeed-style configuration.

    The model is changed in place: its parameters move to the engine's device and memory, and at
    stage 3 hold their values only while their unit is computed. Values and buffers are those of
    rank 0, as in DDP. Every rank must call it, with the same model and configuration.

    A model made under `zero_core.deferred_init` gets its values here, one parameter at a time: no
    rank ever holds more than its shards and one unit. The same holds for one made under
    `zero_core.sharded_init.sharded_init`.

    Args:
        model: any module; nothing in it needs to be changed or wrapped.
        config: the configuration, or the path of its JSON file.
        optimizer: a torch optimizer over parameters of ``model``, whose update is elementwise; wins
            over the configuration's. It is driven by ``engine.step()`` from now on.
        lr_scheduler: a torch scheduler over ``optimizer``; stepped by ``engine.step()``.
        collectives: collectives, or a factory of them; wins over what the configuration names.
        state_tier: a factory of the state tier; wins over what the configuration names.
        param_tier: a factory of what holds parameter shards off the device, at stage 3; wins over
            what the configuration names.
        process_group: the data-parallel ranks; default: all, or one rank alone if
            torch.distributed is not initialised.
        mesh: the same as a device mesh: one dimension of ranks, or two, (nodes, ranks of a node);
            how many ranks share a node is found from the launcher's environment otherwise.
        pretrained: safetensors that give every value, read as by `zero_core.load_pretrained`; the
            model may then be on the meta device, but for buffers that are not in its state dict.
        is_training: False for an engine that evaluates alone: see `zero_core.evaluation`.

    Raises:
        ConfigError: the configuration is wrong or does not fit the model, or the model is on the
            meta device and its values are not known, or it has an engine that has not ended.
        CheckpointError: ``pretrained`` does not fit the model.
        MissingPartError: it asks for a package that is not installed.
        RankMismatchError: the ranks have different models or configurations.
    """
    ranks = find_ranks(process_group, mesh)
    resolved = load_config(config, world_size=ranks.size)
    if resolved.seed is not None:
        torch.manual_seed(resolved.seed)
    if not is_training:
        resolved = for_evaluation(resolved, optimizer, lr_scheduler)
    _check_is_free(model)
    drawn = Blueprint.draw(model, resolved, ranks.size, optimizer, is_training=is_training)
    found, layout, optimizer = drawn.found, drawn.layout, drawn.optimizer
    initial = InitialValues(model)
    control = ControlGroup(ranks.group, rank=ranks.rank, world_size=ranks.size, device=ranks.device)
    _check_ranks_agree(control, layout, resolved)
    _check_values_are_known(control, initial, has_pretrained=pretrained is not None)
    if ranks.rank == 0 and is_training:
        tell_frozen(layout, found.params)

    per_node = count_per_node(control, ranks)
    meter = Meter(ranks.size, per_node)
    shared = share_memory(control, ranks, per_node)
    native = make_native(ranks, per_node, shared, meter)
    used = make_collectives(collectives, native, resolved, layout, per_node)
    is_shared = shared is not None and getattr(used, "has_retire", False)
    memory = Memory(
        found,
        layout,
        resolved,
        rank=ranks.rank,
        device=ranks.device,
        exchanged=shared.zeros if shared is not None and is_shared else None,
        is_accelerated=ranks.device.type != "cpu",
        resting=_make_param_tier(param_tier, layout, resolved, ranks),
    )
    if isinstance(drawn.optimizer, Muon):
        state_tier = matrix_tiers(state_tier, drawn, resolved, control, meter)
    tier = _make_tier(state_tier, memory, drawn, resolved, ranks)
    memory.allocate_grads(tier.read_grad if getattr(tier, "keeps_grads", False) else None)
    if pretrained is None:
        _fill(found, layout, memory, tier, control, initial)
    else:
        for values in memory.values:
            _adopt(values)
    adopt_buffers(model, resolved.buffer_dtype, ranks.device, control, initial.of)
    initial.give_attributes()
    if lr_scheduler is None and resolved.scheduler is not None:
        lr_scheduler = make_scheduler(optimizer, resolved.scheduler.type, resolved.scheduler.params)
    engine = (Engine if is_training else EvaluationEngine)(
        module=model,
        config=resolved,
        layout=layout,
        units=memory.units,
        unit_modules=[module for _, module, _ in found.units],
        tier=tier,
        collectives=used,
        control=control,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        device=ranks.device,
        stage=memory.stage,
        memory_report=lambda: {**memory.report(), **private_bytes(used)},
        meter=meter,
    )
    if pretrained is not None:
        try:
            load_pretrained(engine, pretrained)
        except Exception:
            engine.close()  # another build() may follow, from the right file
            raise
    return engine


def _check_is_free(model: nn.Module) -> None:
    """Refuse a model of which another engine has a parameter: it would take its gradient."""
    for name, param in model.named_parameters():
        if engine_of(param) is not None:
            raise ConfigError(
                f"{name} belongs to an engine already, the one that zero_core.engine_of(param) "
                "tells: end that one first, by zero_core.give_back(engine)"
            )


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


def _check_values_are_known(
    control: ControlGroup, initial: InitialValues, *, has_pretrained: bool
) -> None:
    """Refuse on all ranks what one of them cannot fill."""
    failure: ConfigError | None = None
    try:
        initial.check(has_pretrained=has_pretrained)
    except ConfigError as error:
        failure = error
    rows = control.gather_bytes(str(failure or "").encode())
    if failure is not None:
        raise failure
    for rank, row in enumerate(rows):
        if row:
            raise ConfigError(f"rank {rank}: {row.decode()}")


def _make_tier(
    factory: StateTierFactory | None,
    memory: Memory,
    drawn: Blueprint,
    config: Config,
    ranks: Ranks,
) -> StateTier:
    zero = config.zero_optimization
    layout, optimizer = drawn.layout, drawn.optimizer
    placed = layout.pieces(ranks.rank, is_sharded=memory.has_sharded_state)
    pieces = [(p.start, p.stop, drawn.group_of[p.param]) for p in placed]
    check_patterns(zero.offload_optimizer.parameters or (), layout)
    numel = layout.local_numel(is_sharded=memory.has_sharded_state)
    groups, store = drawn.groups, memory.store()
    key = f"zero_optimization.offload_optimizer.device = {zero.offload_optimizer.device!r}"
    if factory is None and zero.offload_optimizer.device == "none":
        return DeviceTier(
            numel=numel,
            pieces=pieces,
            params=memory.published(),
            device=ranks.device,
            optimizer_class=type(optimizer),
            groups=groups,
            param_store=store,
        )
    kernel = None
    if factory is None:
        factory = load_part(TIERS, "host", asked_by=key, distribution="zero-offload")
        kernel = _load_kernel(config, drawn.given, key)
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
            names=[layout.params[p.param].name for p in placed],
            param_store=store,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load_kernel(config: Config, given: torch.optim.Optimizer | None, key: str) -> Any:
    """The host kernel for the optimizer; None if torch's own update does it."""
    if not has_kernel_rule(config, given):
        return None
    if given is not None and not has_part(KERNELS, "cpu"):
        _log.info(
            "%s with an object of %s: torch's own update runs on the host; for a faster one: "
            "pip install cpu-adam",
            key,
            type(given).__name__,
        )
        return None
    named = config.optimizer.type if given is None and config.optimizer else type(given).__name__
    asked = (
        f"{key} with optimizer.type = {named!r}"
        if given is None
        else f"{key} with an object of {named}"
    )
    return load_part(KERNELS, "cpu", asked_by=asked, distribution="cpu-adam")


def _make_param_tier(
    factory: ParamTierFactory | None, layout: Layout, config: Config, ranks: Ranks
) -> Resting | None:
    """What holds parameter shards off the device, if the configuration or the caller asks."""
    zero = config.zero_optimization
    kind = zero.offload_param.device
    is_apart = factory is not None or kind == "nvme" or ranks.device.type != "cpu"
    if factory is None and kind == "none":
        return None
    if zero.stage < 3:
        raise ConfigError(f"param_tier needs zero_optimization.stage 3, found {zero.stage}")
    if not is_apart:
        _log.info(
            "zero_optimization.offload_param.device = 'cpu': the model is computed on the CPU, so "
            "its shards lie in host memory already and are used there"
        )
    segments = resting_segments(layout, config, is_apart=is_apart)
    if not segments:
        return None
    if factory is None:
        asked = f"zero_optimization.offload_param.device = {kind!r}"
        factory = load_part(PARAM_TIERS, "host", asked_by=asked, distribution="zero-offload")
    try:
        tier = factory(
            shards=[(s.index, s.shard_numel, s.dtype) for s in segments],
            device=ranks.device,
            config=zero.model_dump(mode="json"),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Resting(segments, tier)


@torch.no_grad()
def _fill(
    found: Discovered,
    layout: Layout,
    memory: Memory,
    tier: StateTier,
    control: ControlGroup,
    initial: InitialValues,
) -> None:
    """Bring rank 0's values into the engine's memory, unrounded ones into the master weights."""
    dtypes = [_widest([found.params[x.param] for x in s.slots], s) for s in layout.segments]
    sizes = [s.padded_numel * d.itemsize for s, d in zip(layout.segments, dtypes, strict=True)]
    # One buffer for all: the heap stays whole.
    pool = BufferPool(allocator(memory.values[0].device), max(sizes))
    is_deferred = _is_any_recorded(found, control, initial)
    for segment, values, dtype in zip(layout.segments, memory.values, dtypes, strict=True):
        params = [found.params[slot.param] for slot in segment.slots]
        flat = pool.acquire(segment.padded_numel, dtype)
        for low, high in segment.gaps():
            flat[low:high].zero_()
        in_parts = [initial.is_in_parts(param) for param in params]
        for slot, param, is_shared in zip(segment.slots, params, in_parts, strict=True):
            if is_shared or control.rank == 0 or not is_deferred:
                flat[slot.start : slot.stop].copy_(initial.of(param).reshape(-1))
        if not all(in_parts):
            (control.broadcast if is_deferred else control.equalize)(flat)
        values.overwrite(0, flat)
        _adopt(values)
        if values.local_span is not None:
            low, high = layout.state_range(
                segment, control.rank, is_sharded=memory.has_sharded_state
            )
            tier.write_state("master_weight", values.local_span[0], flat[low:high])
        pool.release(flat)
    release_free_pages()  # what the parameters' own storage left


def _is_any_recorded(found: Discovered, control: ControlGroup, initial: InitialValues) -> bool:
    """Whether a value has to be computed first on some rank: then rank 0 alone does so.

    Ranks need not have recorded alike; what lies in parts must do so on all of them.

    Raises:
        RankMismatchError: it does not.
    """
    num_recorded = sum(initial.is_recorded(p) for p in found.params)
    num_in_parts = sum(initial.is_in_parts(p) for p in found.params)
    rows = control.gather(torch.tensor([num_recorded, num_in_parts])).view(-1, 2)
    if bool((rows[:, 1] != rows[0, 1]).any()):
        raise RankMismatchError(
            f"ranks have {rows[:, 1].tolist()} parameters that were sharded before build(): make "
            "and load the model in the same way on every rank"
        )
    return bool((rows[:, 0] > 0).any())


def _adopt(values: SegmentValues) -> None:
    for param in values.params:
        make_ordinary(param)
    values.adopt()


def _widest(params: Sequence[nn.Parameter], segment: Segment) -> torch.dtype:
    """The dtype in which the original values of a segment lose nothing."""
    dtype = segment.dtype
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype
