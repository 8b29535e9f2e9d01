"""docs/support-matrix.md is what the code does today: refusals are asked for again."""

from __future__ import annotations

import json

from support_matrix import PAGE, RESULTS, combinations, page, refusal

RESULT = json.loads(RESULTS.read_text(encoding="utf-8"))
AGAIN = "write it anew: python integration/tests/support_matrix.py"


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
