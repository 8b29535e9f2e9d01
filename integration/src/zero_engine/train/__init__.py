"""The train program: a GPT-2 on plain text. Copy `program`, and change it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    # Not imported at the top: transformers takes seconds, and the command line reads settings only.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("zero_engine.train.program").train
