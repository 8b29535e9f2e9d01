"""200 steps that begin before their decision have the bits of the late update.

The grid is optimizer x stage x ranks x share of clipped steps x dtype. Its 45 runs are all of
optimizer x stage x ranks, and any three of the five dimensions have all their combinations among
them, which a test counts. A step is skipped in each run: of fp16 several overflow, else one is NaN
on one rank. Ranks are simulated.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest

from tests.speculation_runs import OPTIMIZERS, Run, both
from zero_core.testing import SimulatedRanks, simulate

STEPS = 200
STAGES, RANKS, DTYPES = (1, 2, 3), (1, 2, 3), ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Clipping:
    """A limit, and the share of the taken steps that it clips.

    Attributes:
        outliers: steps from one with a large norm to the next; fp16 skips some of these.
    """

    limit: float
    outliers: int
    fp16_outliers: int
    least: float
    most: float


CLIPPINGS = {
    "none": Clipping(1e9, 0, 0, 0.0, 0.0),
    "tenth": Clipping(40.0, 10, 6, 0.08, 0.14),
    "all": Clipping(1e-3, 0, 0, 1.0, 1.0),
}
SHIFTS = dict(zip(OPTIMIZERS, [(0, 0), (1, 0), (2, 1), (0, 2), (1, 2)], strict=True))
"""By which clipping and dtype are shifted along stages and ranks: see `_cells`."""

Cell = tuple[str, int, int, str, str]


def _cells() -> list[Cell]:
    """Return optimizer, stage, ranks, clipping and dtype of each run."""
    found = []
    for name, stage, ranks in itertools.product(OPTIMIZERS, STAGES, RANKS):
        clipping, dtype = SHIFTS[name]
        which = list(CLIPPINGS)[(stage + ranks + clipping) % 3]
        found.append((name, stage, ranks, which, DTYPES[(stage + 2 * ranks + dtype) % 3]))
    return found


def test_any_three_dimensions_have_all_their_combinations() -> None:
    dimensions = (tuple(OPTIMIZERS), STAGES, RANKS, tuple(CLIPPINGS), DTYPES)
    for chosen in itertools.combinations(range(len(dimensions)), 3):
        found = {tuple(cell[i] for i in chosen) for cell in _cells()}
        assert found == set(itertools.product(*(dimensions[i] for i in chosen)))


def _compare(ranks: SimulatedRanks, run: Run, clipping: Clipping) -> None:
    found = both(run, ranks, STEPS)
    assert len(found.norms) == len(found.losses) == STEPS
    if run.dtype == "fp16":
        assert found.num_skipped >= 5
    else:
        assert found.num_skipped == 1
    num_clipped = sum(math.isfinite(norm) and norm > clipping.limit for norm in found.norms)
    share = num_clipped / (STEPS - found.num_skipped)
    assert clipping.least <= share <= clipping.most, share
    assert (found.num_kept > 0) == (clipping.least < 1.0)
    assert found.num_undone > 0  # that of a skipped step, at the least


@pytest.mark.parametrize(("optimizer", "stage", "world_size", "clipped", "dtype"), _cells())
def test_200_steps_have_the_bits_of_the_late_update(
    optimizer: str, stage: int, world_size: int, clipped: str, dtype: str
) -> None:
    clipping = CLIPPINGS[clipped]
    run = Run(
        stage=stage,
        dtype=dtype,
        optimizer=optimizer,
        clipping=clipping.limit,
        outliers=clipping.fp16_outliers if dtype == "fp16" else clipping.outliers,
        spoilt_rank=None if dtype == "fp16" else world_size - 1,
        top={"fp16": FP16} if dtype == "fp16" else {},
    )
    simulate(_compare, world_size, run, clipping)


FP16 = {"enabled": True, "hysteresis": 1, "initial_scale_power": 20, "loss_scale_window": 25}
"""The scale doubles after 25 steps, until a step overflows."""
