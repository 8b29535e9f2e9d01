"""Refusal of steps in which a rank does not use a trainable parameter."""

from __future__ import annotations

from zero_core.core.extension import Extension
from zero_core.core.facts import Facts
from zero_core.errors import UnusedParameterError
from zero_core.optim.train_state import TrainState
from zero_core.sharded.sharded_state import ShardedState


class UnusedParameters(Extension):
    """Refuses a step in which a rank left a trainable parameter unused.

    It is there at stages 1 and 2 with ``ignore_unused_parameters`` false. All ranks know what each
    has used, so all raise. A rank without any gradient had no data.
    """

    def __init__(self, state: ShardedState, facts: Facts, train: TrainState) -> None:
        self._state = state
        self._facts = facts
        self._train = train

    def agreed(self) -> None:
        """Check the step.

        Raises:
            UnusedParameterError: with the parameters.
        """
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
                f"trainable parameters got no gradient ({', '.join(missed[:4])}), and "
                "zero_optimization.ignore_unused_parameters is false: set it to true to leave them "
                "alone in such a step, or use every one in the loss"
            )
