"""Facts that must be equal on all ranks in a step, or their updates would not fit together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from zero_core._torch import find_trainable
from zero_core.core.facts import NUM_WORDS
from zero_core.errors import RankMismatchError
from zero_core.optim.train_state import TrainState, describe_groups
from zero_core.sharded.sharded_state import ShardedState


class StepAgreement:
    """Optimizer's groups, trainable parameters, buffers, accumulation, changes of one rank.

    A step sums a hash of them and its square over the ranks, in the reduction that it makes
    anyway: all ``n`` ranks have the same ``h`` if and only if ``n * sum(h * h) == sum(h) ** 2``.
    Sums of 16-bit numbers and their squares are exact in float64, for up to 2**21 ranks. The two
    products are not, but are rounded alike where they are equal.
    """

    def __init__(self, state: ShardedState, train: TrainState) -> None:
        self._buffers = state.common_buffers
        self._control = state.control
        self._train = train
        self._names = state.param_names
        self._params = [p for f in state.params if f.segment.is_trainable for p in f.params]
        self._hashed: Any = None
        self._words = [0.0] * NUM_WORDS
        self._changed: Sequence[str] = ()

    def words(self, changed: Sequence[str]) -> list[float]:
        """Return this rank's hash: `NUM_WORDS` integers below 2**16.

        ``changed`` names the units of which ``param.grad`` was changed.
        """
        self._changed = changed
        facts = (
            describe_groups(self._train.hyperparameters()),
            find_trainable(self._params),
            self._buffers.describe(),
            self._train.accumulation.steps,
            self._train.scaler.scale,
            changed,
        )
        if facts != self._hashed:  # the hash takes longer than the comparison
            self._hashed = facts
            digest = hashlib.sha256(repr(facts).encode()).digest()
            pairs = (digest[2 * i : 2 * i + 2] for i in range(NUM_WORDS))
            self._words = [float(int.from_bytes(pair, "big")) for pair in pairs]
        return self._words

    def confirm(self) -> None:
        """Go on with what was hashed last: all ranks have the same."""
        self._buffers.confirm()

    def refuse(self, step: int) -> None:
        """Raise, on all ranks, with what differs in step number ``step``. All must call it.

        Raises:
            RankMismatchError: always.
        """
        facts = describe_groups(self._train.hyperparameters())
        for param in self._params:
            facts[f"parameter {self._names[id(param)]}"] = (
                "trainable" if param.requires_grad else "frozen"
            )
        facts |= self._buffers.describe()
        facts["gradient_accumulation_steps"] = str(self._train.accumulation.steps)
        facts["loss scale"] = str(self._train.scaler.scale)
        facts["changes"] = ", ".join(self._changed) or "none"
        found = self._control.differences(facts)
        raise RankMismatchError(
            f"rank {self._control.rank}, step {step}: not updated, as ranks differ in {found}. "
            "Every rank must set the same: a schedule that follows the loss needs the mean over "
            "all ranks"
        )
