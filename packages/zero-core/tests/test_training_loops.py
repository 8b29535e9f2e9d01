"""What a training loop does around a step: tensor hooks, evaluation, odd models; as with DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing import LR, WEIGHT_DECAY, Case, spawn

STEPS = 3


class _Net(nn.Module):
    """Blocks with dropout, half of the second block frozen for good."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 5))
            for _ in range(3)
        )
        self.blocks[1][0].requires_grad_(False)
        self.blocks[2][3].bias.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class _NoInput(nn.Module):
    """The root has no parameters, and its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("start", torch.linspace(-1.0, 1.0, 12).view(3, 4))

    def forward(self) -> Tensor:
        x = self.start
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


Call = Callable[..., Tensor]
Loop = Callable[[Call, nn.Module, int, int], Tensor]
"""Runs what comes before the backward of a step: the callable model, the module, step and rank."""


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(call: Call, module: nn.Module, step: int, rank: int) -> Tensor:
    return call(_x(step, rank))


def _without_input(call: Call, module: nn.Module, step: int, rank: int) -> Tensor:
    return call()


def _evaluating(call: Call, module: nn.Module, step: int, rank: int) -> Tensor:
    """Evaluation in both modes, before the training forward and between it and its backward."""
    for mode in (torch.no_grad, torch.inference_mode):
        module.eval()
        with mode():
            first = call(_x(90, rank))
            assert torch.equal(first, call(_x(90, rank)))  # no dropout
        module.train()
    loss = call(_x(step, rank))
    module.eval()
    with torch.no_grad():
        assert torch.equal(call(_x(90, rank)), first.clone())
    module.train()
    return loss


def _failing(call: Call, module: nn.Module, step: int, rank: int) -> Tensor:
    """A forward that raises in a block, one that does in the root, then a good one."""
    state = torch.get_rng_state()
    for wrong in (torch.ones(4, 6), "not a tensor"):
        with pytest.raises((RuntimeError, TypeError)):
            call(wrong)
    torch.set_rng_state(state)
    return call(_x(step, rank))


def _hooked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Hooks on parameters, as gradient surgery sets them: halved, cut off, seen."""

    def made() -> nn.Module:
        model = make()
        model.blocks[0][0].weight.register_hook(lambda grad: grad * 0.5)
        model.blocks[1][3].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    return made


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "half a block frozen": (_Net, _train),
    "no input, no root parameters": (_NoInput, _without_input),
    "tensor hooks": (_hooked(_Net), _train),
    "evaluation in between": (_Net, _evaluating),
    "failing forwards": (_Net, _failing),
}


def _follows_ddp(rank: int, world_size: int, name: str) -> None:
    make, loop = LOOPS[name]
    # Three ranks: another order than DDP's ring.
    atol = 0.0 if world_size <= 2 else 4e-6
    model = make()
    ddp = DistributedDataParallel(model) if world_size > 1 else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    torch.manual_seed(rank)
    plain = _train if loop in (_evaluating, _failing) else loop
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(ddp, model, step, rank).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for stage in (0, 1, 2, 3):
        engine = zero_core.build(make(), Case(stage).config())
        torch.manual_seed(rank)
        for step in range(STEPS):
            engine.backward(loop(engine, engine.module, step, rank))
            engine.step()
        torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=atol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_numbers_are_those_of_ddp(world_size, name):
    spawn(_follows_ddp, world_size, name)


def _gradient_hooks(rank: int, world_size: int) -> None:
    for stage in (0, 3):
        model = _Net()
        seen: list[Tensor | None] = []
        hook = model.head.weight.register_post_accumulate_grad_hook
        hook(lambda p, seen=seen: seen.append(p.grad))
        engine = zero_core.build(model, Case(stage).config())
        hook(lambda p, seen=seen: seen.append(p.grad))
        engine.backward(engine(_x(0, rank)))
        # Set before build(): this rank's own gradient; after it: the engine has taken it over.
        assert seen[0] is not None
        assert seen[0].shape == (3, 5)
        assert seen[1] is None
        engine.step()


def test_a_hook_after_accumulation_sees_a_gradient_only_if_it_was_there_before_build():
    spawn(_gradient_hooks, 2)
