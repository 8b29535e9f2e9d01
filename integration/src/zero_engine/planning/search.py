"""Search for the fastest configuration that fits, by predicted times.

[Note: choices by time]
Choices whose seconds per sample are within `WORTH` of the least count as equal: predictions are not
more exact. Among equal choices the best is the configuration itself. Otherwise the best has a
placement that changes the fewest keys, then the smallest ratio, then the least device memory.

Other placements are tried with the configured variant and the best one, or with all variants if
nothing fits. Other schedules are tried with the configured choice and the `NUM_LEADERS` fastest
that use the host. A choice that changes numerical results can be the best only if that is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.footprint import (
    AS_CONFIGURED,
    Choice,
    Machine,
    Placement,
    Plan,
    Planner,
    Table,
    Variant,
    format_bytes,
    may_speculate,
    ranks_of_node,
    updates_in_backward,
    variant_of,
)
from zero_engine.planning.prediction import LANES, Prediction, StepTime
from zero_engine.planning.rates import Calibration, Rates

WORTH = 0.02
"""Share of the time that a change must save. See [Note: choices by time]."""
RATIOS = (0.25, 0.5, 0.75)
NUM_LEADERS = 3
QUANTIZED = "quantized communication"
DISK_RATES = ("file.read", "file.write")


@dataclass(frozen=True)
class TimedChoice(Choice):
    """Configuration of the run, with its bytes per rank and the time of its step.

    Attributes:
        step_time: the predicted time, with a calibration and example inputs. Varied choices have
            one only if they fit.
    """

    step_time: StepTime | None = None

    @property
    def sample_s(self) -> float:
        """Predicted seconds per sample, infinite without a prediction."""
        return math.inf if self.step_time is None else self.step_time.sample_s


@dataclass(frozen=True)
class TimedPlan(Plan):
    """Bytes of a run per rank, and the time of its step.

    Attributes:
        best: with a calibration the fastest choice that fits; see `zero_engine.planning.search`.
        reasons: with a calibration, sentences that explain ``best``.
    """

    configured: TimedChoice
    choices: tuple[TimedChoice, ...]
    best: TimedChoice | None
    reasons: tuple[str, ...] = ()

    @property
    def step_time(self) -> StepTime | None:
        """Predicted time of a step as configured, with a calibration and example inputs."""
        return self.configured.step_time

    def to_json(self) -> str:
        """Return a JSON object. Only the configured choice has spans."""
        content = asdict(self)
        for choice in (*content["choices"], content["best"]):
            if choice is not None and choice["step_time"] is not None:
                del choice["step_time"]["spans"]
        return json.dumps(content, indent=2)

    @property
    def marked(self) -> dict[str, TimedChoice]:
        """Simplest choice that fits and adds no rounding, and ``best``, if memory is limited."""
        is_limited = self.device_memory is not None or self.host_memory is not None
        fitting = [c for c in self.choices if c.is_fitting and not c.placement.is_rounding]
        if not fitting or not is_limited:
            return {}
        order = [(len(c.placement.settings), c.ratio, c.is_varied, c.stage) for c in fitting]
        found = {"simplest": fitting[order.index(min(order))]}
        if self.best is not None and self.best.step_time is not None:
            found["fastest"] = self.best
        return found

    @property
    def headline(self) -> str:
        """Names of the marked choices, or ""."""
        return "".join(f"; {mark} that fits: {choice}" for mark, choice in self.marked.items())

    def tables(self, most_choices: int = 1000) -> tuple[Table, ...]:
        """Return the tables. Of more than ``most_choices``, the marked and the first are shown."""
        by_time = sorted(self.choices, key=lambda c: (c.is_varied, c.is_varied and c.sample_s))
        ordered = replace(self, choices=tuple(by_time))
        *others, choices = Plan.tables(ordered)
        times = {c.key: c.step_time for c in self.choices}
        marks = {self.configured.key: "configured"}
        for mark, choice in self.marked.items():
            marks[choice.key] = ", ".join(filter(None, (marks.get(choice.key), mark)))
        rows: list[tuple[str, ...]] = []
        for row, shown in zip(choices.rows, ordered.shown_choices(), strict=True):
            t = times[shown.key]
            cell = ("-", "-") if t is None else (_seconds(t.total_s), t.bound)
            if len(rows) < most_choices or shown.key in marks:
                rows.append((*row, *cell, marks.get(shown.key, "")))
        if (time := self.step_time) is not None:
            busy = [
                (lane, _seconds(time.lanes[lane]), f"{time.lanes[lane] / time.total_s:.0%}")
                for lane in LANES
            ]
            busy.append(("step", _seconds(time.total_s), "100%"))
            others.append(Table("Predicted step", ("lane", "busy", "of the step"), tuple(busy)))
        hidden = len(choices.rows) - len(rows)
        title = f"Choices, {hidden} more by --all" if hidden else "Choices"
        return (*others, Table(title, (*choices.headings, "step", "bound", ""), tuple(rows)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def plan(
    model: Any,
    config: Mapping[str, Any] | str | Path,
    world_size: int,
    *,
    device_memory: int | None = None,
    host_memory: int | None = None,
    ranks_per_node: int | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    device_type: Literal["accelerator", "cpu"] = "accelerator",
    calibration: Calibration | None = None,
    allow_rounding: bool = False,
    nvme_path: str | None = None,
) -> TimedPlan:
    """Compute the plan of `zero_core.plan`, and with a ``calibration`` the time of a step.

    The best choice is then the fastest that fits. Times need ``example_inputs``.

    Raises:
        ConfigError: as `zero_core.plan`, or the calibration does not fit the machine.
        MissingPartError: as `zero_core.plan`.
    """
    per_node = ranks_of_node(world_size, ranks_per_node)
    machine = Machine(world_size, per_node, device_memory, host_memory, device_type, nvme_path)
    rates = None if calibration is None else calibration.at(per_node)
    if rates is not None and machine.is_accelerated != (rates.cores is None):
        raise ConfigError(
            f"device_type = {device_type!r} with a calibration of "
            f"{'a CPU' if rates.cores else 'an accelerator'}: give one of this kind"
        )
    if rates is not None and nvme_path is not None and not rates.curves.keys() >= {*DISK_RATES}:
        raise ConfigError(
            f"nvme_path = {nvme_path!r} with a calibration without rates of a disk: "
            "measure it with zero-engine doctor --measure --disk FOLDER, or plan without rates"
        )
    planner = Planner(model, config, machine, example_inputs)
    if rates is None or planner.trace(planner.configured.micro_batch) is None:
        found = planner.plan(allow_rounding=allow_rounding)
        choices = {c.key: TimedChoice(**vars(c)) for c in found.choices}
        named = {
            "configured": choices[found.configured.key],
            "choices": tuple(choices.values()),
            "best": None if found.best is None else choices[found.best.key],
        }
        return TimedPlan(**vars(found) | named)
    return Search(planner, rates).plan(allow_rounding=allow_rounding)


class Search:
    """Choices of a plan with their times. See [Note: choices by time]."""

    def __init__(self, planner: Planner, rates: Rates) -> None:
        self._planner = planner
        self._rates = rates
        self._found: dict[tuple[float | str, ...], TimedChoice] = {}

    def plan(self, *, allow_rounding: bool) -> TimedPlan:
        planner = self._planner
        configured = self._timed(planner.configured)
        variants = [*planner.variants(), *planner.variants(are_larger=True)]
        choices = [configured, *(c for variant in variants for c in self._choices(variant))]
        choices += map(self._timed, [*self._quantized(), *planner.rounded_choices()])
        choices += self._placed(choices, variants)
        choices += self._scheduled(choices)
        best = _fastest(configured, choices, allow_rounding=allow_rounding)
        found = planner.describe(choices, best, self._advice(best, choices))
        reasons = tuple(_reasons(configured, best, choices))
        return TimedPlan(**vars(found) | {"configured": configured, "reasons": reasons})

    def _timed(self, choice: Choice) -> TimedChoice:
        if choice.key in self._found:
            return self._found[choice.key]
        planner, forecast, time = self._planner, self._planner.forecast_of(choice), None
        trace = planner.trace(choice.micro_batch)
        # Varied choices that do not fit are not simulated, so that a plan takes seconds.
        is_timed = choice.is_fitting or (forecast.is_complete and not choice.is_varied)
        if trace is not None and is_timed:
            layout, config = planner.layout, planner.config_of(choice)
            prediction = Prediction(layout, config, forecast, planner.links, self._rates, trace)
            time = prediction.at(choice.ratio)
        self._found[choice.key] = TimedChoice(**vars(choice), step_time=time)
        return self._found[choice.key]

    def _choices(self, variant: Variant) -> list[TimedChoice]:
        ratios = RATIOS if variant.placement == AS_CONFIGURED else ()
        return [self._timed(choice) for choice in self._planner.choices(variant, ratios)]

    def _quantized(self) -> Iterator[Choice]:
        planner = self._planner
        is_quantized = planner.config.zero_optimization.quantized_key is not None
        if planner.links.num_nodes == 1 or is_quantized:
            return
        for stage in (2, 3):
            keys = ("zero_quantized_gradients", "zero_quantized_weights")[: stage - 1]
            settings = tuple(("", key, True) for key in keys)
            placement = Placement(QUANTIZED, settings, is_rounding=True)
            variant = replace(planner.given, placement=placement)
            choice = planner.choice(variant, stage, planner.configured.ratio)
            if planner.forecast_of(choice).is_complete:
                yield choice

    def _placed(
        self, choices: Sequence[TimedChoice], variants: Sequence[Variant]
    ) -> list[TimedChoice]:
        """Return choices of other placements, and of all variants if no choice fits."""
        best = _fastest(choices[0], choices, allow_rounding=False)
        if best is not None:
            variants = list(dict.fromkeys([self._planner.given, variant_of(best)]))
        found: list[TimedChoice] = []
        for _, group in groupby(self._planner.placed(variants), key=lambda v: v.placement):
            found += [choice for variant in group for choice in self._choices(variant)]
            if best is None and any(choice.is_fitting for choice in found):
                break
        return found

    def _scheduled(self, choices: Sequence[TimedChoice]) -> Iterator[TimedChoice]:
        planner, configured = self._planner, choices[0]
        fitting = [c for c in choices if c.is_fitting and not c.placement.is_rounding]
        leaders = sorted(fitting, key=lambda c: c.sample_s)
        leaders = [c for c in leaders if c.ratio > 0][:NUM_LEADERS]
        for leader in [configured, *(c for c in leaders if c is not configured)]:
            config = planner.config_of(leader)
            for schedule in _schedules(config, leader.ratio) if leader.ratio else ():
                placement = leader.placement.joined(schedule)
                if planner.is_served(placement):
                    other = replace(variant_of(leader), placement=placement)
                    yield self._timed(planner.choice(other, leader.stage, leader.ratio))

    def _advice(self, best: TimedChoice | None, choices: Sequence[TimedChoice]) -> str:
        configured = choices[0]
        if best is configured and not self._planner.machine.limits:
            return f"{configured} takes, as configured: {configured.needs}"
        if best is not None and best is not configured and configured.is_fitting:
            change = str(best).replace("stage", "Stage")
            return f"{configured} takes {configured.needs}. {change} is faster: {best.needs}"
        return self._planner.advice(best, choices)


def _schedules(config: Config, ratio: float) -> Iterator[Placement]:
    is_later = updates_in_backward(config) or may_speculate(config)
    words = "the host updates after backward" if is_later else "the host updates in backward"
    yield Placement(words, (("offload_optimizer", "update_in_backward", not is_later),))
    offload = config.zero_optimization.offload_optimizer
    if 0 < ratio < 1 and offload.parameters is None:
        end = "first" if offload.host_share == "last" else "last"
        yield Placement(f"the host has the {end} part", (("offload_optimizer", "host_share", end),))


def _fastest(
    configured: TimedChoice, choices: Sequence[TimedChoice], *, allow_rounding: bool
) -> TimedChoice | None:
    fitting = [c for c in choices if c.is_fitting and c.step_time is not None]
    allowed = [c for c in fitting if allow_rounding or not c.placement.is_rounding]
    if configured.is_fitting:
        allowed.append(configured)
    least_s = min((c.sample_s for c in allowed), default=0.0)
    close = [c for c in allowed if c.sample_s * (1 - WORTH) <= least_s]
    if configured in close:
        return configured
    return min(
        close,
        key=lambda c: (len(c.placement.settings), c.ratio, c.device_bytes, c.sample_s),
        default=None,
    )


def _reasons(
    configured: TimedChoice, best: TimedChoice | None, choices: Sequence[TimedChoice]
) -> Iterator[str]:
    before = configured.step_time
    if before is None:
        return
    yield (
        f"{whole(configured)}: {before.total_s:.3g} s per step predicted, "
        f"{1 / before.sample_s:.3g} samples/s. {_bound(before)}"
    )
    after = None if best is None else best.step_time
    if best is None or after is None:
        return
    if best is configured:
        yield f"No other choice that fits is more than {WORTH:.0%} faster"
    else:
        gain = 1 - after.sample_s / before.sample_s
        word = "less" if gain >= 0 else "more"
        yield (
            f"{whole(best)}: {after.total_s:.3g} s per step, {abs(gain):.0%} {word} per sample. "
            f"{_bound(after)}"
        )
        yield from _differences(configured, best)
    rounded = [
        c for c in choices if c.placement.is_rounding and c.is_fitting and c.step_time is not None
    ]
    fastest = min(rounded, key=lambda c: c.sample_s, default=None)
    if fastest is not None and not best.placement.is_rounding:
        gain = 1 - fastest.sample_s / best.sample_s
        if gain > WORTH:
            yield (
                f"{whole(fastest)} would take {gain:.0%} less, and rounds what it sends or keeps: "
                "it is chosen only if rounding is allowed"
            )


def whole(choice: Choice) -> str:
    return f"Stage{str(choice)[5:]}" + ("" if choice.is_varied else f", {choice.variant}")


def _bound(time: StepTime) -> str:
    share = time.bound_s / time.total_s
    return f"The lane {time.bound!r} bounds it: busy for {time.bound_s:.3g} s, {share:.0%} of it"


def _differences(before: TimedChoice, after: TimedChoice) -> Iterator[str]:
    old, new = before.step_time, after.step_time
    assert old is not None
    assert new is not None

    def lane(name: str) -> str:
        return f"{old.lanes[name]:.3g} s -> {new.lanes[name]:.3g} s"

    if after.stage != before.stage:
        yield (
            f"Stage {after.stage} in place of {before.stage}: gathers take {lane('gather')}, "
            f"reductions {lane('reduce')}"
        )
    if after.micro_batch != before.micro_batch:
        yield (
            f"{after.micro_steps} micro-steps of {after.micro_batch} samples in place of "
            f"{before.micro_steps} of {before.micro_batch}: computation takes {lane('compute')}"
        )
    if after.is_recomputed != before.is_recomputed:
        saved = format_bytes(abs(before.device_bytes - after.device_bytes))
        verb = "Recomputing" if after.is_recomputed else "Keeping"
        yield f"{verb} activations: computation takes {lane('compute')}; {saved} of difference"
    if after.ratio != before.ratio:
        yield (
            f"Ratio {after.ratio:.2f} in place of {before.ratio:.2f}: the host's update takes "
            f"{lane('host')}, computation {lane('compute')}"
        )
    words = after.placement.words
    if words == QUANTIZED:
        yield (
            f"Quantized weights and gradients: gathers take {lane('gather')}, reductions "
            f"{lane('reduce')}"
        )
    elif after.placement != before.placement:
        yield (
            f"{words[:1].upper()}{words[1:]}: copies take {lane('copies')}, the host's update "
            f"{lane('host')}, files {lane('file')}"
        )
