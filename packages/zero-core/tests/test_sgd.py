"""SGD with momentum, where parameters get their first gradients in different steps."""

from typing import Any

import pytest

from zero_core.testing import LR, Case, run_ddp, run_engine, simulate

CASE = Case(stage=2, top={"optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}})


def _compare(ranks: Any) -> None:
    ours = run_engine(CASE, ranks.rank, 4, process_group=ranks)
    theirs = run_ddp(CASE, ranks.rank, 4, ranks)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_join_later_start_their_momentum(world_size: int) -> None:
    simulate(_compare, world_size)
