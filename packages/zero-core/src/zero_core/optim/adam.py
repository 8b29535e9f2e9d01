"""Adam with optional bias correction, Lion, and the base class of this package's optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.adam import adam


class BaseOptimizer(torch.optim.Optimizer, ABC):
    """Base class of torch optimizers that update one parameter group at a time."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        ``closure``, if given, is called first, with autograd on. Returns its result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any]) -> None:
        """Update the parameters of ``group`` that have a gradient. Autograd is off."""


def check_settings(betas: tuple[float, ...], **settings: float) -> None:
    for name, value in settings.items():
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be in [0, 1), got {beta}")


class Adam(BaseOptimizer):
    """Adam (Kingma and Ba, 2015, arXiv 1412.6980) or AdamW (arXiv 1711.05101).

    With bias correction, the update calls the same function as `torch.optim.Adam`. Without it, the
    raw moments are used: ``p -= lr * exp_avg / (sqrt(exp_avg_sq) + eps)``. The state is torch's:
    ``step`` (0-d, fp32), and ``exp_avg`` and ``exp_avg_sq`` with the parameter's shape and dtype.

    Arguments have the same meaning as in torch. ``decoupled_weight_decay`` selects AdamW. With bias
    correction, ``fused`` selects torch's fused kernel. With ``fused``, ``step`` is on the
    parameter's device, otherwise on the CPU.
    """

    is_elementwise: ClassVar[bool] = True  # an element's update depends on that element alone
    has_host_kernel: ClassVar[bool] = True  # see `has_kernel_rule` of `zero_core.optim.factory`
    update_rule: ClassVar[str] = "adam"  # name by which an offloaded tier selects the kernel

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        fused: bool = True,
    ) -> None:
        check_settings(betas, lr=float(lr), eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any]) -> None:
        update_adam(group, self.state)


def update_adam(group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Update the parameters of ``group`` that have a gradient, and their ``state``, as `Adam`."""
    params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
    grads = [p.grad for p in params if p.grad is not None]
    if any(grad.is_sparse for grad in grads):
        raise RuntimeError("Adam does not take sparse gradients")
    is_fused = bool(group["fused"])
    for param in params:
        own = state[param]
        if "exp_avg_sq" not in own:
            device = param.device if is_fused else torch.device("cpu")
            own["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                own[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    names = ("exp_avg", "exp_avg_sq", "step")
    averages, squares, steps = ([state[p][name] for p in params] for name in names)
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    if group.get("bias_correction", True):
        adam(
            params,
            grads,
            averages,
            squares,
            [],
            steps,
            foreach=False,
            fused=is_fused,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=group["eps"],
            maximize=group["maximize"],
        )
        return
    for param, grad, average, square, step in zip(
        params, grads, averages, squares, steps, strict=True
    ):
        grad = -grad if group["maximize"] else grad
        if group["decoupled_weight_decay"]:
            param.mul_(1 - lr * decay)
        else:
            grad = grad.add(param, alpha=decay)
        step += 1
        average.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.sub_(average / square.sqrt().add_(group["eps"]) * lr)


class Lion(BaseOptimizer):
    """Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2), with decoupled weight decay.

    For momentum ``m`` and gradient ``g``: ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) +
    weight_decay * p)``, then ``m = beta2 * m + (1 - beta2) * g``. The only state is ``exp_avg``
    (``m``), with the parameter's shape and dtype. Operations have the order of cpu-adam's kernel,
    so fp32 results are bit-identical to the kernel's on CPUs with FMA.

    Args:
        params: dense parameters or groups of parameters.
        lr: learning rate, not negative. The paper advises a third to a tenth of AdamW's.
        betas: momentum's weight in the direction, and decay of the momentum, both in [0, 1).
        weight_decay: decoupled, not negative. The paper advises three to ten times AdamW's.
        maximize: maximize the objective instead of minimizing it.

    Raises:
        ValueError: a setting is out of range, or ``step`` finds a sparse gradient.
    """

    is_elementwise: ClassVar[bool] = True  # an element's update depends on that element alone
    update_rule: ClassVar[str] = "lion"  # name by which an offloaded tier selects a kernel

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_settings(betas, lr=lr, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise ValueError("Lion does not take sparse gradients")
            grad = -param.grad if group["maximize"] else param.grad
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            exp_avg = state["exp_avg"]
            direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
            param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
