"""The extensions of an engine: which ones `zero_core.build` creates for a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

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

_T = TypeVar("_T")


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


def _given(block: _T | None) -> _T:
    assert block is not None, "the configuration has the key"
    return block


FIRST: dict[str, Callable[[Site], Extension]] = {
    "check_replicas_every": lambda site: ReplicaCheck(site.state, site.config),
    "zero_optimization.ignore_unused_parameters": lambda site: UnusedParameters(
        site.state, site.facts, site.train
    ),
}
"""Constructors of extensions that handle events before the user's, by configuration key."""
LAST: dict[str, Callable[[Site], Extension]] = {
    # Last, because it records only backwards that no other extension has refused.
    "world_size_invariant": lambda site: Invariance(
        site.state.module, site.config, site.train, site.ranks
    ),
    # Last, because it copies states at a step's end, after other extensions changed theirs.
    "memory_checkpoint": lambda site: MemoryCheckpoints(
        site.state, site.train, _given(site.config.memory_checkpoint), site.ranks, site.per_node
    ),
}
"""Constructors of extensions that handle events after the user's, by configuration key."""
WRAPPERS: dict[str, Callable[..., Removable]] = {
    "tiled_compute": lambda site, passes, modules, host_inputs: TiledForwards(
        modules[0], _given(site.config.tiled_compute), passes
    ),
    "activation_checkpointing": lambda site, passes, modules, host_inputs: recompute_blocks(
        [modules[unit.index] for unit in passes.units.blocks],
        passes,
        host_inputs,
        is_on_cpu=_given(site.config.activation_checkpointing).cpu_checkpointing,
    ),
}
"""Functions that wrap forwards of modules, by key of the configuration."""


def check_extensions(config: Config) -> None:
    """Raise ConfigError for a configuration key whose extension is in no table."""
    for key in config.extension_keys:
        if key not in FIRST | LAST | WRAPPERS:
            raise ConfigError(
                f"{key}: no table of zero_core.extensions has an extension for it: take the key "
                "out of the configuration, or add what serves it to a table"
            )


def make_extensions(site: Site, given: Sequence[Extension]) -> list[Extension]:
    """Return extensions in the order in which they handle an event. Every rank must call it."""
    keys, rank = site.config.extension_keys, site.ranks.rank
    return [
        *HeartbeatFile.wanted(rank),
        *(FIRST[key](site) for key in keys if key in FIRST),
        *given,
        *(LAST[key](site) for key in keys if key in LAST),
    ]


def wrap_forwards(
    site: Site, passes: Passes, modules: Sequence[nn.Module], host_inputs: HostInputs | None
) -> list[Removable]:
    """Wrap or hook forwards of ``modules``: the module of each unit. The first one is the model.

    ``host_inputs`` moves inputs of blocks from an accelerator to the host and back.
    """
    keys = site.config.extension_keys
    found = [WRAPPERS[k](site, passes, modules, host_inputs) for k in keys if k in WRAPPERS]
    return found + hook_components(passes, modules, site.state)
