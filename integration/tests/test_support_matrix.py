"""docs/support-matrix.md is what the code does today: refusals are asked for again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_cross import Rule, covering
from support_matrix import (
    PAGE,
    RESULTS,
    all_choices,
    build_refusal,
    combinations,
    cross_rules,
    page,
    refusal,
    without_switches,
)

RESULT = json.loads(RESULTS.read_text(encoding="utf-8"))
AGAIN = "write it anew: python integration/tests/support_matrix.py"
RULES = cross_rules(RESULT)
BUILT = [rule for rule in RULES if rule.is_built]
CHOICES = list(all_choices())


def test_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RESULT), AGAIN


def test_every_combination_was_trained_or_is_refused_as_the_page_says() -> None:
    found = RESULT["found"]
    asked = {combination.key: combination for combination in combinations()}
    assert asked.keys() == found.keys(), AGAIN
    for key, combination in asked.items():
        kind, _, reason = found[key].partition(": ")
        assert kind in ("tested", "refused", "build"), (key, found[key])
        assert refusal(combination) == (reason if kind == "refused" else None), (key, AGAIN)


def test_configuration_refuses_what_the_rules_of_the_product_say() -> None:
    """Asks for every 17th combination. The program that writes the page asks for all."""
    for choice in CHOICES[::17]:
        why = {rule.message for rule in RULES if not rule.is_built and rule.refuses(choice)}
        told = refusal(choice)
        assert told in why if why else told is None, (choice.key, AGAIN)


@pytest.mark.parametrize("rule", BUILT, ids=lambda rule: " ".join(v[0] for v in rule.when.values()))
def test_engine_is_refused_as_the_rule_says(rule: Rule, tmp_path: Path) -> None:
    choice = next(c for c in CHOICES if rule.refuses(c) and refusal(c) is None)
    assert build_refusal(without_switches(choice), str(tmp_path)) == rule.message, AGAIN


def test_any_three_settings_that_are_accepted_together_were_trained_together(
    tmp_path: Path,
) -> None:
    accepted = [c for c in CHOICES if not any(rule.refuses(c) for rule in RULES)]
    expected = {choice.key: "tested" for choice in covering(accepted)}
    assert RESULT["cross"]["trained"] == expected, AGAIN
    for choice in accepted[:: len(accepted) // 10]:
        assert build_refusal(without_switches(choice), str(tmp_path)) is None, (choice.key, AGAIN)
