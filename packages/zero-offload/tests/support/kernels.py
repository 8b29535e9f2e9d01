"""Reference kernels in torch operations, and a user-defined optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
from typing import Any

import pytest
import torch
from torch import optim

from zero_offload.rules import compact

TIMEOUT_S = 120.0


class ReferenceAdam:
    """Adam in elementwise torch operations. Results do not depend on an element's position.

    ``calls`` has the number of elements of each call.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def adam_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        out: Any = None,
        **hyper: Any,
    ) -> None:
        lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
        for state in (master, exp_avg, exp_avg_sq):
            assert state.dtype == torch.float32
            assert state.is_contiguous()
        assert master.numel() == grad.numel() == exp_avg.numel() == exp_avg_sq.numel()
        self.calls.append(master.numel())
        g = _scaled(grad, hyper)
        if hyper.get("adamw_mode", True):
            master.mul_(1 - lr * hyper["weight_decay"])
        elif hyper["weight_decay"]:
            g = g + master * hyper["weight_decay"]
        exp_avg.copy_(exp_avg * beta1 + g * (1 - beta1))
        exp_avg_sq.copy_(exp_avg_sq * beta2 + (g * g) * (1 - beta2))
        is_corrected, step = hyper.get("bias_correction", True), hyper["step"]
        correction1 = 1 - beta1**step if is_corrected else 1.0
        correction2 = 1 - beta2**step if is_corrected else 1.0
        denominator = exp_avg_sq.sqrt() / math.sqrt(correction2) + hyper["eps"]
        _publish(master.sub_((exp_avg / denominator) * (lr / correction1)), out)


class ReferenceKernel(ReferenceAdam):
    """`ReferenceAdam` with the update rules of other optimizers, and Adam with compact moments."""

    def sgd_step(
        self, master: Any, grad: Any, momentum_buffer: Any = None, *, out: Any = None, **hyper: Any
    ) -> None:
        momentum = hyper["momentum"]
        g = _scaled(grad, hyper).add(master, alpha=hyper["weight_decay"])
        direction = g
        if momentum_buffer is not None:
            if hyper["step"] == 1:
                momentum_buffer.copy_(g)
            else:
                momentum_buffer.mul_(momentum).add_(g, alpha=1 - hyper["dampening"])
            is_nesterov = hyper["nesterov"]
            direction = g.add(momentum_buffer, alpha=momentum) if is_nesterov else momentum_buffer
        _publish(master.add_(direction, alpha=-hyper["lr"]), out)

    def adagrad_step(
        self, master: Any, grad: Any, state_sum: Any, *, out: Any = None, **hyper: Any
    ) -> None:
        g = _scaled(grad, hyper).add(master, alpha=hyper["weight_decay"])
        state_sum.addcmul_(g, g, value=1)
        rate = hyper["lr"] / (1 + (hyper["step"] - 1) * hyper["lr_decay"])
        root = state_sum.sqrt().add_(hyper["eps"])
        _publish(master.addcdiv_(g, root, value=-rate), out)

    def lion_step(
        self, master: Any, grad: Any, exp_avg: Any, *, out: Any = None, **hyper: Any
    ) -> None:
        g, lr = _scaled(grad, hyper), hyper["lr"]
        direction = exp_avg.mul(hyper["beta1"]).add_(g, alpha=1 - hyper["beta1"]).sign_()
        master.mul_(1 - lr * hyper["weight_decay"]).add_(direction, alpha=-lr)
        exp_avg.mul_(hyper["beta2"]).add_(g, alpha=1 - hyper["beta2"])
        _publish(master, out)

    def adam_step_8bit(self, param: Any, grad: Any, *stored: Any, **hyper: Any) -> None:
        exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = stored
        first = compact.decode_exp_avg(exp_avg, exp_avg_scale)
        second = compact.decode_exp_avg_sq(exp_avg_sq, exp_avg_sq_scale)
        self._compact_step(param, grad, first, second, **hyper)
        values = *compact.encode_exp_avg(first), *compact.encode_exp_avg_sq(second)
        targets = exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def adam_step_bf16(
        self, param: Any, grad: Any, *moments: Any, seed: int = 0, **hyper: Any
    ) -> None:
        """Update bf16 moments with rounding by position instead of stochastic rounding.

        Odd elements are truncated and even ones rounded to nearest, so a shifted range gives other
        bits.
        """
        values = [moment.float() for moment in moments]
        self._compact_step(param, grad, *values, **hyper)
        odd = torch.arange(param.numel()) % 2 == 1
        for target, value in zip(moments, values, strict=True):
            cut = (value.view(torch.int32) & -65536).view(torch.float32)
            target.copy_(torch.where(odd, cut, value))

    def _compact_step(
        self, param: Any, grad: Any, *moments: Any, remainder: Any = None, **hyper: Any
    ) -> None:
        if remainder is None:
            self.adam_step(param, grad, *moments, **hyper)
            return
        assert hyper.pop("out", None) is None
        master = compact.join_master(param, remainder)
        self.adam_step(master, grad, *moments, **hyper)
        upper, lower = compact.split_master(master)
        param.copy_(upper)
        remainder.copy_(lower)


def _scaled(grad: Any, hyper: dict[str, Any]) -> Any:
    return grad.float() * hyper["grad_scale"]


def _publish(master: Any, out: Any) -> None:
    if out is not None:
        out.copy_(master)


class GatedAdam(ReferenceAdam):
    """Adam whose call number ``gate_at`` (from 0) waits for ``gate``, or raises ``error``."""

    def __init__(self, gate_at: int = 0, error: BaseException | None = None) -> None:
        super().__init__()
        self.gate_at, self.error = gate_at, error
        self.gate, self.reached = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        self.threads.append(threading.current_thread().name)
        if len(self.calls) == self.gate_at:
            self.reached.set()
            if self.error is not None:
                raise self.error
            assert self.gate.wait(TIMEOUT_S)
        super().adam_step(*args, **kwargs)


def cpu_adam() -> Any:
    """Return the module `cpu_adam`, or skip the test if it is not installed."""
    if importlib.util.find_spec("cpu_adam") is None:
        pytest.skip("the optional cpu-adam is not installed")
    return importlib.import_module("cpu_adam")


class Lion(optim.Optimizer):
    """User-defined optimizer (Chen et al. 2023) with the attribute ``is_elementwise``."""

    is_elementwise = True

    def __init__(self, params: Any, **settings: Any) -> None:
        defaults = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0}
        super().__init__(params, {**defaults, **settings})

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
    """`Lion` with the name of its update rule, so that a kernel may compute it."""

    update_rule = "lion"
