"""The device tier compared with torch's optimizers on whole parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_core.optim.device_tier import DeviceTier

TURN, SPLIT, NUMEL = 256, 928, 4096
SIZES = (100, 700, 33, 1, 512, 257, 900)
STARTS = [sum(-(-size // 32) * 32 for size in SIZES[:index]) for index in range(len(SIZES))]
PIECES = [(start, start + size, 0) for start, size in zip(STARTS, SIZES, strict=True)]
EVERY = list(range(len(SIZES)))
OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.1}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1e-1}),
]
IDS = [f"{c.__name__}-{i}" for i, (c, _) in enumerate(OPTIMIZERS)]


class InTurns(DeviceTier):
    turn_numel = TURN


class Allocations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._sizes = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._sizes[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        alive = [n for weak, n in self._sizes.values() if not torch.UntypedStorage._expired(weak)]
        self.peak = max(self.peak, sum(alive))
        return out


def _tensors(tree):
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def _drawn(seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def _make(optimizer_class, options, kind=DeviceTier, dtype=torch.float32):
    group = dict(optimizer_class([nn.Parameter(torch.zeros(1))], **options).defaults)
    shards = [torch.zeros(n, dtype=dtype) for n in (SPLIT, NUMEL - SPLIT)]
    tier = kind(
        numel=NUMEL,
        pieces=PIECES,
        params=[(0, shards[0]), (SPLIT, shards[1])],
        device=torch.device("cpu"),
        optimizer_class=optimizer_class,
        groups=[group],
    )
    tier.write_state("master_weight", 0, _drawn(1))
    return tier, group, shards


def _offer(tier, step, dtype=torch.float32):
    grad = _drawn(10 + step).to(dtype)
    tier.offer_grad(SPLIT, grad[SPLIT:].clone())
    tier.offer_grad(0, grad[:SPLIT].clone())


def _read(tier):
    return tier.read_state("master_weight", 0, NUMEL)


def _parts(flat):
    return [flat[start:stop] for start, stop, _ in PIECES]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [DeviceTier, InTurns])
@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=IDS)
def test_slices_follow_torch_bit_by_bit_and_inactive_pieces_rest(
    optimizer_class, options, kind, grad_dtype
):
    tier, group, _ = _make(optimizer_class, options, kind, grad_dtype)
    params = [nn.Parameter(part.clone()) for part in _parts(_drawn(1))]
    plain = optimizer_class(params, **options)
    for step in range(5):
        active = EVERY if step % 2 else [0, 2, 4, 5]
        _offer(tier, step, grad_dtype)
        for some in (active[:2], active[2:]):  # each gradient must be scaled in one call only
            tier.step([group], some, grad_scale=0.3)
        tier.discard_grads()
        for index, grad in enumerate(_parts(_drawn(10 + step).to(grad_dtype).float() * 0.3)):
            params[index].grad = grad if index in active else None
        plain.step()
    for mine, theirs in zip(_parts(_read(tier)), params, strict=True):
        assert torch.equal(mine, theirs.detach())
    assert [tier.read_scalars(i)["num_steps"] for i in EVERY] == [5, 2, 5, 2, 5, 5, 2]


def test_a_piece_that_lost_its_state_steps_beside_pieces_that_have_one():
    fused = (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True})
    tier, group, _ = _make(*fused)
    params = [nn.Parameter(part.clone()) for part in _parts(_drawn(1))]
    plain = fused[0](params, **fused[1])
    for step in range(5):
        if step == 3:  # as if a checkpoint without this parameter's state had been loaded
            tier.write_scalars(4, {"num_steps": 0.0})
            del plain.state[params[4]]
        _offer(tier, step)
        tier.step([group], EVERY, grad_scale=1.0)
        for param, grad in zip(params, _parts(_drawn(10 + step)), strict=True):
            param.grad = grad
        beside = [p for p in params if p is not params[4]]
        # torch's fused SGD creates momentum for all parameters of a call, or for none
        for some in (beside, params[4:5]):
            plain.param_groups[0]["params"] = some
            plain.step()
    for mine, theirs in zip(_parts(_read(tier)), params, strict=True):
        assert torch.equal(mine, theirs.detach())


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_16_bit_gradients_are_widened_a_turn_at_a_time(kernel):
    options = {"lr": 1e-2, kernel: True}
    tier, group, _ = _make(torch.optim.AdamW, options, InTurns, torch.bfloat16)
    peaks = []
    for step in range(3):
        _offer(tier, step, torch.bfloat16)
        with Allocations() as found:
            tier.step([group], EVERY, grad_scale=0.5)
        peaks.append(found.peak)
    buffer, scratch = 4 * TURN, 4 * 4 * TURN * (kernel == "foreach")
    assert peaks[-1] <= buffer + scratch + 64, peaks


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_kept_after_its_step(grad_dtype):
    tier, group, _ = _make(torch.optim.AdamW, {"lr": 1e-2, "fused": True}, InTurns, torch.bfloat16)
    grads = [torch.ones(n, dtype=grad_dtype) for n in (SPLIT, NUMEL - SPLIT)]
    offered = [grad.untyped_storage()._weak_ref() for grad in grads]
    tier.offer_grad(0, grads[0])
    tier.offer_grad(SPLIT, grads[1])
    tier.step([group], EVERY, grad_scale=0.5)
    tier.discard_grads()
    grads.clear()
    assert all(map(torch.UntypedStorage._expired, offered))
