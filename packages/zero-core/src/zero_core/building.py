"""Composition of an engine from a model and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_core._libc import release_free_pages
from zero_core._torch import has_step_pre_hooks
from zero_core.blueprint import Blueprint
from zero_core.checkpoint.patches import PatchWriter
from zero_core.checkpointing import load_pretrained
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import ControlGroup
from zero_core.comm.device import DeviceCollectives, make_transport, share_memory
from zero_core.comm.groups import Ranks
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Links, Meter
from zero_core.comm.notices import under_way
from zero_core.comm.place import OUTSIDE
from zero_core.comm.shared_memory import SharedMemory
from zero_core.comm.topology import check_devices, count_per_node, find_ranks
from zero_core.config import Config, load_config
from zero_core.core import hooks
from zero_core.core.extension import Extension, Extensions
from zero_core.core.facts import Facts
from zero_core.core.grads import Arithmetic
from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.core.units import UnitSet
from zero_core.engine import Engine, EngineOptimizer
from zero_core.errors import CollectiveError, ConfigError
from zero_core.extensions import (
    Site,
    attach_extensions,
    check_extensions,
    make_extensions,
    wrap_forwards,
)
from zero_core.extensions.guards import TrainingGuard
from zero_core.extensions.invariance import arithmetic_of
from zero_core.extensions.lengths import WeightLengths
from zero_core.init.values import (
    FormerModel,
    InitialValues,
    adopt,
    adopt_buffers,
    fill,
    on_all_ranks,
)
from zero_core.lifecycle import Ownership, Removable, check_is_free
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.plugins import make_collectives, make_param_tier, make_state_tier
from zero_core.protocols import (
    Collectives,
    CollectivesFactory,
    ParamTierFactory,
    PreparedCollectives,
    ReservingTier,
    StateTierFactory,
)
from zero_core.runtime.device_states import DeviceStates, warn_frozen
from zero_core.runtime.host_inputs import HostInputs
from zero_core.schedules import Schedule, ScheduleFactory, make_scheduler
from zero_core.sharded.edits import Edits
from zero_core.sharded.memory import Memory
from zero_core.sharded.sharded_state import CommonBuffers, ShardedState
from zero_core.sharded_model import Attach, EngineParts, ShardedModel, for_evaluation
from zero_core.step.states import StateAccess
from zero_core.step.update import StepGradient
from zero_core.vertical.schedule import make_micro_batches


@overload
def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = ...,
    lr_scheduler: Schedule | ScheduleFactory | None = ...,
    collectives: Collectives | CollectivesFactory | None = ...,
    state_tier: StateTierFactory | None = ...,
    param_tier: ParamTierFactory | None = ...,
    process_group: dist.ProcessGroup | Ranks | None = ...,
    mesh: DeviceMesh | None = ...,
    pretrained: str | Path | Sequence[str | Path] | None = ...,
    attach: Attach | None = ...,
    extensions: Sequence[Extension] = ...,
    is_training: Literal[True] = ...,
) -> Engine: ...
@overload
def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = ...,
    lr_scheduler: Schedule | ScheduleFactory | None = ...,
    collectives: Collectives | CollectivesFactory | None = ...,
    state_tier: StateTierFactory | None = ...,
    param_tier: ParamTierFactory | None = ...,
    process_group: dist.ProcessGroup | Ranks | None = ...,
    mesh: DeviceMesh | None = ...,
    pretrained: str | Path | Sequence[str | Path] | None = ...,
    attach: Attach | None = ...,
    extensions: Sequence[Extension] = ...,
    is_training: bool,
) -> ShardedModel: ...
def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Schedule | ScheduleFactory | None = None,
    collectives: Collectives | CollectivesFactory | None = None,
    state_tier: StateTierFactory | None = None,
    param_tier: ParamTierFactory | None = None,
    process_group: dist.ProcessGroup | Ranks | None = None,
    mesh: DeviceMesh | None = None,
    pretrained: str | Path | Sequence[str | Path] | None = None,
    attach: Attach | None = None,
    extensions: Sequence[Extension] = (),
    is_training: bool = True,
) -> ShardedModel:
    """Build a training engine from a model and a DeepSpeed-style configuration.

    The model is changed in place. Its parameters move to the engine's device and memory. At stage 3
    sharded ones hold values only while their unit is computed. Values and buffers are those of rank
    0, as in DDP. Every rank must call it, with the same model and configuration.

    A model made under `zero_core.deferred_init`, or with `zero_core.protocols.PartitionedParam`s,
    gets its values here, one parameter at a time, so that a rank need not hold the whole model.

    On failure, restores what it can: [Note: a build is a transaction] in `zero_core.init.values`.

    Args:
        model: the module to train. Its code needs no changes.
        config: the configuration, or the path of its JSON file.
        optimizer: a torch optimizer over parameters of ``model``, which ``engine.step()`` steps.
            Overrides the configuration's. Optimizers that are not known to be elementwise update
            whole parameters (`zero_core.optim.whole_tier`).
        lr_scheduler: a torch scheduler over ``optimizer``, or a function that makes one from
            ``optimizer``. ``engine.step()`` steps it. Overrides the configuration's.
        collectives: collectives, or a factory of collectives. Overrides the configuration's.
        state_tier: a factory of the state tier. Overrides the configuration's.
        param_tier: a factory of the tier that keeps parameter shards off the device at stage 3.
            Overrides the configuration's.
        process_group: the data-parallel ranks. Default: all ranks.
        mesh: the data-parallel ranks as a device mesh, with dimensions (ranks,) or (nodes, ranks
            per node). Without two dimensions, launcher or host names determine the ranks per node.
        pretrained: safetensors files with every value, read as by `zero_core.load_pretrained`. The
            model may then be on the meta device, except for buffers that its state dict lacks.
        attach: called with the engine before values move to the engine's memory. For adapters.
        extensions: objects whose methods the engine calls, besides those that ``config`` selects.
        is_training: False builds for evaluation alone.

    Returns:
        An `Engine`, or without ``is_training`` a `ShardedModel`, which has no methods of training.

    Raises:
        ConfigError: the configuration is wrong or does not fit the model; a value of the model is
            unknown; another engine still owns the model; the optimizer needs a closure or sparse
            gradients; or a setting needs an elementwise optimizer.
        CheckpointError: ``pretrained`` does not fit the model.
        RuntimeError: another rank failed, or a collective (CollectiveError).
        MissingPartError: the configuration needs a package that is not installed.
        RankMismatchError: the ranks have different models or configurations.
    """
    ranks = find_ranks(process_group, mesh)
    resolved = load_config(config, world_size=ranks.size)
    if resolved.seed is not None:
        torch.manual_seed(resolved.seed)
    if not is_training:
        resolved = for_evaluation(resolved, optimizer, lr_scheduler, extensions)
    check_extensions(resolved)
    check_is_free(model)
    drawn = Blueprint.draw(model, resolved, ranks.size, optimizer, is_training=is_training)
    initial = InitialValues(model)
    joined = _join(drawn, resolved, ranks, extensions, initial, is_given=pretrained is not None)
    if ranks.rank == 0 and is_training:
        warn_frozen(drawn.layout, drawn.found.params)
    former = FormerModel(model, drawn.found.params, drawn.optimizer, initial)
    try:
        with under_way("zero_core.build", rank=ranks.rank):
            held = _lay_out(joined, drawn, collectives, state_tier, param_tier)
            former.ownership = held.ownership
            initial.take(drawn.found.params)
            dtype, buffers = joined.config.buffer_dtype, held.state.common_buffers
            adopt_buffers(drawn.module, dtype, ranks.device, joined.control, initial)
            buffers.describe()  # describe them again after the move and cast
            buffers.confirm()
            initial.give_attributes()
            engine, units, followers = _make_engine(
                joined, drawn, held, lr_scheduler, extensions, is_training=is_training
            )
            if attach is not None:
                attach(engine)
            if pretrained is None:
                rounds = joined.config.data_types.master_weights_from == "rounded"
                fill(drawn.found, held.state, initial, former, rounds_masters=rounds)
            else:
                load_pretrained(engine, pretrained)
                former.has_pretrained = True
                for flat in held.state.params:
                    adopt(flat, former)
            _begin(joined, held, engine, units, followers)
        for flat in held.state.params:
            former.give_up(flat)
        release_free_pages()  # return memory of the parameters' former storage to the system
        return engine
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                "build() allocates all memory that it keeps on the device. zero_core.plan() lists "
                "the bytes, and the stages and offloads that fit"
            )
        try:
            former.restore_after(error)
        finally:
            joined.transport.close()
        raise


class _Joined(NamedTuple):
    """Result of `_join`: connections to the other ranks, the configuration and the arithmetic."""

    config: Config
    ranks: Ranks
    control: ControlGroup
    meter: Meter
    shared: SharedMemory | None
    transport: HostCollectives | DeviceCollectives
    arithmetic: Arithmetic


def _join(
    drawn: Blueprint,
    config: Config,
    ranks: Ranks,
    extensions: Sequence[Extension],
    initial: InitialValues,
    *,
    is_given: bool,
) -> _Joined:
    """Connect to the other ranks and check that they agree. Every rank must call it."""
    check_devices(ranks)
    ranks = ranks.limited(config.collective_timeout_s)
    control = ranks.connect(config.name_waits_within_s)
    control.place.enter("build()")
    drawn.check_ranks_agree(control, config, [one.describe() for one in extensions])
    zero = config.zero_optimization
    offload = zero.offload_optimizer
    may_be_early = offload.device != "none" and offload.update_in_backward is None
    # A pre-hook on one rank, such as one that logs, changes the policy of all.
    if may_be_early and any(control.gather_json(has_step_pre_hooks(drawn.optimizer))):
        offload = offload.model_copy(update={"update_in_backward": False})
        zero = zero.model_copy(update={"offload_optimizer": offload})
        config = config.model_copy(update={"zero_optimization": zero})
    with on_all_ranks(control, ConfigError):  # also if only one rank lacks a parameter's value
        initial.check(has_pretrained=is_given)
    per_node = count_per_node(control, ranks)
    arithmetic = arithmetic_of(config)
    is_ring = ranks.device.type != "cpu"
    links = Links(ranks.size, per_node, is_ring, is_sequential=config.world_size_invariant)
    meter = Meter(links)
    shared = share_memory(control, ranks, per_node)
    transport = make_transport(ranks, shared, meter)
    config = config.on_nodes(per_node, ranks.size)
    return _Joined(config, ranks, control, meter, shared, transport, arithmetic)


class _Held(NamedTuple):
    """Result of `_lay_out`: memory of this rank, and the units and shards in that memory."""

    communicator: Communicator
    memory: Memory
    units: Sequence[Unit]
    state: ShardedState
    ownership: Ownership


def _lay_out(
    joined: _Joined,
    drawn: Blueprint,
    collectives: Collectives | CollectivesFactory | None,
    state_tier: StateTierFactory | None,
    param_tier: ParamTierFactory | None,
) -> _Held:
    """Allocate this rank's memory, and make the state tier and the units in that memory."""
    config, ranks, layout, optimizer = joined.config, joined.ranks, drawn.layout, drawn.optimizer
    transport, shared = joined.transport, joined.shared
    per_node = joined.meter.links.ranks_per_node
    used = make_collectives(collectives, transport, config, layout, per_node)
    named = {unit.index: f"unit {unit.index} ({unit.name or 'root'})" for unit in layout.units}
    described = {segment.index: named[segment.unit] for segment in layout.segments}
    communicator = Communicator(used, joined.control, described)
    joined.arithmetic.check(config, communicator, ranks)
    exchanged = shared.zeros if shared is not None and communicator.reduces_in_place else None
    with on_all_ranks(joined.control, CollectiveError):  # also if only one device lacks memory
        offloaded, tier_of_params = make_param_tier(param_tier, layout, config, ranks.device)
        memory = Memory(
            drawn.found,
            layout,
            config,
            rank=ranks.rank,
            device=ranks.device,
            exchanged=exchanged,
            is_accelerated=ranks.device.type != "cpu",
            offloaded=offloaded,
            param_tier=tier_of_params,
        )
        tier = make_state_tier(state_tier, memory, drawn, config, joined.control, joined.meter)
    is_own = state_tier is not None
    units = memory.make_units(tier, communicator, joined.arithmetic, has_own_tier=is_own)
    flats = (flat for unit in units for flat in unit.params)
    state = ShardedState(
        module=drawn.module,
        layout=layout,
        params=tuple(sorted(flats, key=lambda flat: flat.segment.index)),
        tier=tier,
        control=joined.control,
        # Without broadcast_buffers, the ranks' buffers may diverge during training.
        common_buffers=CommonBuffers(drawn.module if config.broadcast_buffers else nn.Identity()),
        pieces=layout.pieces(ranks.rank, is_sharded=memory.has_sharded_state),
        optimizer=f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
        quantized=drawn.found.quantized,
        changes=memory.changes,
    )
    if isinstance(used, PreparedCollectives) and ranks.size > 1:
        gathered = [(s.index, s.shard_numel, s.dtype) for s in layout.segments]
        grads = [(g.segment.padded_numel, g.plan) for unit in units for g in unit.grads]
        reduced = [(numel, plan.communicated, plan.accumulated) for numel, plan in grads]
        used.prepare(gathered, reduced, ranks.device)
    return _Held(communicator, memory, units, state, Ownership(state))


def _begin(
    joined: _Joined, held: _Held, engine: ShardedModel, units: UnitSet, followers: Extensions
) -> None:
    """Allocate what backward needs on an accelerator, start extensions, and publish the values."""
    tier, memory = held.state.tier, held.memory
    if joined.ranks.device.type != "cpu":
        with on_all_ranks(joined.control, CollectiveError):
            memory.reserve_buffers()
            if isinstance(tier, ReservingTier):
                grads = [grads for unit in held.units for grads in unit.grads]
                tier.reserve([(*memory.spans[g.segment.index], g.plan.offered) for g in grads])
    for extension in held.state.extensions:
        extension.reset()
    for follow in followers.begun:
        follow()
    units.publish()  # the tier may round master weights differently from ``fill``
    engine.publish()
    for flat in held.state.params:
        flat.shown.forget_marks()
    joined.control.place.enter(OUTSIDE)


def _make_engine(
    joined: _Joined,
    drawn: Blueprint,
    held: _Held,
    lr_scheduler: Schedule | ScheduleFactory | None,
    given: Sequence[Extension],
    *,
    is_training: bool,
) -> tuple[ShardedModel, UnitSet, Extensions]:
    config, ranks, layout, meter = joined.config, joined.ranks, drawn.layout, joined.meter
    communicator, memory, state = held.communicator, held.memory, held.state
    arithmetic = joined.arithmetic
    schedule = lr_scheduler(drawn.optimizer) if callable(lr_scheduler) else lr_scheduler
    wrong, groups = "", [id(group) for group in drawn.optimizer.param_groups]
    if lr_scheduler is not None and not isinstance(schedule, Schedule):
        wrong = "lacks step, state_dict or load_state_dict"
    elif isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        # A subclass with a constructor of its own may have no optimizer.
        of = vars(schedule).get("optimizer", drawn.optimizer).param_groups
        if not any(id(group) in groups for group in of):
            wrong = "steps another optimizer than the engine's"
    if wrong:
        raise ConfigError(
            f"lr_scheduler is or makes {schedule!r:.100}, which {wrong}: pass a scheduler as of "
            "torch.optim.lr_scheduler over build(optimizer=...), or a function of the optimizer "
            "that returns one"
        )
    if schedule is None and (wanted := config.scheduler) is not None:
        schedule = make_scheduler(drawn.optimizer, wanted.type, wanted.params)
    train = TrainState(config, drawn.optimizer.param_groups, schedule, rank=ranks.rank)
    sizes = len(layout.params), len(layout.units)
    facts = Facts(communicator, ranks.device, *sizes, meter, arithmetic)
    edits = Edits(state, facts)
    followers = WeightLengths.wanted(communicator, state)
    followers += [edits] if edits.is_needed else []
    site = Site(config, state, train, facts, ranks, meter.links.ranks_per_node)
    if is_training:  # attach first, so that the engine's hooks run around those of extensions
        attach_extensions(given, state, held.ownership)
        followers += make_extensions(site, given)
        followers.append(patches := PatchWriter(state))
    guard = TrainingGuard(state, train)
    extensions = Extensions([guard, *followers])
    gradient = StepGradient(state, communicator, train, config, facts, extensions, arithmetic)
    is_sharded = memory.has_sharded_params
    unit_set = UnitSet(held.units, communicator, extensions, has_sharded_params=is_sharded)
    passes = Passes(unit_set, communicator, gradient, facts)
    modules = [module for _, module, _ in drawn.found.units]
    is_apart = config.has_inputs_on_host and ranks.device.type != "cpu"
    host_inputs = HostInputs(ranks.device) if is_apart else None
    installed: list[Removable] = [f for f in followers if f not in given]
    installed += [handle for follower in followers for handle in follower.handles]
    installed += wrap_forwards(site, passes, modules, host_inputs)
    installed += hooks.install(passes, modules)
    holders = state.tier, communicator.transport, joined.transport
    device_states = DeviceStates(memory, passes, state, holders, edits, extensions)
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    if (dtype := config.autocast_dtype) is not None:
        # At stage 3 autocast's cache would keep all 16-bit weights until the end of the forward.
        # None keeps torch's setting.
        is_cached = None if config.zero_optimization.stage < 3 else False
        autocast = partial(torch.autocast, ranks.device.type, dtype, cache_enabled=is_cached)
    parts = EngineParts(
        config,
        config.compute_dtype,
        autocast,
        held.ownership,
        state,
        passes,
        StateAccess(state, gradient, passes, device_states),
        device_states,
        train,
        memory,
        communicator,
        joined.transport,
        meter,
        ranks.exchange_beside(joined.control.watch),
    )
    if not is_training:
        model = ShardedModel(parts)
        model.remove_at_end([*installed, guard.watch()])
        return model, unit_set, extensions
    installed.append(gradient.param_grads.serve())
    edits.begin()
    micro_batches = make_micro_batches(config, passes, modules, train, state, host_inputs)
    installed += micro_batches.handles
    if gradient.policy.begins_early and has_step_pre_hooks(drawn.optimizer):
        raise ConfigError(
            "the optimizer has a step pre-hook, which may change settings of updates that begin in "
            "backward: set zero_optimization.offload_optimizer.update_in_backward to false"
        )
    optimizer = EngineOptimizer(
        *(drawn.optimizer, gradient, passes, meter, train, state.param_names),
        is_given_stepped=isinstance(state.tier, WholeTier),
    )
    engine = Engine(parts, optimizer, gradient, micro_batches, patches, extensions)
    engine.remove_at_end([*installed, guard.watch()])
    if (asked := config.step_records) is not None:
        engine.record(asked.folder, max_bytes=asked.max_bytes, detail_every=asked.detail_every)
    return engine, unit_set, extensions
