"""The device tier's step in turns: the same bits, and no more memory than one turn's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_core.optim.device_tier import DeviceTier

TURN, SPLIT, NUMEL = 256, 928, 4096
SIZES = (100, 700, 33, 1, 512, 257, 900)


class InTurns(DeviceTier):
    turn_numel = TURN


class Allocations(TorchDispatchMode):
    """Counts the bytes of live tensors that operations within it made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._sizes[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        alive = [n for weak, n in self._sizes.values() if not _expired(weak)]
        self.peak = max(self.peak, sum(alive))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def _expired(weak: int) -> bool:
    return torch.UntypedStorage._expired(weak)


def make(kind: type[DeviceTier], optimizer: Any, options: dict[str, Any]) -> tuple[DeviceTier, Any]:
    group = dict(optimizer([nn.Parameter(torch.zeros(1))], **options).defaults)
    pieces, start = [], 0
    for size in SIZES:
        pieces.append((start, start + size, 0))
        start += -(-size // 32) * 32
    shards = [(0, torch.zeros(SPLIT, dtype=torch.bfloat16))]
    shards.append((SPLIT, torch.zeros(NUMEL - SPLIT, dtype=torch.bfloat16)))
    tier = kind(
        numel=NUMEL,
        pieces=pieces,
        params=shards,
        device=torch.device("cpu"),
        optimizer_class=optimizer,
        groups=[group],
    )
    generator = torch.Generator().manual_seed(1)
    tier.write_state("master_weight", 0, torch.randn(NUMEL, generator=generator))
    return tier, group


def offer(tier: DeviceTier, step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(NUMEL, generator=generator).to(dtype)
    tier.offer_grad(0, grad[:SPLIT].clone())
    tier.offer_grad(SPLIT, grad[SPLIT:].clone())


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.NAdam, {"lr": 1e-2}),
    ],
)
def test_turns_change_no_bit(optimizer, options, grad_dtype) -> None:
    tiers = [make(kind, optimizer, options) for kind in (DeviceTier, InTurns)]
    actives = [[0, 2, 3], list(range(7)), list(range(7)), [1, 5, 6]]
    for step, active in enumerate(actives):
        for tier, group in tiers:
            offer(tier, step, grad_dtype)
            tier.step([group], active, grad_scale=0.3)
            tier.discard_grads()
    (one, _), (other, _) = tiers
    assert one.state_names() == other.state_names()
    for name in one.state_names():
        assert torch.equal(one.read_state(name, 0, NUMEL), other.read_state(name, 0, NUMEL)), name
    for piece in range(7):
        assert one.read_scalars(piece) == other.read_scalars(piece)
        other.write_scalars(piece, one.read_scalars(piece))


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_16_bit_gradients_are_widened_a_turn_at_a_time(kernel: str) -> None:
    tier, group = make(InTurns, torch.optim.AdamW, {"lr": 1e-2, kernel: True})
    peaks = []
    for step in range(3):
        offer(tier, step, torch.bfloat16)
        with Allocations() as found:
            tier.step([group], list(range(7)), grad_scale=0.5)
        peaks.append(found.peak)
    buffer, scratch = 4 * TURN, 4 * 4 * TURN * (kernel == "foreach")
    assert peaks[-1] <= buffer + scratch + 64, peaks


def test_a_gradient_is_scaled_once_however_many_calls_a_step_takes() -> None:
    found = []
    for calls in ([[0, 1, 2, 3, 4, 5, 6]], [[0, 2], [1, 3, 4, 5, 6]]):
        tier, group = make(DeviceTier, torch.optim.AdamW, {"lr": 1e-2})
        offer(tier, 0, torch.float32)
        for active in calls:
            tier.step([group], active, grad_scale=0.25)
        found.append(tier.read_state("exp_avg", 0, NUMEL))
    assert torch.equal(*found)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_kept_after_its_step(grad_dtype: torch.dtype) -> None:
    tier, group = make(InTurns, torch.optim.AdamW, {"lr": 1e-2, "fused": True})
    grads = [torch.ones(n, dtype=grad_dtype) for n in (SPLIT, NUMEL - SPLIT)]
    offered = [grad.untyped_storage()._weak_ref() for grad in grads]
    tier.offer_grad(0, grads[0])
    tier.offer_grad(SPLIT, grads[1])
    tier.step([group], list(range(7)), grad_scale=0.5)
    tier.discard_grads()
    grads.clear()
    assert all(map(_expired, offered))
