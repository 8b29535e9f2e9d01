"""Predicted length of offloaded steps against the real tiers in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.experiments.schedule import MODES, Job, Mode, Times, random_times
from zero_core.plan.prediction import StepProgram, StepShape, Transfer, UnitTime
from zero_core.plan.schedule import Schedule

NOTHING = Transfer()


def predicted_s(times: Times, mode: Mode, ratio: float) -> float:
    """Return the seconds of a step of equal blocks, of which the host has the last ones."""
    first = round(times.blocks * (1 - ratio))

    def unit(index: int) -> UnitTime:
        share = 1 / times.blocks if index else 0.0
        on_host = share if index > first else 0.0
        return UnitTime(
            forward_s=share * times.forward_s,
            backward_s=share * times.backward_s,
            renew=NOTHING,
            gather=NOTHING,
            reduce=NOTHING,
            sums=NOTHING,
            host_s=on_host * times.host_s,
            down_s=on_host * times.link_s,
            up_s=on_host * times.link_s,
            fetch_s=0.0,
            read_s=0.0,
            write_s=0.0,
        )

    shape = StepShape(
        micro_steps=1,
        last_block=times.blocks,
        is_accelerated=True,
        threads=1,
        has_peers=False,
        is_gathered=False,
        has_sharded_params=False,
        is_added_by_tier=False,
        is_in_backward=mode == "in backward",
        agree=("main", 0.0),
        device_update_s=(1 - ratio) * times.device_s,
        per_step_s=0.0,
    )
    program = StepProgram(shape, [unit(n) for n in range(times.blocks + 1)], Schedule(None))
    ends = [program.step() for _ in range(4)]
    program.schedule.run()
    return ends[-1].stop - ends[-2].stop


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_as_long_as_those_of_the_real_tiers(mode: Mode) -> None:
    drawn = [Times(), *random_times(3)]
    for times in drawn:
        for ratio in (1.0, 0.4):
            real = Job(times, mode, ratio, chunks_per_block=4).run()
            assert predicted_s(times, mode, ratio) == pytest.approx(real, rel=0.05), (times, ratio)
