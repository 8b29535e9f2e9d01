"""The extensions of an engine, from its configuration: what `zero_core.build` attaches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero_core.checkpoint.in_memory.snapshots import MemoryCheckpoints
from zero_core.comm.topology import Ranks
from zero_core.config import Config
from zero_core.core.extension import PREFIX, Extension
from zero_core.core.facts import Facts
from zero_core.core.hooks import ModuleUnits
from zero_core.core.passes import Passes
from zero_core.errors import ConfigError
from zero_core.extensions.heartbeat import HeartbeatFile
from zero_core.extensions.invariance import Invariance
from zero_core.extensions.repeated_rounds import RepeatedRounds
from zero_core.extensions.replicas import ReplicaCheck
from zero_core.extensions.unused import UnusedParameters
from zero_core.lifecycle import Ownership, Removable
from zero_core.optim.train_state import TrainState
from zero_core.runtime.host_inputs import HostInputs
from zero_core.runtime.recompute import Recompute
from zero_core.sharded.sharded_state import ShardedState
from zero_core.tiled.modules import TiledForwards


def attach_extensions(
    given: Sequence[Extension], state: ShardedState, ownership: Ownership
) -> None:
    """Attach the program's extensions, which ``ownership`` removes at the end or if a build fails.

    Raises:
        ConfigError: a state of one could not be saved and loaded.
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


def make_extensions(
    config: Config,
    state: ShardedState,
    train: TrainState,
    facts: Facts,
    ranks: Ranks,
    per_node: int,
    given: Sequence[Extension],
) -> list[Extension]:
    """Return what follows a training, in the order of their events. Every rank must call it.

    Raises:
        ConfigError: the ranks cannot do what is asked for.
    """
    zero = config.zero_optimization
    found: list[Extension] = [*HeartbeatFile.wanted(ranks.rank)]
    if config.check_replicas_every:
        found.append(ReplicaCheck(state, config))
    if not zero.ignore_unused_parameters and zero.stage in (1, 2):
        found.append(UnusedParameters(state, facts, train))
    found.append(RepeatedRounds(train, rank=ranks.rank))
    found += given
    # It notes a backward that nobody has refused, so it comes behind all that may refuse one.
    if config.world_size_invariant:
        found.append(Invariance(state.module, config, train, ranks))
    # It copies states at a step's end, when the others have changed theirs.
    if config.memory_checkpoint is not None:
        found.append(MemoryCheckpoints(state, train, config.memory_checkpoint, ranks, per_node))
    return found


def wrap_forwards(
    config: Config, passes: Passes, modules: Sequence[nn.Module], host_inputs: HostInputs | None
) -> list[Removable]:
    """Wrap forwards of the units' ``modules``, the model first: tiles, and recomputed blocks.

    ``host_inputs`` move the inputs of blocks on an accelerator to the host and back.
    """
    found: list[Removable] = []
    if config.tiled_compute is not None:
        found.append(TiledForwards(modules[0], config.tiled_compute, ModuleUnits(passes)))
    checkpointing = config.activation_checkpointing
    if checkpointing is not None and checkpointing.enabled:
        blocks = [modules[unit.index] for unit in passes.units.blocks]
        is_on_cpu = checkpointing.cpu_checkpointing
        found.append(Recompute(blocks, passes, host_inputs, is_on_cpu=is_on_cpu))
    return found
