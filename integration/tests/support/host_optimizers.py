"""Optimizers that have a host kernel, with parameters for tests."""

from __future__ import annotations

from typing import Any

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.01},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
}
