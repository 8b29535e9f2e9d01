"""Predicted step times: rates, closed forms of lanes, real tiers, choices and placements."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.experiments.schedule.job import MODES, Job, Mode, Times
from lab.experiments.schedule.program import random_times
from zero_core import ConfigError
from zero_core.footprint.result import AS_CONFIGURED
from zero_core.testing import Case
from zero_engine.planning import Calibration, Curve, Rates, plan
from zero_engine.planning.prediction import Schedule, StepShape, UnitTime, run_steps
from zero_engine.planning.search import WORTH

WIDTH, BLOCKS, TOKENS = 64, 4, 32
FREE = Curve(((1.0, 0.0),))
NAMES = (
    *("memory.float32", "operator", "pass", "step", "update.device.float32"),
    *("gather.within", "reduce.within", "agree.within"),
    *("update.host.float32", "copy.to_host", "copy.to_device"),
)


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def make_config(stage: int, *, micro_batch: int = 2, **further: Any) -> dict[str, Any]:
    return Case(stage, top={"train_micro_batch_size_per_gpu": micro_batch, **further}).config()


def planned(config: dict[str, Any], world_size: int = 2, **how: Any) -> Any:
    """Plan `Blocks`. Returns `Any`, because fields may be None without rates."""
    with torch.device("meta"):
        model = Blocks()
        x = torch.zeros(config["train_micro_batch_size_per_gpu"], TOKENS, WIDTH)
    return plan(model, config, world_size, **{"example_inputs": [x], **how})


def calibration(**curves: Curve) -> Calibration:
    """Return an accelerator on which everything except ``curves`` takes no time."""
    named = {name.replace("__", "."): curve for name, curve in curves.items()}
    rates = Rates(1, 1, None, {**dict.fromkeys(NAMES, FREE), "matmul.float32": FREE, **named})
    return Calibration("an accelerator", "by hand", (rates,))


def test_recomputation_adds_a_forward_of_the_blocks_but_saves_bytes() -> None:
    fast = calibration(matmul__float32=Curve.of_rate(1e9))
    config = make_config(0)
    plain, again = (
        planned(c, 1, calibration=fast)
        for c in (config, {**config, "activation_checkpointing": {}})
    )
    forward = 2 * 2 * TOKENS * WIDTH**2 * BLOCKS / 1e9
    # The first product computes no gradient of its input.
    assert plain.step_time.total_s == pytest.approx((3 - 1 / BLOCKS) * forward)
    assert plain.step_time.bound == "compute"
    assert again.step_time.total_s - plain.step_time.total_s == pytest.approx(forward)
    saved = 2 * TOKENS * WIDTH * 4  # bytes of one tensor between two modules
    # The loss saves its input. Recomputation saves each block's input, and one block's GELU input.
    assert plain.memory.device["activations"] == (2 * BLOCKS + 1) * saved
    assert again.memory.device["activations"] == (BLOCKS + 2) * saved


def test_communication_hides_behind_computation_where_it_is_shorter() -> None:
    fast_link = Curve.of_rate(1e9)
    found = planned(
        make_config(3),
        calibration=calibration(
            matmul__float32=Curve.of_rate(1e9), gather__within=fast_link, reduce__within=fast_link
        ),
    )
    lanes = found.step_time.lanes
    sent = sum(t.sent_bytes for t in found.traffic if t.collective != "all_reduce")
    assert lanes["gather"] + lanes["reduce"] == pytest.approx(sent / 1e9)
    assert lanes["gather"] > 0
    # The first gather and the last reduction overlap with nothing.
    first_and_last = (lanes["gather"] + lanes["reduce"]) / BLOCKS
    assert found.step_time.total_s <= lanes["compute"] + first_and_last
    spans = found.step_time.spans
    assert {span.lane for span in spans} == {"compute", "gather", "reduce"}
    assert max(span.stop_s for span in spans) <= found.step_time.total_s * (1 + 1e-9)


@pytest.mark.parametrize("cores", [None, 2.0])
def test_work_overlaps_between_resources_and_is_slowed_where_cores_are_missing(cores):
    schedule = Schedule(cores=cores)
    computed = schedule.add("main", "compute", "a", 2.0, cores=2.0)
    updated = schedule.add("host", "host", "b", 1.0, cores=2.0)
    sent = schedule.add("link", "reduce", "c", 2.5)
    last = schedule.add("main", "compute", "d", 1.0, [sent])
    schedule.run()
    stops = [work.stop for work in (updated, computed, sent, last)]
    assert stops == pytest.approx([2.0, 3.0, 2.5, 4.0] if cores else [1.0, 2.0, 2.5, 3.5])


def test_the_fastest_that_fits_is_chosen_with_reasons_else_the_smallest() -> None:
    slow_link = Curve.of_rate(1e6)
    rates = calibration(
        matmul__float32=Curve.of_rate(1e9), gather__within=slow_link, reduce__within=slow_link
    )
    found = planned(make_config(3), calibration=rates)
    assert found.best.stage < 3  # stages 0 to 2 gather less
    timed = [c for c in found.choices if c.step_time is not None]
    assert found.best.sample_s * (1 - WORTH) <= min(c.sample_s for c in timed)
    said = " ".join(found.reasons)
    assert f"Stage {found.best.stage} in place of 3: gathers take" in said
    assert "bounds it" in said
    limit = found.best.device_bytes - 1
    tight = planned(make_config(3), calibration=rates, device_memory=limit)
    assert tight.best.device_bytes <= limit
    least_s = min(c.sample_s for c in timed if c.device_bytes <= limit)
    assert tight.best.sample_s * (1 - WORTH) <= least_s
    content = json.loads(found.to_json())
    assert content["configured"]["step_time"]["spans"]
    assert [table.title for table in found.tables()][-2] == "Predicted step"
    # The host's update is free. The device's update costs less than the plan's tolerance WORTH.
    free_host = {"update__device__float32": Curve.of_rate(1e9)}
    rates = calibration(gather__within=slow_link, reduce__within=slow_link, **free_host)
    found = planned(make_config(3), calibration=rates)
    fastest = min(found.choices, key=lambda choice: choice.sample_s)
    assert fastest.ratio > found.best.ratio == 0.0
    least_s = fastest.sample_s
    close = [c for c in found.choices if not c.ratio and c.sample_s * (1 - WORTH) <= least_s]
    sizes = [c.device_bytes for c in close]
    assert found.best.device_bytes == min(sizes) < max(sizes)


def test_rates_of_another_kind_of_machine_are_refused_and_of_no_use_without_inputs() -> None:
    limit = planned(make_config(3), example_inputs=None).configured.device_bytes
    config = make_config(0)
    plain = planned(config, example_inputs=None, device_memory=limit)
    found = planned(config, example_inputs=None, device_memory=limit, calibration=calibration())
    assert (found.best.stage, found.best.step_time) == (plain.best.stage, None)
    assert found.advice == plain.advice
    with pytest.raises(ConfigError, match="calibration of an accelerator"):
        planned(make_config(0), 1, calibration=calibration(), device_type="cpu")


def machine(cores: int | None, *, has_disk: bool = True) -> Calibration:
    once, rate = Curve(((1.0, 1e-5),)), Curve.of_rate
    curves = {
        **dict.fromkeys(("operator", "pass", "step"), once),
        **dict.fromkeys(("memory.float32", "matmul.float32", "copy.to_device"), rate(1e9)),
        "update.device.float32": rate(1e8),
        "update.host.float32": rate(7e5),
        "update.host.float32.int8": rate(1.4e6),
        **{f"{verb}.within": rate(1e9) for verb in ("gather", "reduce", "agree")},
        "copy.to_host": rate(1e9),
        **(dict.fromkeys(("file.read", "file.write"), rate(1e8)) if has_disk else {}),
    }
    return Calibration("a machine", "by hand", (Rates(2, 1, cores, curves),))


def placed_config(stage: int, **zero: Any) -> dict[str, Any]:
    top = {"check_grad_overflow": False, "train_micro_batch_size_per_gpu": 1}
    return Case(stage, "bf16", zero=zero, top=top).config()


def timed(config: dict[str, Any], cores: int | None, **how: Any) -> Any:
    how = {"calibration": machine(cores), "nvme_path": "/nvme", **how}
    return planned(config, device_type="accelerator" if cores is None else "cpu", **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cores", [None, 2])
def test_a_placement_is_predicted_as_its_configuration(cores: int | None) -> None:
    """The plan of a choice's configuration predicts the same step time as the choice."""
    offload = {"device": "cpu", "ratio": 0.5}
    config = placed_config(3, offload_optimizer=offload)
    found = timed(config, cores)
    choices = [c for c in found.choices if c.placement != AS_CONFIGURED]
    placed = {c.placement.words: c for c in sorted(choices, key=lambda c: c.ratio == 0.5)}
    expected = {"states on NVMe", "8-bit moments", "bf16 moments"}
    expected |= {"the host updates after backward", "the host has the first part"}
    if cores is None:
        expected |= {"parameters in host memory", "states on NVMe, parameters in host memory"}
    assert expected <= set(placed)
    for words, choice in placed.items():
        again = timed(choice.apply(config), cores).configured
        assert choice.step_time is not None, words
        assert replace(again, is_varied=True, placement=choice.placement) == choice, words
    eight, sixteen = (placed[f"{bits} moments"].step_time for bits in ("8-bit", "bf16"))
    assert eight.lanes["host"] == pytest.approx(sixteen.lanes["host"] / 2)
    late = placed["the host updates after backward"].step_time
    assert late.total_s > found.step_time.total_s  # the configured placement updates in backward


def test_shares_between_are_predicted_on_a_cpu_and_a_disk_only_if_measured() -> None:
    found = timed(placed_config(2), 2)
    shares = {c.ratio for c in found.choices if c.step_time is not None and not c.is_varied}
    assert shares == {0.0, 0.25, 0.5, 0.75, 1.0}
    with pytest.raises(ConfigError, match="doctor --measure --disk FOLDER"):
        timed(placed_config(2), 2, calibration=machine(2, has_disk=False))


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_time_counts_the_copies_of_inputs_which_run_beside_computation(schedule: str) -> None:
    def timed_at(rate: float, *, is_on_host: bool) -> Any:
        link, operator = Curve.of_rate(rate), Curve(((1.0, 1e-3),))
        rates = calibration(copy__to_host=link, copy__to_device=link, operator=operator)
        block = {"activation_checkpointing": {"cpu_checkpointing": is_on_host}}
        steps = {"gradient_accumulation_steps": 4, "accumulation_schedule": schedule}
        return planned(make_config(3, **block, **steps), 1, calibration=rates).step_time

    moved = 4 * BLOCKS * 2 * TOKENS * WIDTH * 4
    slow, quick = (timed_at(rate, is_on_host=True) for rate in (1e5, 1e10))
    assert slow.lanes["copies"] == pytest.approx(2 * moved / 1e5)
    assert quick.lanes["copies"] == pytest.approx(2 * moved / 1e10)
    without = timed_at(1e5, is_on_host=False)
    assert without.lanes["copies"] == 0
    # Only the last block's copies do not overlap with computation.
    assert quick.total_s == pytest.approx(without.total_s, rel=0.01)
    assert slow.total_s > moved / 1e5 > 2 * without.total_s  # each direction is a separate lane


def test_step_that_gathers_bound_takes_one_pass_of_gathers() -> None:
    link, operator = Curve.of_rate(1e6), Curve(((1.0, 1e-6),))
    rates = calibration(gather__within=link, operator=operator)
    steps = {"gradient_accumulation_steps": 4, "activation_checkpointing": {}}
    horizontal, vertical = (
        planned(make_config(3, accumulation_schedule=name, **steps), calibration=rates).step_time
        for name in ("horizontal", "vertical")
    )
    assert horizontal.lanes["gather"] == pytest.approx(4 * vertical.lanes["gather"])
    assert vertical.total_s < horizontal.total_s / 2.5


def test_a_rate_has_a_latency_its_points_are_joined_by_lines_and_the_first_name_counts() -> None:
    curve = Curve.of_rate(10e9, latency_s=5e-6)
    assert curve.seconds(20e9) == pytest.approx(2 + 5e-6)
    assert curve.seconds(1e4) == pytest.approx(6e-6)
    assert curve.seconds(0) == 0.0
    curve = Curve(((10, 1.0), (20, 3.0), (40, 4.0)))
    seconds = [curve.seconds(amount) for amount in (1, 10, 15, 20, 30, 40, 80)]
    assert seconds == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0])
    assert [Curve(((10, 1.0),)).seconds(amount) for amount in (4, 40)] == [1.0, 4.0]
    rates = Rates(1, 1, 1, {"memory.float32": Curve(((8, 2.0),))})
    assert rates.seconds(("gelu.float32", "memory.float32"), 16) == 4.0
    with pytest.raises(ConfigError, match=r"no rate called .matmul\.float32."):
        rates.seconds(("matmul.float32",), 1)


def test_a_calibration_goes_through_json_and_finds_the_nearest_number_of_ranks() -> None:
    rates = tuple(Rates(n, 1, 8, {"step": Curve(((1, n / 8),))}) for n in (1, 4, 8))
    written = Calibration("a processor", "by hand", rates)
    assert Calibration.from_json(json.loads(written.to_json()), "it") == written
    assert [written.at(n).ranks for n in (1, 2, 3, 16)] == [1, 1, 4, 8]


GOOD = {"ranks": 1, "threads": 1, "cores": None, "curves": {"step": [[1, 0.5]]}}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"format": "else"}, "format 'else'"),
        ({"rates": []}, "no rates"),
        ({"rates": [{**GOOD, "ranks": 0}]}, "at least 1, found 0"),
        ({"rates": [{**GOOD, "curves": {"step": [[2, 1], [1, 1]]}}]}, "amounts must rise"),
        ({"rates": [{**GOOD, "curves": {"step": [[1, float("nan")]]}}]}, "finite"),
        ({"rates": [{}]}, "no key 'ranks'"),
    ],
)
def test_another_file_is_refused(change: dict[str, Any], cause: str) -> None:
    good = {"format": "zero calibration 1", "device": "", "source": "", "rates": [GOOD]}
    Calibration.from_json(good, "rates.json")
    with pytest.raises(ConfigError, match=f"rates\\.json is no calibration .*{cause}"):
        Calibration.from_json(good | change, "rates.json")


def predicted_s(times: Times, mode: Mode, ratio: float) -> float:
    """Return the seconds of a step of equal blocks, the last of which are on the host."""
    first = round(times.blocks * (1 - ratio))

    def unit(index: int) -> UnitTime:
        share = 1 / times.blocks if index else 0.0
        on_host = share if index > first else 0.0
        return UnitTime(
            forward_s=share * times.forward_s,
            backward_s=share * times.backward_s,
            host_s=on_host * times.host_s,
            undo_s=on_host * times.log_s,
            down_s=on_host * times.link_s,
            up_s=on_host * times.link_s,
        )

    shape = StepShape(
        micro_steps=1,
        last_block=times.blocks,
        is_accelerated=True,
        threads=1,
        is_in_backward=mode == "in backward",
        undo_share=float(mode == "with an undo log"),
        device_update_s=(1 - ratio) * times.device_s,
    )
    program = run_steps(shape, [unit(n) for n in range(times.blocks + 1)], None)
    return program.ends[-1].stop - program.ends[-2].stop


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_as_long_as_those_of_the_real_tiers(mode: Mode) -> None:
    # The first times are bound by the host at one of the ratios, the others at none or both.
    for times in (replace(Times(), log_s=3.0), *random_times(3)[1:]):
        for ratio in (1.0, 0.4):
            real = Job(times, mode, ratio, chunks_per_block=4).run()
            assert predicted_s(times, mode, ratio) == pytest.approx(real, rel=0.05), (times, ratio)
