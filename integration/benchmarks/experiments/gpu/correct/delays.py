"""Random delays on every stream, which make a missing wait read too soon.

A dispatch mode sees every operation, whatever stream is current. On an accelerator some are
preceded by other work on that stream; those on host tensors alone by a pause. Threads that start
meanwhile do the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BUSY_WIDTH = 2048
MOST_PRODUCTS = 40
"""Of so many rows and columns in bf16: about a millisecond."""
LONGEST_PAUSE_S = 2e-3


@contextmanager
def delayed(device: torch.device, *, seed: int, share: float) -> Iterator[Callable[[], int]]:
    """Delay a ``share`` of all operations of this process, drawn by ``seed``.

    Yields a function that returns their number so far.
    """
    lateness = _Lateness(device, seed, share)
    run_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with _Delays(lateness):  # a mode is a thread's own
            run_thread(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        with _Delays(lateness):
            yield lambda: lateness.num_late
    finally:
        threading.Thread.run = run_thread  # type: ignore[method-assign]


class _Lateness:
    """Draws which operations are late, and by how much."""

    def __init__(self, device: torch.device, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._busy: Tensor | None = None
        if device.type != "cpu":
            shape = (BUSY_WIDTH, BUSY_WIDTH)
            self._busy = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self._product = torch.empty_like(self._busy)
            torch.mm(self._busy, self._busy, out=self._product)
            torch.accelerator.synchronize(device)  # for every stream
        self.num_late = 0

    def maybe_wait(self, *, is_on_host: bool) -> None:
        """Enqueue work on the current stream, pause, or do nothing."""
        if self._random.random() >= self._share:
            return
        self.num_late += 1
        if self._busy is None or is_on_host:
            time.sleep(self._random.random() * LONGEST_PAUSE_S)
            return
        for _ in range(self._random.randint(1, MOST_PRODUCTS)):
            # Of zeros: streams that write it at once write the same.
            torch.mm(self._busy, self._busy, out=self._product)


class _Delays(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of one thread."""

    def __init__(self, lateness: _Lateness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lateness = lateness

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._lateness.maybe_wait(is_on_host=all(x.device.type == "cpu" for x in tensors))
        return func(*args, **(kwargs or {}))
