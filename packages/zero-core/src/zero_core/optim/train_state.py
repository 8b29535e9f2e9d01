"""Progress of a training, which a checkpoint contains besides parameters and optimizer states."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zero_core.config import Config, Fp16Config
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.schedules import Schedule, check_state, count_of, resume_rates

_log = logging.getLogger(__name__)

_NUMBER = int | float
_NUM_COMPARED = 3  # previous steps with which a step's rounds are compared


class LossScaler:
    """Loss scale of fp16, constant or dynamic (Micikevicius et al., arXiv 1710.03740, section 3.2).

    A dynamic scale doubles after ``loss_scale_window`` consecutive steps without overflow, as in
    torch's GradScaler. Of the overflows since the last doubling (with ``consecutive_hysteresis``,
    since the last step without overflow), the first ``hysteresis - 1`` leave the scale unchanged.
    Each further one halves it, down to ``min_loss_scale``. Without fp16 the scale is 1.
    """

    def __init__(self, config: Fp16Config) -> None:
        self.config = config
        self.is_dynamic = config.enabled and config.loss_scale == 0.0
        if not config.enabled:
            self.scale = 1.0
        elif self.is_dynamic:
            self.scale = max(2.0**config.initial_scale_power, config.min_loss_scale)
        else:
            self.scale = config.loss_scale
        self.is_applied = False  # whether a loss of the current micro-step has been scaled
        self.hysteresis_left = config.hysteresis  # at 1, an overflow halves the scale
        self.steps_since_overflow = 0
        self.growth_delay = 0  # steps not counted at the start or after an overflow

    def update(self, *, is_overflow: bool) -> None:
        """Adapt the scale after a step. ``is_overflow``: the step was skipped."""
        if not self.is_dynamic:
            return
        config = self.config
        if is_overflow:
            self.steps_since_overflow = 0
            if self.hysteresis_left > 1:
                self.hysteresis_left -= 1
                return
            if self.scale <= config.min_loss_scale:
                _log.warning("overflow at the smallest loss scale %g", self.scale)
            self.scale = max(self.scale / 2.0, config.min_loss_scale)
            return
        if config.consecutive_hysteresis:
            self.hysteresis_left = config.hysteresis
        self.steps_since_overflow += 1
        stable = self.steps_since_overflow - self.growth_delay
        if stable > 0 and stable % config.loss_scale_window == 0:
            self.hysteresis_left = config.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, which is empty if the scale is constant."""
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.scale,
            "hysteresis_left": self.hysteresis_left,
            "steps_since_change": self.steps_since_overflow,  # key in the checkpoint format
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A constant scale keeps the configured value."""
        if self.is_dynamic and state:
            self.scale = float(state["scale"])
            self.hysteresis_left = int(state["hysteresis_left"])
            self.steps_since_overflow = int(state["steps_since_change"])


class TrainState:
    """Counters of steps and micro-steps, loss scale, schedule and parameter groups."""

    def __init__(
        self,
        config: Config,
        param_groups: Sequence[dict[str, Any]],
        lr_scheduler: Schedule | None,
        *,
        rank: int,
    ) -> None:
        """Start at step 0. ``param_groups`` are the optimizer's and are changed in place."""
        self.global_steps = 0  # optimizer steps so far, including skipped ones
        self.skipped_steps = 0  # steps skipped because a gradient was not finite
        self.num_drops = 0  # number of times that gradients were dropped, with or without a step
        self.num_rounds = 0  # rounds of the current micro-step: see `check_rounds`
        self.usual_rounds = 0.0  # most rounds of the newest micro-steps; 0: unknown, inf: warned
        self._rounds: list[int] = []  # of the newest micro-steps
        self._reported = 0  # id of the error that an interpreter last reported
        self.accumulation_steps = config.gradient_accumulation_steps  # micro-steps per step
        self.micro_steps = 0  # finished micro-steps of the whole training
        self.num_accumulated = 0  # finished micro-steps of the current step; 0 between two steps
        self.declared_boundary: bool | None = None  # `is_boundary` if the program sets it
        self.is_boundary = self.accumulation_steps == 1  # whether this micro-step ends its step
        self.scaler = LossScaler(config.loss_scaling)
        self.lr_scheduler = lr_scheduler  # advanced at each optimizer step that is not skipped
        self.grad_norm: float | None = None  # of the last step, without loss scale, before clipping
        self._param_groups = param_groups
        self._steps_per_print = config.steps_per_print
        self._rank = rank
        self._num_restarts = 0  # times that the current step began again by `Engine.zero_grad`
        self._has_warned_of_drop = False
        self._has_warned_of_schedule = False
        # The schedule and its expected count if the program steps it, too.
        self._stepped_twice: tuple[Schedule, int] | None = None

    def find_boundary(self) -> None:
        """Set `is_boundary`. Call it when anything that it depends on has changed."""
        is_last = self.num_accumulated + 1 >= self.accumulation_steps
        declared = self.declared_boundary
        self.is_boundary = is_last if declared is None else declared

    def set_accumulation_steps(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"gradient_accumulation_steps = {steps}: expected 1 or more")
        if self.num_accumulated:
            raise RuntimeError(
                f"{self.num_accumulated} micro-steps of a step are done: set it after step()"
            )
        self.accumulation_steps = steps
        self.find_boundary()

    def check_ended(self, *, or_dropped: bool = False) -> None:
        """Raise CheckpointError within an accumulation, unless its gradients will be dropped."""
        if self.num_accumulated and not or_dropped:
            raise CheckpointError(
                f"micro-step {self.micro_steps} is in the middle of an accumulation, of which "
                f"{self.num_accumulated} are done: save after a step"
            )

    def enter_micro_step(self, number: int) -> None:
        """Continue with micro-step ``number`` (from 0) of the current step."""
        self.micro_steps += number - self.num_accumulated
        self.num_accumulated = number
        self.find_boundary()

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in self._param_groups]

    def check_schedule(self) -> None:
        """Raise RuntimeError if the schedule's step needs a measured value."""
        if isinstance(cast(object, self.lr_scheduler), ReduceLROnPlateau):
            raise RuntimeError(
                "engine.step() has no measured value for a ReduceLROnPlateau: make it over "
                "engine.optimizer after build(), and call its step(value) after engine.step(). "
                "An engine of deepspeed.initialize takes step(lr_kwargs={'metrics': value})"
            )

    def step_taken(self) -> None:
        """Update the loss scale and the schedule after a step that was not skipped."""
        if self.scaler.config.enabled:
            self.scaler.update(is_overflow=False)
        if self.num_rounds:
            self._end_rounds()
        scheduler = self.lr_scheduler
        if scheduler is None:
            return
        is_repeated = (scheduler, count_of(scheduler)) == self._stepped_twice
        if is_repeated and self._rank == 0 and not self._has_warned_of_schedule:
            self._has_warned_of_schedule = True
            _log.warning(
                "step %d: the program has stepped the schedule that engine.step() steps, so it "
                "advances twice: leave one out. A schedule over engine.optimizer that build() does "
                "not get is stepped by the program alone. This is said once",
                self.global_steps + 1,
            )
        scheduler.step()
        count = count_of(scheduler)
        self._stepped_twice = None if count is None else (scheduler, count + 1)

    def check_rounds(self) -> None:
        """Warn once if the micro-step's gradient probably contains two runs of the same code.

        A round is a backward, outside of ``no_sync``, of a forward that began after the previous
        backward. Several rounds in a micro-step are legal: two losses, each with a separate
        forward. But they also occur if a notebook is interrupted between backward and ``step`` and
        its lines run again. `StepGradient` calls this method at a round that exceeds
        `usual_rounds`. In the first micro-step that number is unknown: only an error that an
        interactive interpreter reported (``sys.last_value``) between two rounds is a reason.
        """
        reported, self._reported = self._reported, id(vars(sys).get("last_value"))
        if self.usual_rounds or (self.num_rounds > 1 and reported != self._reported):
            self.usual_rounds = math.inf
            _log.warning(
                "rank %d, step %d: backward adds to the gradient of %d that no step() has taken: "
                "if the program was interrupted and began again, call engine.zero_grad() and run "
                "forward and backward again, or the step is too long. This is said once",
                *(self._rank, self.global_steps + 1, self.num_rounds - 1),
            )

    def _end_rounds(self) -> None:
        self._rounds = [*self._rounds, self.num_rounds][-_NUM_COMPARED:]
        self.num_rounds = 0
        if self.usual_rounds < math.inf:
            self.usual_rounds = max(self._rounds)

    def step_skipped(self, where: str) -> None:
        """Count a skipped step, update the loss scale and warn. ``where``: what is not finite."""
        before = self.scaler.scale
        self.skipped_steps += 1
        if self.num_rounds:
            self._end_rounds()
        self.scaler.update(is_overflow=True)
        text = "step %d skipped on all ranks: the gradient is not finite (%s); loss scale %g -> %g"
        _log.warning(text, self.global_steps + 1, where, before, self.scaler.scale)

    def end_step(self) -> None:
        """Count a step and its last micro-step. Log progress every ``steps_per_print`` steps."""
        self.global_steps += 1
        self._num_restarts = 0
        self.end_micro_step()
        every = self._steps_per_print
        if every is not None and self._rank == 0 and self.global_steps % every == 0:
            rates = [group["lr"] for group in self._param_groups]
            counts = (self.global_steps, self.skipped_steps, rates)
            text = "step %d, skipped %d, lr %s, loss scale %g, gradient norm %s"
            _log.info(text, *counts, self.scaler.scale, self.grad_norm)

    def end_micro_step(self) -> None:
        self.num_accumulated = 0 if self.is_boundary else self.num_accumulated + 1
        self.micro_steps += 1
        if self.num_rounds:
            self._end_rounds()
        self.find_boundary()
        self.scaler.is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return counters, loss scale, hyperparameters and schedule, for a checkpoint."""
        return {
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": self.scaler.state_dict(),
            "param_groups": self.hyperparameters(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
        }

    def check(self, saved: Mapping[str, Any], without: Collection[str] = ()) -> None:
        """Raise if ``saved``, a valid result of `state_dict`, does not fit this training."""
        groups, state = saved["param_groups"], saved["lr_scheduler"]
        counts = len(groups), len(self._param_groups)
        if "optimizer" not in without and counts[0] != counts[1] and self._rank == 0:
            _log.warning(
                "%d parameter groups were saved, the engine has %d: it keeps its own settings "
                "(learning rates, weight decay); states pair by name",
                *counts,
            )
        if "optimizer" not in without and counts[0] == counts[1]:
            for number, (own, group) in enumerate(zip(self._param_groups, groups, strict=True)):
                # Ignore keys that only one side has: schedules and Prodigy add keys over time.
                for key in own.keys() & group.keys():
                    if not _is_setting(own[key], group[key]):
                        raise CheckpointCorruptError(
                            f"progress.param_groups.{number}.{key} is {group[key]!r:.100}, the "
                            f"optimizer's is {own[key]!r:.100}"
                        )
        scheduler = self.lr_scheduler
        if "lr_scheduler" in without or (scheduler is None and state is None):
            return
        if scheduler is None or state is None:
            if self._rank == 0:
                found = "the engine's schedule stays where it is: none was saved"
                if state is not None:
                    found = "the schedule that was saved is not used: the engine has none"
                _log.warning("%s; if that is meant, load without the schedule", found)
            return
        try:
            if not isinstance(state, Mapping):
                raise ValueError(f"its state is {state!r:.100}")
            # Torch's schedules set each saved key as an attribute, even one that hides a method.
            methods = [key for key in state if callable(getattr(type(scheduler), str(key), None))]
            if methods or "optimizer" in state:
                raise ValueError(f"its state has {methods or ['optimizer']}")
            check_state(scheduler, state)
            own_state = scheduler.state_dict()
            for key in own_state.keys() & state.keys():
                own_value, value = own_state[key], state[key]
                if not _is_like(own_value, value):
                    raise ValueError(f"{key} is {value!r:.100}, expected as {own_value!r:.100}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"the schedule that was saved does not fit: {error}; "
                'build with the schedule of the saved training, or load without=("lr_scheduler",)'
            ) from error

    def load_state_dict(self, saved: Mapping[str, Any], without: Collection[str] = ()) -> None:
        """Restore `state_dict`. `Engine.load_checkpoint` explains ``without``."""
        if "progress" not in without:
            self.global_steps = saved["global_steps"]
            # The number of micro-steps per step may have changed since the save.
            self.micro_steps = self.global_steps * self.accumulation_steps
            self.num_accumulated = 0
            self.find_boundary()
            self.skipped_steps = saved["skipped_steps"]
            self.scaler.load_state_dict(saved["loss_scaler"])
        groups = saved["param_groups"]
        # If the numbers of groups differ, `check` has logged a warning.
        if "optimizer" not in without and len(groups) == len(self._param_groups):
            for group, values in zip(self._param_groups, groups, strict=True):
                for key, value in values.items():
                    now = group.get(key)
                    if isinstance(now, Tensor):  # keep the object, which CUDA graphs may read
                        now.copy_(torch.as_tensor(value))
                        continue
                    # JSON has no tuples: convert a list back to a tuple.
                    is_tuple = isinstance(now, tuple) and isinstance(value, list)
                    group[key] = tuple(value) if is_tuple else value
        scheduler, state = self.lr_scheduler, saved["lr_scheduler"]
        if scheduler is not None and state is not None and "lr_scheduler" not in without:
            scheduler.load_state_dict(state)
            self._stepped_twice = None
            if "optimizer" in without:
                resume_rates(scheduler)

    def warn_of_drop(self, *, restarts: bool) -> None:
        """Warn once if a loop seems to call ``zero_grad`` in each micro-step of a step.

        ``restarts``: the step begins again, as after a loop that was left. Only a second time in
        the same step is suspect. Otherwise the step continues without the dropped gradients.
        """
        self._num_restarts += restarts and self.num_accumulated > 0
        is_suspect = self._num_restarts > 1 if restarts else self.num_accumulated > 0
        if self._rank == 0 and is_suspect and not self._has_warned_of_drop:
            self._has_warned_of_drop = True
            _log.warning(
                "step %d: zero_grad() drops the gradients of %d finished micro-steps, and the step "
                "%s. step() drops gradients itself: call zero_grad() only after a loop that was "
                "left before step(). This is said once",
                *(self.global_steps + 1, self.num_accumulated),
                "begins again from its first micro-step" if restarts else "lacks them",
            )

    def restart_step(self) -> None:
        """Restart the current step, because its last backward did not finish."""
        _log.warning(
            "rank %d: step %d starts again from its first micro-step, as the last backward did not "
            "end (%d micro-steps were done)",
            *(self._rank, self.global_steps + 1, self.num_accumulated),
        )
        self.enter_micro_step(0)


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Describe the settings of parameter groups, for a comparison between ranks.

    A device tensor is described by its device type only, to avoid a synchronization. Objects other
    than None, numbers, strings, tensors, lists and tuples are omitted: their text may differ.
    """
    return {
        f"optimizer group {index}, {key!r}": described
        for index, group in enumerate(groups)
        for key, value in group.items()
        if (described := _describe(value)) is not None
    }


def _describe(value: object) -> str | None:
    if isinstance(value, int | float | str | None):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()})" if value.is_cpu else f"tensor on {value.device.type}"
    if isinstance(value, list | tuple):
        items = [_describe(item) or type(item).__name__ for item in value]
        return f"{type(value).__name__}({', '.join(items)})"
    return None


def _is_setting(own: object, saved: object) -> bool:
    """Whether ``saved`` can replace the setting ``own``. A None fits only None, bool, str."""
    is_switch = own is None or isinstance(own, bool | str)
    if saved is None:
        return is_switch
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        return len(own) == len(saved) and all(map(_is_setting, own, saved))
    return _is_like(own, saved)


def _is_like(own: object, saved: object) -> bool:
    """Whether ``saved`` has the same kind of type as ``own``. None matches anything."""
    if own is None or saved is None:
        return True
    if isinstance(own, Tensor) or isinstance(saved, Tensor):
        sizes = [v.numel() if isinstance(v, Tensor) else 1 for v in (own, saved)]
        return sizes[0] == sizes[1] and all(isinstance(v, Tensor | _NUMBER) for v in (own, saved))
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and (
            len(own) != len(saved) or all(map(_is_like, own, saved))
        )
    kinds: tuple[Any, ...] = (bool, _NUMBER, str, Mapping)
    kind = next((kind for kind in kinds if isinstance(own, kind)), object)
    return isinstance(saved, kind)
