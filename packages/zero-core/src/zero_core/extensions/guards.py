"""Checks during training: differing replicas, parameters without gradient, repeated backwards."""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque

import torch

from zero_core.config import Config
from zero_core.core.extension import Extension
from zero_core.core.facts import Facts
from zero_core.errors import ConfigError, RankMismatchError, UnusedParameterError
from zero_core.optim.train_state import TrainState
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.update import updates_in_backward
from zero_core.watch.watch import count_ranks

_log = logging.getLogger(__name__)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_NAMED = 4
_NUM_COMPARED = 3
"""Number of previous micro-steps with which a micro-step is compared."""


class ReplicaCheck(Extension):
    """Check that refuses a step if parameters differ between ranks, as after memory corruption.

    Used at stages 0 to 2. Ranks compare a sum of each parameter's bits. Any change of a single bit
    changes the sum.
    """

    def __init__(self, state: ShardedState, config: Config) -> None:
        if updates_in_backward(config):
            raise ConfigError(
                "check_replicas_every: values are compared before the update, and units are "
                "updated in backward: set zero_optimization.offload_optimizer.update_in_backward "
                "to false"
            )
        self._state = state
        self._every = config.check_replicas_every

    @torch.no_grad()
    def before_update(self, number: int) -> None:
        """Compare the parameters of all ranks, every ``check_replicas_every`` steps."""
        state, control = self._state, self._state.control
        if number % self._every or control.world_size == 1:
            return
        held_by = {id(p): p for p in state.module.parameters()}
        params = [held_by[id(p)] for flat in state.params for p in flat.params if id(p) in held_by]
        sums = torch.stack(
            [p.detach().view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64) for p in params]
        )
        held = torch.tensor([state.holds_value(param) for param in params], dtype=torch.int64)
        every_sum, every_held = (
            control.gather(own).view(control.world_size, -1) for own in (sums, held)
        )
        is_different = (every_sum != every_sum[0]).any(0) & every_held.bool().all(0)
        columns = is_different.nonzero().flatten().tolist()
        if columns:
            found = [
                f"{state.param_names[id(params[n])]}: {_odd_ranks(every_sum[:, n].tolist())}"
                for n in columns[:_MAX_NAMED]
            ]
            more = f"; and {len(columns) - _MAX_NAMED} more" if len(columns) > _MAX_NAMED else ""
            raise RankMismatchError(
                f"rank {control.rank}, step {number}: not updated, as values differ between ranks "
                f"({'; '.join(found)}{more}): memory was corrupted, or a program wrote to it on "
                "one rank alone. Go on from a checkpoint, without the machine if it happens again"
            )


def _odd_ranks(sums: list[int]) -> str:
    """Describe which ranks differ from the majority."""
    (value, num), *others = Counter(sums).most_common()
    odd = [rank for rank, found in enumerate(sums) if found != value]
    if others and others[0][1] == num:
        return f"{count_ranks(range(len(sums)))} have no majority"
    return f"{count_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the others"


class UnusedParameters(Extension):
    """Check that refuses a step in which a rank left a trainable parameter unused.

    Used at stages 1 and 2 with ``ignore_unused_parameters`` false. All ranks know how many ranks
    used each parameter, so all ranks raise. A rank without any gradient had no data: it is ignored.
    """

    def __init__(self, state: ShardedState, facts: Facts, train: TrainState) -> None:
        self._state = state
        self._facts = facts
        self._train = train

    def agreed(self) -> None:
        state, facts = self._state, self._facts
        num_active, num_ranks = max(1, facts.counts("with gradient")[0]), facts.counts("used")
        missed = [
            f"{spec.name} on {num_active - num:.0f} of {num_active:.0f} ranks"
            for spec, num in zip(state.layout.params, num_ranks, strict=True)
            if num < num_active and spec.is_trainable
            if state.module.get_parameter(spec.name).requires_grad
        ]
        if missed:
            raise UnusedParameterError(
                f"rank {state.control.rank}, step {self._train.global_steps + 1}: {len(missed)} "
                f"trainable parameters got no gradient ({', '.join(missed[:_MAX_NAMED])}), and "
                "zero_optimization.ignore_unused_parameters is false: set it to true to leave them "
                "alone in such a step, or use every one in the loss"
            )


class RepeatedRounds(Extension):
    """One warning if a gradient probably contains two runs of the same program lines.

    A round is a backward, outside of ``no_sync``, of a forward that began after the previous
    backward. Several rounds in a micro-step are legal: two losses, each with a separate forward.
    But they also occur if the user interrupts a notebook between backward and ``step`` and runs the
    same lines again. This class assumes such a repetition in three cases: a micro-step has more
    rounds than the micro-steps before it, the first micro-step had more than those after it, or an
    interactive interpreter has reported an error (``sys.last_value``) since the previous round.
    """

    def __init__(self, train: TrainState, *, rank: int) -> None:
        self._train = train
        self._rank = rank
        self._num_rounds = 0
        self._before: deque[int] = deque(maxlen=_NUM_COMPARED)  # rounds per ended micro-step
        self._is_first_known = False
        self._place = 0, 0  # micro-step, and how often gradients were dropped
        self._reported = 0  # id of the last reported error
        self._is_told = False

    def begin_backward(self, *, is_new: bool) -> None:
        if not is_new:
            return
        train = self._train
        place = train.micro_steps, train.num_drops
        if place[0] > self._place[0] and self._num_rounds:
            self._before.append(self._num_rounds)
            if not self._is_first_known and len(self._before) == _NUM_COMPARED:
                self._is_first_known = True
                first, *others = self._before
                if first > max(others):
                    self._warn(
                        "the first micro-step added up %d backwards, those after it fewer: if the "
                        "program was interrupted and began again there, its step was too long. "
                        "Build the engine again from the first weights. engine.zero_grad() drops a "
                        "gradient",
                        first,
                    )
        if place != self._place:
            self._num_rounds = 0
        self._place = place
        reported, self._reported = self._reported, id(vars(sys).get("last_value"))
        self._num_rounds += 1
        is_after_error = self._num_rounds > 1 and reported != self._reported
        if is_after_error or 0 < max(self._before, default=0) < self._num_rounds:
            self._warn(
                "backward adds to the gradient of %d that no step() has taken: if the program was "
                "interrupted and began again, call engine.zero_grad() and run forward and backward "
                "again, or the step is too long",
                self._num_rounds - 1,
            )

    def _warn(self, text: str, number: int) -> None:
        if not self._is_told:
            self._is_told = True
            place = (self._rank, self._train.global_steps + 1)
            _log.warning("rank %d, step %d: " + text + ". This is said once", *place, number)
