"""``deepspeed.utils.logging``: a logger that writes to stdout, and messages of chosen ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

_FORM = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class _Stdout(logging.Handler):
    """Handler that writes DeepSpeed's format to the current ``sys.stdout``."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORM))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except Exception:
            self.handleError(record)


def speak(name: str, level: int | str) -> logging.Logger:
    """Make the logger ``name`` write to stdout at ``level``, whatever the script configures."""
    found = logging.getLogger(name)
    found.setLevel(level)
    found.propagate = False
    handler = next((one for one in found.handlers if isinstance(one, _Stdout)), _Stdout())
    handler.setLevel(logging.NOTSET)  # set_log_level_from_string may have set a level
    found.addHandler(handler)
    return found


logger = speak("DeepSpeed", logging.WARNING)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks``. No ranks, or -1 among them, means every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = list(ranks or [])
    if not wanted or -1 in wanted or rank in wanted:
        logger.log(level, "[Rank %d] %s", rank, message)


_log_once = functools.lru_cache(None)(log_dist)


def log_dist_once(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """Log as `log_dist` does, but only at the first call with these arguments."""
    _log_once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def warning_once(message: str, *args: Any) -> None:
    logger.warning(message, *args)


# Scripts call these functions as methods of the logger.
vars(logger).update(log_dist_once=log_dist_once, warning_once=warning_once)


def set_log_level_from_string(log_level_str: str, custom_logger: object = None) -> None:
    level = logging.getLevelNamesMapping().get(log_level_str.upper())
    if level is None:
        names = sorted(name.lower() for name in logging.getLevelNamesMapping())
        raise ValueError(f"log level {log_level_str!r}: expected one of {names}")
    target = custom_logger if isinstance(custom_logger, logging.Logger) else logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)
