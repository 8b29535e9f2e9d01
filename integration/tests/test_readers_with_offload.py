"""Reads of a parameter while the host updates it, with its value or an error by name."""

from __future__ import annotations

import pytest

import zero_core
from zero_core.testing import Case, on_ranks
from zero_core.testing.readers import AFTER, BEFORE, Watched, check_truth, read_everywhere

SHARDED = "parameter blocks.1.inner.weight was read where stage 3 holds only"
EARLY = "parameter blocks.1.inner.weight was read between backward and step()"


@pytest.mark.parametrize("further", [{}, {"update_in_backward": True}], ids=["late", "early"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_each_reader_has_the_value_or_an_error_at_each_moment(ranks, stage, dtype, further):
    offload = {"device": "cpu", "ratio": 0.5 if dtype == "bf16" else 1.0}
    is_early = bool(further)
    case = Case(stage, dtype, zero={"offload_optimizer": {**offload, **further}})
    config = {**case.config(), "check_grad_overflow": not is_early}
    engine = zero_core.build(Watched(), config, process_group=ranks)
    found, _ = read_everywhere(engine, ranks.rank, 4)
    here = {"forward of block 1", "forward of block 1, evaluating", BEFORE, AFTER}
    refused = {moment for moment, _ in found} - here if stage == 3 else set()
    refusals = dict.fromkeys(refused, SHARDED)
    if is_early and stage < 3:
        refusals["before the step"] = EARLY
    check_truth(found, refusals)
