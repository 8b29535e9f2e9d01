"""Lion, a torch optimizer whose update is the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from zero_core.optim.adam import BaseOptimizer, check_settings


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
