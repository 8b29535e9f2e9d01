"""Model and functions for tests that read a parameter at many moments of training."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zero_core.engine import Engine
from zero_core.testing.models import seeded

WIDTH = 6
READERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.sum().item(),
    "numpy": lambda p: p.detach().float().numpy().tolist(),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(p.detach()).clone(),
    "linear": lambda p: functional.linear(torch.ones(2, p.shape[-1], dtype=p.dtype), p),
    "operator": lambda p: 2 * p + 1,
    "comparison": lambda p: (p > 0.01).tolist(),
    "where": lambda p: torch.where(p > 0.01, 1, 2),
    "index": lambda p: p[0],
    "iteration": lambda p: torch.stack(list(p)),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "cast": lambda p: p.to(torch.float64),
    "deepcopy": lambda p: copy.deepcopy({"kept": p})["kept"],
    "save": lambda p: _saved(p),
    "storage": lambda p: p.untyped_storage().nbytes() and p.clone(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "another thread": lambda p: _in_a_thread(p),
}
"""Functions that read a parameter and return its value or a value computed from it."""


def _saved(param: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save({"kept": param}, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=True)["kept"]
    return found


def _in_a_thread(param: nn.Parameter) -> Tensor:
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(lambda: param.detach().clone()) for _ in range(2)]
    value, other = (read.result() for read in reads)
    assert torch.equal(value, other)
    return value


class _Block(nn.Module):
    def __init__(self, number: int, look: Callable[[str], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.number = number
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        self.look(f"forward of block {self.number}")
        out: Tensor = x + torch.tanh(self.inner(x))
        return out


class Watched(nn.Module):
    """Model whose forward calls a given function with the name of the current moment."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[str], None] = lambda moment: None
        with seeded(0):
            self.inlet = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_Block(n, lambda m: self.look(m)) for n in range(3))
            self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        self.look("behind the blocks")
        loss: Tensor = self.outlet(x).float().square().mean()
        return loss

    @contextmanager
    def looking(self, look: Callable[[str], None]) -> Iterator[None]:
        self.look = look
        try:
            yield
        finally:
            self.look = lambda moment: None


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator)


class Log:
    """Results of `READERS` for one parameter, by moment and reader: a value or error message."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self.found: dict[tuple[str, str], Any] = {}

    @torch.no_grad()
    def look(self, moment: str) -> None:
        for name, read in READERS.items():
            try:
                found = read(self._param)
            except RuntimeError as error:
                found = str(error)
            self.found[moment, name] = found.tolist() if isinstance(found, Tensor) else found


BEFORE, AFTER = "gathered before the step", "gathered after the step"
"""Moments within ``engine.gathered()``, whose results are the expected ones."""


def read_everywhere(engine: Engine, rank: int, steps: int) -> tuple[dict[Any, Any], list[float]]:
    """Train a `Watched` model. Return the last step's `Log.found`, and this rank's losses."""
    model = engine.module
    assert isinstance(model, Watched)
    log, losses = Log(model.blocks[1].get_parameter("inner.weight")), []
    for step in range(steps):
        is_last = step == steps - 1
        if is_last:
            log.look("before the forward")
            with engine.gathered():
                log.look(BEFORE)
        with model.looking(log.look if is_last else model.look):
            loss = engine(inputs(step, rank))
        if is_last:
            log.look("before backward")
        engine.backward(loss)
        if is_last:
            log.look("before the step")
        engine.step()
        if is_last:
            log.look("after the step")
            with torch.no_grad(), model.looking(lambda m: log.look(f"{m}, evaluating")):
                engine(inputs(step, rank))
            log.look("after an evaluation")
            with engine.gathered():
                log.look(AFTER)
        losses.append(loss.item())
    return log.found, losses


def check_truth(found: dict[Any, Any], refusals: dict[str, str]) -> None:
    """Check that results equal those of `BEFORE` or `AFTER`, or the errors in ``refusals``."""
    for (moment, reader), value in found.items():
        if moment in refusals:
            assert isinstance(value, str), (moment, reader, value)
            assert refusals[moment] in value, (moment, reader, value)
        else:
            is_after = "after" in moment or "evaluating" in moment
            assert value == found[AFTER if is_after else BEFORE, reader], (moment, reader)
