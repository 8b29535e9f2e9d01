"""Progress of a training: what a checkpoint keeps beside the model and its optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from zero_core.config import Config
from zero_core.errors import CheckpointError
from zero_core.optim.schedules.base import Schedule, check_state, resume_rates
from zero_core.step.accumulation import Accumulation
from zero_core.step.loss_scale import LossScaler

_log = logging.getLogger(__name__)

_MEANT = "; if that is meant, load without the schedule"
_NO_SAVED = "the engine's schedule stays where it is: none was saved" + _MEANT
_NO_OWN = "the schedule that was saved is not used: the engine has none" + _MEANT


class TrainState:
    """Counters, accumulation, loss scale, schedule and parameter groups of one training.

    Attributes:
        global_steps: optimizer steps so far, skipped ones included.
        skipped_steps: steps skipped because a gradient was not finite.
        accumulation: micro-steps of a step.
        scaler: the loss scale.
        lr_scheduler: stepped at each optimizer step that is taken, or None.
        grad_norm: 2-norm of the last step's gradient, unscaled, before clipping, or None.
    """

    def __init__(
        self,
        config: Config,
        param_groups: Sequence[dict[str, Any]],
        lr_scheduler: Schedule | None,
        *,
        rank: int,
    ) -> None:
        """Start at step 0. ``param_groups`` are the optimizer's own and are changed in place."""
        self.global_steps = 0
        self.skipped_steps = 0
        self.accumulation = Accumulation(config.gradient_accumulation_steps)
        self.scaler = LossScaler(config.fp16)
        self.lr_scheduler = lr_scheduler
        self.grad_norm: float | None = None
        self._param_groups = param_groups
        self._steps_per_print = config.steps_per_print
        self._rank = rank

    def scale(self, loss: Tensor, over: int | None) -> Tensor:
        """Return ``loss`` times the loss scale, divided by ``over`` micro-steps."""
        return self.accumulation.divide(self.scaler.scale_loss(loss), over)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return every parameter group without its parameters."""
        return [{k: v for k, v in g.items() if k != "params"} for g in self._param_groups]

    def step_taken(self) -> None:
        """Adapt the loss scale and the schedule to a step that was taken."""
        self.scaler.update(is_overflow=False)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def step_skipped(self, where: str) -> None:
        """Count a skipped step, adapt the loss scale and warn. ``where`` names who is at fault."""
        before = self.scaler.scale
        self.skipped_steps += 1
        self.scaler.update(is_overflow=True)
        text = "step %d skipped on all ranks: the gradient is not finite (%s); loss scale %g -> %g"
        _log.warning(text, self.global_steps, where, before, self.scaler.scale)

    def end_step(self) -> None:
        """Count a step and its last micro-step. Log progress every ``steps_per_print`` steps."""
        self.global_steps += 1
        self.end_micro_step()
        every = self._steps_per_print
        if every is not None and self._rank == 0 and self.global_steps % every == 0:
            rates = [group["lr"] for group in self._param_groups]
            counts = (self.global_steps, self.skipped_steps, rates)
            text = "step %d, skipped %d, lr %s, loss scale %g, gradient norm %s"
            _log.info(text, *counts, self.scaler.scale, self.grad_norm)

    def end_micro_step(self) -> None:
        """Count a micro-step."""
        self.accumulation.end_micro_step()
        self.scaler.is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return counters, loss scale, hyperparameters and schedule, as JSON."""
        return {
            "global_steps": self.global_steps,
            "micro_steps": self.accumulation.micro_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": self.scaler.state_dict(),
            "param_groups": self.hyperparameters(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
        }

    def check(self, saved: Mapping[str, Any], without: Collection[str] = ()) -> None:
        """Refuse a ``saved`` state that `load_state_dict` could not restore.

        Raises:
            CheckpointError: the schedule's state is not one that the engine's can go on from.
        """
        scheduler, state = self.lr_scheduler, saved["lr_scheduler"]
        if "lr_scheduler" in without:
            return
        if scheduler is None or state is None:
            if (scheduler is None) != (state is None) and self._rank == 0:
                _log.warning(_NO_SAVED if state is None else _NO_OWN)
            return
        try:
            check_state(scheduler, state)
        except ValueError as error:
            raise CheckpointError(
                f"the schedule that was saved does not fit: {error}; "
                'build with the schedule of the saved training, or load without=("lr_scheduler",)'
            ) from error

    def load_state_dict(self, saved: Mapping[str, Any], without: Collection[str] = ()) -> None:
        """Restore what `state_dict` returned. See `Engine.load_checkpoint` for ``without``."""
        if "progress" not in without:
            self.global_steps = saved["global_steps"]
            # Another accumulation may be configured now: count micro-steps in its terms.
            self.accumulation.resume(self.global_steps)
            self.skipped_steps = saved["skipped_steps"]
            self.scaler.load_state_dict(saved["loss_scaler"])
        if "optimizer" not in without:
            self._load_hyperparameters(saved["param_groups"])
        scheduler, state = self.lr_scheduler, saved["lr_scheduler"]
        if scheduler is not None and state is not None and "lr_scheduler" not in without:
            scheduler.load_state_dict(state)
            if "optimizer" in without:
                resume_rates(scheduler)

    def _load_hyperparameters(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self._param_groups, saved, strict=True):
            for key, value in values.items():
                # JSON has no tuples: a sequence keeps the kind that it has now.
                is_tuple = isinstance(group.get(key), tuple) and isinstance(value, list)
                group[key] = tuple(value) if is_tuple else value

    def restart_step(self) -> None:
        """Begin the step under way again, as its last backward did not end."""
        self.accumulation.restart(f"rank {self._rank}: step {self.global_steps}")
