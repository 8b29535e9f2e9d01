"""Every combination of ten settings: refused by a rule, trained, or trained in all its triples.

`support_matrix.py` asks the configuration for each of the 51,840 combinations, builds an engine for
each one that it accepts, and trains so many that every three settings that are accepted together
are trained together. `find_rules` puts all refusals down to pairs of settings.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_core.testing import Case

Keys = Mapping[str, Any]
Setting = tuple[str, str]
"""An axis, and a value on it."""
OFF_ON = ("off", "on")
SWITCHES: Mapping[str, Keys] = {
    "qwZ": {"zero_quantized_weights": True},
    "hpZ": {"zero_hpz_partition_size": 2},
    "qgZ": {"zero_quantized_gradients": True},
}
"""Axes that are keys of ``zero_optimization``."""
RULE_AXES = 2
"""Settings in a rule."""
STRENGTH = 3
"""Settings that are trained together wherever they are accepted together."""


@dataclass(frozen=True)
class Rule:
    """Two settings that are refused together, with any others.

    Attributes:
        when: both, each with all of the values that one message refuses.
        is_built: whether it is the building of an engine that refuses them, not the configuration.
        message: the error's.
    """

    when: Mapping[str, Sequence[str]]
    is_built: bool
    message: str

    def refuses(self, choice: Choice) -> bool:
        """Return whether the combination has these settings."""
        return all(choice.settings[axis] in values for axis, values in self.when.items())


@dataclass(frozen=True)
class Choice:
    """One combination.

    Attributes:
        settings: a value by axis.
        parts: by axis and value, what it adds to ``zero_optimization``.
        top: by axis and value, what it adds at the top of the configuration.
    """

    table = "cross"

    settings: Mapping[str, str]
    parts: Mapping[Setting, Keys]
    top: Mapping[Setting, Keys]

    @property
    def key(self) -> str:
        """The name of its result."""
        return f"cross: {'; '.join(f'{axis} {value}' for axis, value in self.settings.items())}"

    @property
    def dtype(self) -> str:
        """The dtype of the weights in forward and backward."""
        return self.settings["dtype"]

    @property
    def states(self) -> str:
        """Where the optimizer's states are."""
        return self.settings["states"]

    @property
    def is_exact(self) -> bool:
        """Whether no message is quantized."""
        return self.settings["qwZ"] == self.settings["qgZ"] == "off"

    def case(self, folder: str) -> Case:
        """Return its configuration, with a folder for files."""
        zero: dict[str, Any] = {}
        top: dict[str, Any] = {}
        for setting in self.settings.items():
            zero |= self.parts.get(setting, {})
            top |= self.top.get(setting, {})
        found = json.loads(json.dumps({"zero": zero, "top": top}).replace("NVME", folder))
        return Case(int(self.settings["stage"]), self.dtype, zero=found["zero"], top=found["top"])

    def tuples(self, size: int) -> Iterator[tuple[Setting, ...]]:
        """Yield all sets of ``size`` of its settings."""
        return itertools.combinations(self.settings.items(), size)


def choices(
    axes: Mapping[str, Iterable[str]], parts: Mapping[Setting, Keys], top: Mapping[Setting, Keys]
) -> Iterator[Choice]:
    """Yield the product of ``axes``."""
    for values in itertools.product(*axes.values()):
        yield Choice(dict(zip(axes, values, strict=True)), parts, top)


def find_rules(told: Sequence[tuple[Choice, str | None]]) -> list[Rule]:
    """Return pairs of settings that explain every refusal.

    Args:
        told: every combination and why it is refused, "build: ..." if by an engine's building; None
            if it is accepted.

    Raises:
        AssertionError: a refusal needs a third setting, or two with one pair say different things.
    """
    accepted = {p for choice, why in told if why is None for p in choice.tuples(RULE_AXES)}
    alone: dict[tuple[Setting, ...], set[str]] = defaultdict(set)
    others = []
    for choice, why in told:
        if why is not None:
            pairs = [pair for pair in choice.tuples(RULE_AXES) if pair not in accepted]
            assert pairs, f"{choice.key} is refused, and each of its pairs is accepted elsewhere"
            if len(pairs) == 1:
                alone[pairs[0]].add(why)
            others.append(pairs)
    assert all(any(pair in alone for pair in pairs) for pairs in others)
    assert all(len(messages) == 1 for messages in alone.values()), alone
    values: dict[tuple[str, str, str], dict[str, dict[str, None]]] = {}
    for ((first, one), (second, other)), messages in alone.items():
        when = values.setdefault((first, second, *messages), {first: {}, second: {}})
        when[first][one] = when[second][other] = None
    rules = [
        Rule(
            {axis: list(of) for axis, of in when.items()}, "build: " in why, why.partition(": ")[2]
        )
        for (*_, why), when in values.items()
    ]
    for choice, why in told:
        assert any(rule.refuses(choice) for rule in rules) == (why is not None), choice.key
    return rules


def covering(accepted: Sequence[Choice], strength: int = STRENGTH) -> list[Choice]:
    """Return a few combinations that have every set of ``strength`` settings of ``accepted``.

    Of 300 that are drawn for a set that is missing, the one with the most sets that are missing.
    """
    draw = random.Random(0)
    having: dict[tuple[Setting, ...], list[int]] = defaultdict(list)
    for number, choice in enumerate(accepted):
        for one in choice.tuples(strength):
            having[one].append(number)
    missing = set(having)
    taken: list[int] = []
    for one in having:
        if one in missing:
            drawn = draw.sample(having[one], min(300, len(having[one])))
            best = max(drawn, key=lambda n: len(missing.intersection(accepted[n].tuples(strength))))
            missing.difference_update(accepted[best].tuples(strength))
            taken.append(best)
    return [accepted[number] for number in sorted(taken)]
