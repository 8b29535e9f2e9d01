"""Hooks that others put on a unit's modules find its current parameters, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import zero_core
from zero_core.testing import Case, SimulatedDDP, SimulatedRanks, seeded, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")

STEPS = 3
OPT: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.inner(x) * self.gain * scale)


class _Net(nn.Module):
    """Three kinds of units: linear maps, blocks, and the root."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(4):
            self.first = nn.Linear(6, 6)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.blocks = nn.ModuleList(_Block() for _ in range(3))
            self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for block in self.blocks:
            x = block(x, scale=1.5)
        return self.last(x).square().mean()

    def linears(self) -> list[nn.Linear]:
        return [m for m in self.modules() if isinstance(m, nn.Linear)]


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2.0


class _Scaled(nn.Module):
    """A parametrization that has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def _old_weight_norm(net: _Net) -> None:
    for linear in net.linears():
        nn.utils.weight_norm(linear)


def _old_spectral_norm(net: _Net) -> None:
    for linear in net.linears():
        nn.utils.spectral_norm(linear)


def _weight_norm(net: _Net) -> None:
    for linear in net.linears():
        parametrizations.weight_norm(linear)


def _spectral_norm(net: _Net) -> None:
    for linear in net.linears():
        parametrizations.spectral_norm(linear)


def _parametrized(net: _Net) -> None:
    for index, linear in enumerate(net.linears()):
        parametrize.register_parametrization(linear, "weight", _Doubled())
        parametrize.register_parametrization(linear, "bias", _Scaled() if index % 2 else _Doubled())


def _pre_hooks(net: _Net) -> None:
    def add_weight(module: nn.Linear, args: Any) -> Any:
        return (args[0] + module.weight.mean(0, keepdim=True)[:, :1],)

    def scale_by_gain(module: _Block, args: Any, kwargs: Any) -> Any:
        return args, {"scale": kwargs["scale"] * module.gain.mean() * module.inner.weight.norm()}

    def add_last(module: _Net, args: Any) -> Any:
        return (args[0] + module.last.bias.sum() + module.first.bias,)

    for linear in net.linears():
        linear.register_forward_pre_hook(add_weight)
    for block in net.blocks:
        block.register_forward_pre_hook(scale_by_gain, with_kwargs=True, prepend=True)
    net.register_forward_pre_hook(add_last)


def _forward_hooks(net: _Net) -> None:
    def add_weight(module: nn.Linear, args: Any, output: Tensor) -> Tensor:
        return output + module.weight.sum()

    def add_gain(module: _Block, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output * kwargs["scale"] + module.gain + module.inner.bias

    for linear in net.linears():
        linear.register_forward_hook(add_weight)
    for block in net.blocks:
        block.register_forward_hook(add_gain, with_kwargs=True)


def _pre_hooks_of_parts(net: _Net) -> None:
    def add_weight(module: nn.Linear, args: Any) -> Any:
        return (args[0] + module.weight.mean(0, keepdim=True)[:, :1],)

    for linear in net.linears():
        linear.register_forward_pre_hook(add_weight)


CHANGES: dict[str, Callable[[_Net], None]] = {
    "weight_norm by hooks": _old_weight_norm,
    "spectral_norm by hooks": _old_spectral_norm,
    "weight_norm": _weight_norm,
    "spectral_norm": _spectral_norm,
    "parametrizations": _parametrized,
    "pre-hooks": _pre_hooks,
    "pre-hooks of parts": _pre_hooks_of_parts,
    "forward hooks": _forward_hooks,
}


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _reference(
    change: Callable[[_Net], None], ranks: SimulatedRanks
) -> tuple[list[float], dict[str, Tensor]]:
    with seeded(4):  # spectral norms draw, too
        net = _Net()
        change(net)
    ddp = SimulatedDDP(net, ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        loss = ddp(_x(step, ranks.rank))
        loss.backward()
        ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {k: v.detach().clone() for k, v in net.named_parameters()}


def _follows(ranks: SimulatedRanks, which: str, is_before: bool, stage: int) -> None:
    change = CHANGES[which]
    losses, values = _reference(change, ranks)
    with seeded(4):
        net = _Net()
        if is_before:
            change(net)
    engine = zero_core.build(net, Case(stage).config() | OPT, process_group=ranks)
    if not is_before:
        change(net)
    found = []
    for step in range(STEPS):
        loss = engine(_x(step, ranks.rank))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    torch.testing.assert_close(found, losses, rtol=0.0, atol=0.0)
    full = engine.full_state_dict()
    torch.testing.assert_close({k: full[k] for k in values}, values, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("which", CHANGES)
def test_hooks_registered_before_build_find_current_parameters(which, stage):
    simulate(_follows, 2, which, True, stage)


@pytest.mark.parametrize("stage", range(4))
def test_hooks_registered_before_build_find_current_parameters_on_three_ranks(stage):
    simulate(_follows, 3, "weight_norm by hooks", True, stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("which", ["pre-hooks of parts", "forward hooks"])
def test_hooks_registered_after_build_find_current_parameters(which, stage):
    simulate(_follows, 2, which, False, stage)
