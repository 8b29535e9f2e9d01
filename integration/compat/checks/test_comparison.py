"""A case whose sides log unequal numbers of losses fails by itself; the others are run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import Case
from compare import Run, Sides, compare


class _Recorded(Sides):
    """Sides that have run already."""

    def __init__(self, losses: dict[str, list[float]]) -> None:
        super().__init__(Path())
        self._losses = losses

    def run(self, side: str, case: Case) -> Run:
        return Run([self._losses[side]] * 2, [1.0] * 3, 1)


def test_unequal_numbers_of_losses_fail_the_case_alone() -> None:
    case = Case("family", "name", "program.py", ())
    short = _Recorded({case.reference: [1.0, 2.0, 3.0], "zero-engine": [1.0, 2.0]})
    row = compare(case, 1, short)
    assert row["failure"] == "numbers of losses differ: deepspeed has [3], zero-engine has [2]"
    even = _Recorded({case.reference: [1.0, 2.0, 3.0], "zero-engine": [1.0, 2.0, 3.0]})
    assert compare(case, 1, even)["difference"] == 0.0
