"""``deepspeed.utils.logging``: a logger, and lines of some ranks only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch.distributed as dist

from zero_engine.script.refusal import refuse_other_names

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string", "warning_once"]

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks``; on all, if there are none or -1 is among them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = list(ranks or [])
    if not wanted or -1 in wanted or rank in wanted:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """As `log_dist`, the first time that it is called so."""
    _log_once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    """Log a warning the first time."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: object = None) -> None:
    """Set the level of ``custom_logger``, or of `logger`, by its name.

    Raises:
        ValueError: there is no such level.
    """
    level = logging.getLevelNamesMapping().get(log_level_str.upper())
    if level is None:
        names = sorted(name.lower() for name in logging.getLevelNamesMapping())
        raise ValueError(f"log level {log_level_str!r}: expected one of {names}")
    target = custom_logger if isinstance(custom_logger, logging.Logger) else logger
    target.setLevel(level)


refuse_other_names(__name__)
