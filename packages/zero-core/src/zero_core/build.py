"""Composition of an engine from a model and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_core._libc import release_free_pages
from zero_core.blueprint import Blueprint
from zero_core.checkpoint.in_memory.snapshots import MemoryCheckpoints
from zero_core.checkpoint.patches.write import PatchWriter
from zero_core.checkpoint.pretrained import load_pretrained
from zero_core.comm.communicator import Communicator
from zero_core.comm.device import make_transport, share_memory
from zero_core.comm.meter import Links, Meter
from zero_core.comm.topology import Ranks, check_devices, count_per_node, find_ranks
from zero_core.config import Config, load_config
from zero_core.engine import Engine
from zero_core.errors import ConfigError
from zero_core.init.fill import adopt, adopt_buffers, check_values, fill
from zero_core.init.former import FormerModel
from zero_core.init.values import InitialValues
from zero_core.layout.buffers import CommonBuffers
from zero_core.lifecycle import Ownership, check_is_free
from zero_core.optim.train_state import TrainState
from zero_core.plugins import make_collectives, make_param_tier, make_state_tier
from zero_core.protocols import (
    Collectives,
    CollectivesFactory,
    ParamTierFactory,
    ReservingTier,
    StateTierFactory,
)
from zero_core.runtime import hooks
from zero_core.runtime.device_states import DeviceStates
from zero_core.runtime.host_inputs import HostInputs
from zero_core.runtime.param_guard import warn_frozen
from zero_core.runtime.runtime import Runtime
from zero_core.schedules import Schedule, ScheduleFactory, make_scheduler
from zero_core.sharded.facts import Facts
from zero_core.sharded.memory import Memory
from zero_core.sharded.norms import norms_of
from zero_core.sharded.sharded_state import ShardedState
from zero_core.sharded_model import Attach, EngineParts, ShardedModel, for_evaluation
from zero_core.step.gradient import StepGradient
from zero_core.step.optimizer import EngineOptimizer
from zero_core.step.seeds import MicroBatchSeeds
from zero_core.step.states import StateAccess
from zero_core.vertical.schedule import VerticalSchedule
from zero_core.watch.place import OUTSIDE
from zero_core.watch.under_way import under_way

_log = logging.getLogger(__name__)


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
    is_training: bool = True,
) -> ShardedModel:
    """Make a training engine out of a model and a DeepSpeed-style configuration.

    The model is changed in place: its parameters move to the engine's device and memory, and at
    stage 3 hold their values only while their unit is computed. Values and buffers are those of
    rank 0, as in DDP. Every rank must call it, with the same model and configuration.

    A model made under `zero_core.deferred_init` gets its values here, one parameter at a time: no
    rank ever holds more than its shards and one unit. The same holds for parameters that are
    `zero_core.protocols.PartitionedParam`.

    If it fails, model and optimizer are as before, and another call may follow: see [Note: a build
    is a transaction] in `zero_core.init.former`.

    Args:
        model: any module; nothing in it needs to be changed or wrapped.
        config: the configuration, or the path of its JSON file.
        optimizer: a torch optimizer over parameters of ``model`` that steps on gradients; wins over
            the configuration's. It is driven by ``engine.step()`` from now on. One that is not
            known to be elementwise updates whole parameters (`zero_core.optim.whole_tier`).
        lr_scheduler: a torch scheduler over ``optimizer``, or a function that makes one of the
            optimizer; wins over the configuration's. It is stepped by ``engine.step()``.
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
        attach: called with the engine before values move to its memory, for an adapter that adds to
            the engine and the model. If it raises, the build is undone.
        is_training: False for a `ShardedModel`, which evaluates alone.

    Raises:
        ConfigError: the configuration is wrong or does not fit the model, or the model is on the
            meta device and its values are not known, or it has an engine that has not ended. Or the
            optimizer is not served: its step needs a closure, it takes sparse gradients, or a
            setting is for elementwise ones alone.
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
    check_is_free(model)
    drawn = Blueprint.draw(model, resolved, ranks.size, optimizer, is_training=is_training)
    found, layout, optimizer = drawn.found, drawn.layout, drawn.optimizer
    initial = InitialValues(model)
    check_devices(ranks)
    ranks = ranks.limited(resolved.collective_timeout_s)
    control = ranks.connect(resolved.name_waits_within_s)
    control.place.enter("build()")
    drawn.check_ranks_agree(control, resolved)
    check_values(control, initial, has_pretrained=pretrained is not None)
    if ranks.rank == 0 and is_training:
        warn_frozen(layout, found.params)

    per_node = count_per_node(control, ranks)
    resolved = resolved.on_nodes(per_node, ranks.size)
    meter = Meter(Links(ranks.size, per_node, is_ring=ranks.device.type != "cpu"))
    shared = share_memory(control, ranks, per_node)
    is_invariant = resolved.world_size_invariant
    transport = make_transport(ranks, per_node, shared, meter, is_sequential=is_invariant)
    former = FormerModel(model, found.params, optimizer, initial)
    try:
        with under_way("zero_core.build", rank=ranks.rank):
            used = make_collectives(collectives, transport, resolved, layout, per_node)
            communicator = Communicator(used, control, layout.describe_segments())

            if is_invariant:
                _check_invariance(resolved, communicator, ranks)

            memory = Memory(
                found,
                layout,
                resolved,
                rank=ranks.rank,
                device=ranks.device,
                exchanged=shared.zeros
                if shared is not None and communicator.reduces_in_place
                else None,
                is_accelerated=ranks.device.type != "cpu",
                offloaded=make_param_tier(param_tier, layout, resolved, ranks.device),
                has_own_tier=state_tier is not None,
            )
            tier = make_state_tier(state_tier, memory, drawn, resolved, control, meter)
            units = memory.make_units(tier, communicator)
            if used is transport and ranks.size > 1:
                grads = [grads for unit in units for grads in unit.grads]
                transport.prepare_reductions(
                    [
                        (g.segment.padded_numel, g.plan.communicated, g.plan.accumulated)
                        for g in grads
                    ],
                    ranks.device,
                )
            params = sorted(
                (flat for unit in units for flat in unit.params),
                key=lambda flat: flat.segment.index,
            )
            state = ShardedState(
                module=model,
                layout=layout,
                params=tuple(params),
                tier=tier,
                control=control,
                # Each rank keeps its own where they are not broadcast.
                common_buffers=CommonBuffers(
                    model if resolved.broadcast_buffers else nn.Identity()
                ),
                pieces=layout.pieces(ranks.rank, is_sharded=memory.has_sharded_state),
                optimizer=f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
                quantized=found.quantized,
                changes=memory.changes,
            )
            former.ownership = ownership = Ownership(state)
            initial.take(found.params)
            adopt_buffers(model, resolved.buffer_dtype, ranks.device, control, initial)
            state.common_buffers.describe()  # the ranks' were compared; these are moved and cast
            state.common_buffers.confirm()
            initial.give_attributes()

            schedule: Schedule | None = None
            if lr_scheduler is not None:
                schedule = lr_scheduler(optimizer) if callable(lr_scheduler) else lr_scheduler
                if not isinstance(schedule, Schedule):
                    raise ConfigError(
                        f"lr_scheduler is or makes {schedule!r:.100}, which lacks step, state_dict "
                        "or load_state_dict: pass a scheduler as of torch.optim.lr_scheduler, or a "
                        "function of the optimizer that returns one"
                    )
            elif resolved.scheduler is not None:
                schedule = make_scheduler(
                    optimizer, resolved.scheduler.type, resolved.scheduler.params
                )
            train = TrainState(resolved, optimizer.param_groups, schedule, rank=ranks.rank)
            seeds = None
            if is_invariant and is_training:
                seeds = MicroBatchSeeds(model, train, resolved.seed or 0, ranks)
            sizes = len(layout.params), len(layout.units)
            facts = Facts(communicator, ranks.device, *sizes, meter, norms_of(resolved))
            gradient = StepGradient(state, communicator, train, resolved, facts)
            runtime = Runtime(
                units,
                communicator,
                gradient,
                facts,
                has_sharded_params=memory.has_sharded_params,
                quantized=found.quantized,
            )
            modules = [module for _, module, _ in found.units]
            on_host = resolved.has_inputs_on_host and ranks.device.type != "cpu"
            host_inputs = HostInputs(ranks.device) if on_host else None
            installed = hooks.install(runtime, modules, resolved, host_inputs)
            vertical = None
            wanted = resolved.accumulation_schedule
            if is_training and wanted == "auto" and ranks.rank == 0:
                chosen = "vertical: %s" if resolved.is_vertical else "horizontal: no %s"
                _log.info("accumulation_schedule: auto chose " + chosen, "gathers are saved")
            if is_training and (wanted == "vertical" or resolved.is_vertical):
                blocks = [m for u, m in zip(units, modules, strict=True) if u.is_block]
                vertical = VerticalSchedule(blocks, runtime, train, state, host_inputs)
                installed += vertical.handles
            copies = None
            if is_training and resolved.memory_checkpoint is not None:
                copies = MemoryCheckpoints(
                    state, train, resolved.memory_checkpoint, ranks, per_node
                )
            device_states = DeviceStates(
                memory, runtime, state, (tier, used, transport), gradient.edits, copies
            )
            states = StateAccess(state, gradient, runtime, device_states)
            parts = EngineParts(
                resolved,
                ownership,
                state,
                runtime,
                states,
                device_states,
                train,
                memory,
                communicator,
                transport,
                meter,
                ranks.exchange_beside(control.watch),
            )
            if is_training:
                patches = PatchWriter(state)
                driven = EngineOptimizer(
                    optimizer, train, gradient, runtime, meter, state.param_names
                )
                installed += [gradient.param_grads.serve(), gradient.edits.begin()]
                engine: ShardedModel = Engine(
                    parts,
                    optimizer=driven,
                    gradient=gradient,
                    seeds=seeds,
                    copies=copies,
                    patches=patches,
                    vertical=vertical,
                )
            else:
                engine = ShardedModel(parts)
            engine.remove_at_end(installed)
            records = resolved.step_records
            if isinstance(engine, Engine) and records is not None:
                engine.record(
                    records.folder, max_bytes=records.max_bytes, detail_every=records.detail_every
                )
            if attach is not None:
                attach(engine)
            # From here on parameters' values move.
            if pretrained is None:
                rounds = resolved.data_types.master_weights_from == "rounded"
                fill(found, layout, params, tier, control, initial, former, rounds_masters=rounds)
            else:
                load_pretrained(engine, pretrained)
                for flat in params:
                    adopt(flat, former)
            if ranks.device.type != "cpu":
                memory.reserve()
                if isinstance(tier, ReservingTier):
                    grads = [grads for unit in units for grads in unit.grads]
                    tier.reserve([(*memory.spans[g.segment.index], g.plan.offered) for g in grads])
            if is_training:
                patches.start()
            runtime.publish()  # what a tier has rounded otherwise
            engine.publish()
            for flat in params:
                flat.forget_marks()
            control.place.enter(OUTSIDE)
        for flat in params:
            former.give_up(flat)
        release_free_pages()  # what the parameters' own storage left
        return engine
    except BaseException as error:
        try:
            former.restore_after(error)
        finally:
            transport.close()
        raise


def _check_invariance(config: Config, communicator: Communicator, ranks: Ranks) -> None:
    """Refuse what cannot give the same bits at any world size."""
    if not communicator.can_add:
        raise ConfigError(
            "world_size_invariant needs collectives with reduce_add, as of "
            f"zero_core.protocols.AddingCollectives: {type(communicator.transport).__name__} has "
            "none"
        )
    offload = config.zero_optimization.offload_optimizer
    is_split = offload.device_budget is not None or offload.ratio not in (0.0, 1.0, None)
    if offload.device != "none" and is_split and ranks.device.type != "cpu":
        raise ConfigError(
            f"world_size_invariant on {ranks.device.type} with a part of the optimizer on the "
            "host: host and device differ by units in the last place, and each world size has the "
            "border elsewhere. Set zero_optimization.offload_optimizer.ratio to 0 or 1, or name "
            "the host's parameters in offload_optimizer.parameters"
        )
