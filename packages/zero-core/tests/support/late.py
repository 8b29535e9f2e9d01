"""Tests on an accelerator that is late, in processes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zero_core.testing import late_device
from zero_core.testing.ranks import alone, of_size
from zero_core.testing.simulated import simulate


def on_late_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on one simulated rank with a late device, which is its first argument."""

    def run(size: int, arguments: dict[str, Any]) -> None:
        late_device.load()
        simulate(functools.partial(test, **arguments), size, device="late")

    return alone(of_size(test, 1, run))
