"""Comparison of values that every rank has, which finds memory that was corrupted in silence."""

from __future__ import annotations

from collections import Counter

import torch

from zero_core.config import Config
from zero_core.core.extension import Extension
from zero_core.errors import ConfigError, RankMismatchError
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.update import updates_in_backward
from zero_core.watch.beats import count_ranks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_NAMED = 4


class ReplicaCheck(Extension):
    """Refuses a step if parameters differ between ranks, at stages 0 to 2.

    Ranks compare a sum of each parameter's bits, which any change of a single bit changes.
    """

    def __init__(self, state: ShardedState, config: Config) -> None:
        """Check the model of ``state`` as often as ``config`` asks for.

        Raises:
            ConfigError: units are updated before that.
        """
        if updates_in_backward(config):
            raise ConfigError(
                "check_replicas_every: values are compared before the update, and units are "
                "updated in backward: set zero_optimization.offload_optimizer.update_in_backward "
                "to false"
            )
        self._state = state
        self._every = config.check_replicas_every

    def before_update(self, number: int) -> None:
        """Compare, if it is due.

        Raises:
            RankMismatchError: on all ranks, with the parameters and the ranks that are not of the
                majority.
        """
        if number % self._every == 0 and self._state.control.world_size > 1:
            _compare(self._state, number)


@torch.no_grad()
def _compare(state: ShardedState, step: int) -> None:
    held_by = {id(p): p for p in state.module.parameters()}
    params = [held_by[id(p)] for flat in state.params for p in flat.params if id(p) in held_by]
    sums = torch.stack(
        [p.detach().view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64) for p in params]
    )
    held = torch.tensor([state.holds_value(param) for param in params], dtype=torch.int64)
    control = state.control
    every_sum, every_held = (
        control.gather(own).view(control.world_size, -1) for own in (sums, held)
    )
    is_different = (every_sum != every_sum[0]).any(0) & every_held.bool().all(0)
    columns = is_different.nonzero().flatten().tolist()
    if columns:
        names = [state.param_names[id(params[column])] for column in columns]
        found = [
            f"{name}: {_odd_ranks(every_sum[:, column].tolist())}"
            for name, column in list(zip(names, columns, strict=True))[:_MAX_NAMED]
        ]
        more = f"; and {len(columns) - _MAX_NAMED} more" if len(columns) > _MAX_NAMED else ""
        raise RankMismatchError(
            f"rank {control.rank}, step {step}: not updated, as values differ between ranks "
            f"({'; '.join(found)}{more}): memory was corrupted, or a program wrote to it on one "
            "rank alone. Go on from a checkpoint, without the machine if it happens again"
        )


def _odd_ranks(sums: list[int]) -> str:
    """Say which ranks do not have the value of the majority."""
    (value, num), *others = Counter(sums).most_common()
    odd = [rank for rank, found in enumerate(sums) if found != value]
    if others and others[0][1] == num:
        return f"{count_ranks(range(len(sums)))} have no majority"
    return f"{count_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the others"
