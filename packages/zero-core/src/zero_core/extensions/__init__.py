"""The extensions of an engine: which ones `zero_core.build` creates for a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from zero_core.checkpoint.in_memory.snapshots import MemoryCheckpoints
from zero_core.comm.groups import Ranks
from zero_core.config import Config
from zero_core.core.extension import PREFIX, Extension
from zero_core.core.facts import Facts
from zero_core.core.passes import Passes
from zero_core.errors import ConfigError
from zero_core.extensions.components import hook_components
from zero_core.extensions.guards import ReplicaCheck, UnusedParameters
from zero_core.extensions.heartbeat import HeartbeatFile
from zero_core.extensions.invariance import Invariance
from zero_core.lifecycle import Ownership, Removable
from zero_core.optim.train_state import TrainState
from zero_core.runtime.host_inputs import HostInputs, recompute_blocks
from zero_core.sharded.sharded_state import ShardedState
from zero_core.tiled import TiledForwards


def attach_extensions(
    given: Sequence[Extension], state: ShardedState, ownership: Ownership
) -> None:
    """Attach the user's extensions. ``ownership`` removes them when the engine ends.

    Raises ConfigError for a state with a wrong name, shape, dtype or device.
    """
    for extension in given:
        ownership.hooks.append(extension)
        extension.attach(state)
        for name, values in extension.states().items():
            kind = f"{type(extension).__name__}.states() has {name!r}"
            if f"{PREFIX}{name}" in state.extension_states() or not name.isidentifier():
                raise ConfigError(f"{kind}: expected an identifier that no other extension has")
            is_flat = values.shape == (state.local_numel,) and values.device.type == "cpu"
            if not (is_flat and values.is_floating_point()):
                raise ConfigError(
                    f"{kind} of shape {tuple(values.shape)}, {values.dtype} on {values.device}: "
                    f"expected [{state.local_numel}] of a floating dtype, on the CPU"
                )
        state.extensions.append(extension)


class Site(NamedTuple):
    """Arguments for the constructors of extensions."""

    config: Config
    state: ShardedState
    train: TrainState
    facts: Facts
    ranks: Ranks
    per_node: int


def make_extensions(site: Site, given: Sequence[Extension]) -> list[Extension]:
    """Return extensions in the order in which they handle an event. Every rank must call it."""
    config, state, train = site.config, site.state, site.train
    zero = config.zero_optimization
    first: list[Extension] = [*HeartbeatFile.wanted(site.ranks.rank)]
    if config.check_replicas_every:
        first.append(ReplicaCheck(state, config))
    if zero.stage in (1, 2) and not zero.ignore_unused_parameters:
        first.append(UnusedParameters(state, site.facts, train))
    last: list[Extension] = []
    # Last, because it records only backwards that no other extension has refused.
    if config.world_size_invariant:
        last.append(Invariance(state.module, config, train, site.ranks))
    # Last, because it copies states at a step's end, after other extensions changed theirs.
    if (copies := config.memory_checkpoint) is not None:
        last.append(MemoryCheckpoints(state, train, copies, site.ranks, site.per_node))
    return [*first, *given, *last]


def wrap_forwards(
    site: Site, passes: Passes, modules: Sequence[nn.Module], host_inputs: HostInputs | None
) -> list[Removable]:
    """Wrap or hook forwards of ``modules``: the module of each unit. The first one is the model.

    ``host_inputs`` moves inputs of blocks from an accelerator to the host and back.
    """
    config, wrapped = site.config, list[Removable]()
    if (tiles := config.tiled_compute) is not None:
        wrapped.append(TiledForwards(modules[0], tiles, passes))
    if config.is_recomputed:
        blocks = [modules[unit.index] for unit in passes.units.blocks]
        is_on_cpu = config.has_inputs_on_host
        wrapped.append(recompute_blocks(blocks, passes, host_inputs, is_on_cpu=is_on_cpu))
    return wrapped + hook_components(passes, modules, site.state)
