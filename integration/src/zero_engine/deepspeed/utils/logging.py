"""``deepspeed.utils.logging``: a logger that writes to stdout, and lines of some ranks only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

_FORM = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class _Stdout(logging.Handler):
    """Writes to what is stdout then, in DeepSpeed's form."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORM))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except Exception:
            self.handleError(record)


def speak(name: str, level: int | str) -> logging.Logger:
    """Have the logger ``name`` write to stdout at ``level``, and to no handler of its parents.

    As DeepSpeed's own logger: what was asked for is seen, however the script has set up logging.
    """
    found = logging.getLogger(name)
    found.setLevel(level)
    found.propagate = False
    handler = next((one for one in found.handlers if isinstance(one, _Stdout)), _Stdout())
    handler.setLevel(logging.NOTSET)  # an earlier set_log_level_from_string may hide more
    found.addHandler(handler)
    return found


logger = speak("DeepSpeed", logging.WARNING)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks``, on all if there are none or -1 is among them."""
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
    """Log as `log_dist`, the first time that it is called with these arguments."""
    _log_once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def warning_once(message: str, *args: Any) -> None:
    logger.warning(message, *args)


# Scripts and libraries call them on the logger.
vars(logger).update(log_dist_once=log_dist_once, warning_once=warning_once)


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
    for handler in target.handlers:
        handler.setLevel(level)
