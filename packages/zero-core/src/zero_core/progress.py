"""How far a training has come: what a checkpoint keeps beside the model and its optimizer state,
and what is logged of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from zero_core.errors import CheckpointError
from zero_core.schedule import check_state, resume_rates

if TYPE_CHECKING:
    from zero_core.engine import Engine

__all__ = ["check_progress", "read_progress", "restore_progress", "tell_progress", "tell_skipped"]

_log = logging.getLogger(__name__)

_MEANT = "; if that is meant, load without the schedule"
_NO_SAVED = "the engine's schedule stays where it is: none was saved" + _MEANT
_NO_OWN = "the schedule that was saved is not used: the engine has none" + _MEANT


def read_progress(engine: Engine) -> dict[str, Any]:
    """Counters, loss scale, hyperparameters and scheduler, as JSON."""
    scheduler = engine.lr_scheduler
    return {
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scaler": engine._scaler.state_dict(),
        "param_groups": engine.optimizer.hyperparameters(),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def check_progress(
    engine: Engine, progress: Mapping[str, Any], without: Collection[str] = ()
) -> None:
    """Refuse what `restore_progress` could not take over, before anything is written.

    Raises:
        CheckpointError: the schedule's state is not one that the engine's can go on from.
    """
    scheduler, saved = engine.lr_scheduler, progress["lr_scheduler"]
    if "lr_scheduler" in without:
        return
    if scheduler is None or saved is None:
        if (scheduler is None) != (saved is None) and engine.rank == 0:
            _log.warning(_NO_SAVED if saved is None else _NO_OWN)
        return
    try:
        check_state(scheduler, saved)
    except ValueError as error:
        raise CheckpointError(
            f"the schedule that was saved does not fit: {error}; "
            'build with the schedule of the saved training, or load without=("lr_scheduler",)'
        ) from error


def restore_progress(
    engine: Engine, progress: Mapping[str, Any], without: Collection[str] = ()
) -> None:
    """Take over what `read_progress` gave; see `Engine.load_checkpoint` for ``without``."""
    if "progress" not in without:
        engine.global_steps = progress["global_steps"]
        # Another accumulation may be configured now: count micro-steps in its terms.
        engine._accumulation.resume(engine.global_steps)
        engine.skipped_steps = progress["skipped_steps"]
        engine._scaler.load_state_dict(progress["loss_scaler"])
    if "optimizer" not in without:
        engine.optimizer.load_hyperparameters(progress["param_groups"])
    scheduler, saved = engine.lr_scheduler, progress["lr_scheduler"]
    if scheduler is not None and saved is not None and "lr_scheduler" not in without:
        scheduler.load_state_dict(saved)
        if "optimizer" in without:
            resume_rates(scheduler)


def tell_progress(engine: Engine) -> None:
    """Log how far the training is, every ``steps_per_print`` steps, on rank 0."""
    every = engine.config.steps_per_print
    if every is not None and engine.rank == 0 and engine.global_steps % every == 0:
        rates = [g["lr"] for g in engine.optimizer.param_groups]
        counts = (engine.global_steps, engine.skipped_steps, rates)
        text = "step %d, skipped %d, lr %s, loss scale %g, gradient norm %s"
        _log.info(text, *counts, engine.loss_scale, engine.get_global_grad_norm())


def tell_skipped(engine: Engine, where: str, scale: float) -> None:
    """Log that a step was skipped: ``where`` it went wrong, and the loss ``scale`` till then."""
    text = "step %d skipped on all ranks: the gradient is not finite (%s); loss scale %g -> %g"
    _log.warning(text, engine.global_steps, where, scale, engine.loss_scale)
