"""What the tests share: a reference Adam kernel, a small flat space, and a loop over tiers."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from zero_offload.protocols import StateTier, UploadCodec
from zero_offload.rules import codes
from zero_offload.tier import create_tier, make_device_tier
from zero_offload.tiers.flat_tier import DeviceTier
from zero_offload.tiers.twin import TwinTier

CPU = torch.device("cpu")
RATIOS = (0.0, 0.001, 0.3, 0.5, 0.999, 1.0)


class ReferenceAdam:
    """Adam by single torch operations, each correctly rounded: an element's bits do not depend on
    where it lies. Counts its calls and the elements they cover."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def adam_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        for state in (master, exp_avg, exp_avg_sq):
            assert state.dtype == torch.float32
            assert state.is_contiguous()
        assert master.numel() == grad.numel() == exp_avg.numel() == exp_avg_sq.numel()
        self.calls.append(master.numel())
        g = grad.float() * grad_scale
        if adamw_mode:
            master.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g + master * weight_decay
        exp_avg.copy_(exp_avg * beta1 + g * (1 - beta1))
        exp_avg_sq.copy_(exp_avg_sq * beta2 + (g * g) * (1 - beta2))
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
        denominator = exp_avg_sq.sqrt() / math.sqrt(correction2) + eps
        master.sub_((exp_avg / denominator) * (lr / correction1))
        if out is not None:
            out.copy_(master)


class ReferenceKernel(ReferenceAdam):
    """The other rules in the order of torch.optim's for-loop, and Adam with compact moments."""

    def sgd_step(
        self,
        master: Any,
        grad: Any,
        momentum_buffer: Any = None,
        *,
        step: int,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        g = (grad.float() * grad_scale).add(master, alpha=weight_decay)
        direction = g
        if momentum_buffer is not None:
            if step == 1:
                momentum_buffer.copy_(g)
            else:
                momentum_buffer.mul_(momentum).add_(g, alpha=1 - dampening)
            direction = g.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
        _publish(master.add_(direction, alpha=-lr), out)

    def adagrad_step(
        self,
        master: Any,
        grad: Any,
        state_sum: Any,
        *,
        step: int,
        lr: float,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        g = (grad.float() * grad_scale).add(master, alpha=weight_decay)
        state_sum.addcmul_(g, g, value=1)
        rate = lr / (1 + (step - 1) * lr_decay)
        _publish(master.addcdiv_(g, state_sum.sqrt().add_(eps), value=-rate), out)

    def lion_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.99,
        weight_decay: float = 0.0,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        g = grad.float() * grad_scale
        direction = exp_avg.mul(beta1).add_(g, alpha=1 - beta1).sign_()
        master.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
        exp_avg.mul_(beta2).add_(g, alpha=1 - beta2)
        _publish(master, out)

    def adam_step_8bit(
        self,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        exp_avg_scale: Any,
        exp_avg_sq_scale: Any,
        *,
        remainder: Any = None,
        out: Any = None,
        num_threads: int | None = None,
        **hyper: Any,
    ) -> None:
        moments = (
            codes.decode_exp_avg(exp_avg, exp_avg_scale),
            codes.decode_exp_avg_sq(exp_avg_sq, exp_avg_sq_scale),
        )
        self._compact_step(param, grad, *moments, remainder=remainder, out=out, **hyper)
        for target, value in zip(
            (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale),
            (*codes.encode_exp_avg(moments[0]), *codes.encode_exp_avg_sq(moments[1])),
            strict=True,
        ):
            target.copy_(value)

    def adam_step_bf16(
        self,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        seed: int = 0,
        remainder: Any = None,
        out: Any = None,
        num_threads: int | None = None,
        **hyper: Any,
    ) -> None:
        """Not rounded stochastically, but by where an element lies, which a test can see too."""
        moments = (exp_avg.float(), exp_avg_sq.float())
        self._compact_step(param, grad, *moments, remainder=remainder, out=out, **hyper)
        odd = torch.arange(param.numel()) % 2 == 1
        for target, value in zip((exp_avg, exp_avg_sq), moments, strict=True):
            cut = (value.view(torch.int32) & -65536).view(torch.float32)
            target.copy_(torch.where(odd, cut, value))

    def _compact_step(
        self,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        remainder: Any,
        out: Any,
        **hyper: Any,
    ) -> None:
        if remainder is None:
            self.adam_step(param, grad, exp_avg, exp_avg_sq, out=out, **hyper)
            return
        assert out is None
        master = codes.join_master(param, remainder)
        self.adam_step(master, grad, exp_avg, exp_avg_sq, **hyper)
        upper, lower = codes.split_master(master)
        param.copy_(upper)
        remainder.copy_(lower)


def _publish(master: Any, out: Any) -> None:
    if out is not None:
        out.copy_(master)


class Lion(optim.Optimizer):
    """A user's own elementwise optimizer (Chen et al. 2023), with the vouching attribute."""

    is_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.get("exp_avg", torch.zeros_like(param))
                update = average.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])
                state["exp_avg"] = average.mul(beta2).add_(param.grad, alpha=1 - beta2)


class NamedLion(Lion):
    """The same, with the name of its rule, so that a kernel may compute it."""

    update_rule = "lion"


class Space:
    """A flat space of two shards (units) with padding, several pieces, and gradients by step.

    The first shard holds pieces that are adjacent, the second has a gap; both end in padding.
    """

    sizes = (37, 5, 211, 1, 64)
    numel = 360

    def __init__(self, *, dtype: torch.dtype = torch.float32, num_groups: int = 1) -> None:
        self.pieces = [
            (0, 37, 0),
            (37, 42, 1 % num_groups),
            (42, 253, 0),
            (260, 261, 0),
            (272, 336, 1 % num_groups),
        ]
        generator = torch.Generator().manual_seed(7)
        self.initial = torch.randn(self.numel, generator=generator)
        self.dtype = dtype
        first = self.initial[:256].to(dtype).clone()
        second = self.initial[256:].to(dtype).clone()
        self.params = [(0, first), (256, second)]

    def grad(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        return torch.randn(self.numel, generator=generator).to(self.dtype)

    def flat_params(self) -> Tensor:
        return torch.cat([t for _, t in self.params])

    def covered(self) -> Tensor:
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for start, stop, _ in self.pieces:
            mask[start:stop] = True
        return mask


def workers() -> set[threading.Thread]:
    """Threads of host tiers that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("zero-offload")}


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Return once ``condition`` holds; fails if it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


def is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def group_of(cls: type[torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    """The optimizer's settings with every default filled in."""
    return dict(cls([nn.Parameter(torch.zeros(1))], **settings).defaults)


def make_tier(
    space: Space,
    cls: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    *,
    ratio: float = 1.0,
    kernel: Any = None,
    upload_codec: UploadCodec | None = None,
    **block: Any,
) -> TwinTier:
    tier = create_tier(
        numel=space.numel,
        pieces=space.pieces,
        params=space.params,
        device=CPU,
        optimizer_class=cls,
        groups=groups,
        config={"offload_optimizer": {"device": "cpu", "ratio": ratio, **block}},
        adam_kernel=kernel,
        device_tier=make_device_tier,
        upload_codec=upload_codec,
    )
    tier.write_state("master_weight", 0, space.initial)
    return tier


def offer(tier: StateTier, space: Space, step: int) -> None:
    """Offer a step's gradient in two segments, the last first, as backward does."""
    grad = space.grad(step)
    tier.offer_grad(256, grad[256:].clone())
    tier.offer_grad(0, grad[:256].clone())


def train(
    tier: StateTier,
    space: Space,
    groups: Sequence[Mapping[str, Any]],
    steps: range = range(4),
    *,
    active: Sequence[int] | None = None,
    grad_scale: float = 1.0,
) -> None:
    for step in steps:
        offer(tier, space, step)
        indices = range(len(space.pieces)) if active is None else active
        tier.step(groups, indices, grad_scale=grad_scale)
    tier.wait_params(0, space.numel)


def snapshot(tier: StateTier, space: Space) -> dict[str, Tensor]:
    """Every number that the tier holds, and the parameters."""
    found = {name: tier.read_state(name, 0, space.numel) for name in tier.state_names()}
    found["params"] = space.flat_params().clone()
    for i in range(len(space.pieces)):
        scalars = tier.read_scalars(i)
        found[f"scalars{i}"] = torch.tensor([scalars[k] for k in sorted(scalars)])
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def torch_oracle(
    space: Space,
    cls: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    steps: range = range(4),
    *,
    grad_scale: float = 1.0,
) -> Tensor:
    """The fp32 weights after plain torch.optim over one tensor per piece."""
    weights = space.initial.clone()
    params = [nn.Parameter(weights[a:b].clone()) for a, b, _ in space.pieces]
    members: dict[int, list[nn.Parameter]] = {}
    for param, (_, _, g) in zip(params, space.pieces, strict=True):
        members.setdefault(g, []).append(param)
    # Adagrad takes its initial sum from the constructor alone.
    initial = "initial_accumulator_value"
    settings = {initial: groups[0][initial]} if initial in groups[0] else {}
    optimizer = cls([{**groups[g], "params": m} for g, m in members.items()], **settings)  # type: ignore[call-arg]
    for step in steps:
        grad = space.grad(step).float() * grad_scale
        for param, (a, b, _) in zip(params, space.pieces, strict=True):
            param.grad = grad[a:b].clone()
        optimizer.step()
    for param, (a, b, _) in zip(params, space.pieces, strict=True):
        weights[a:b] = param.detach()
    return weights


__all__ = [
    "CPU",
    "RATIOS",
    "DeviceTier",
    "Lion",
    "NamedLion",
    "ReferenceAdam",
    "ReferenceKernel",
    "Space",
]
