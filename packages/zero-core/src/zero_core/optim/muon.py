"""Muon for matrices and AdamW for other parameters, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_core._torch import orthogonalize
from zero_core.optim.adam import BaseOptimizer, check_settings, update_adam


class Muon(BaseOptimizer):
    """Muon (Jordan et al., 2024) as in `torch.optim.Muon`, or AdamW, for each parameter group.

    A group with ``use_muon`` has matrices only. For the gradient ``g``: ``m = momentum * m + (1 -
    momentum) * g``, then ``p -= lr * weight_decay * p + lr * factor * O``. ``O`` is ``m`` (with
    ``nesterov``: ``(1 - momentum) * g + momentum * m``) after five orthogonalizing Newton-Schulz
    iterations in bf16. ``exp_avg`` is ``m``. Other groups use AdamW, where ``exp_avg`` is the first
    moment.

    Arguments apply to groups that do not set them. ``betas`` and ``eps`` are AdamW's.
    ``adjust_lr_fn`` "original" means ``factor = sqrt(max(1, rows / columns))``, and
    "match_rms_adamw" means ``factor = 0.2 * sqrt(max(rows, columns))``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        use_muon: bool = True,
    ) -> None:
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be 'original' or 'match_rms_adamw', found {adjust_lr_fn!r}"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "use_muon": use_muon,
            "fused": True,
            "decoupled_weight_decay": True,
            "maximize": False,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            settings = {k: group[k] for k in ("lr", "weight_decay", "momentum", "eps")}
            check_settings(group["betas"], **settings)
            for param in group["params"] if group["use_muon"] else ():
                if param.ndim != 2:
                    raise ValueError(
                        f"a parameter of shape {tuple(param.shape)} is in a group with use_muon, "
                        "and is no matrix: put it into a group without"
                    )

    def is_elementwise_group(self, group: Mapping[str, Any]) -> bool:
        """Whether the update of ``group`` is elementwise. `zero_core.optim.factory` calls this."""
        return not group["use_muon"]

    def _update(self, group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            update_adam(group, self.state)
            return
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            average = state["exp_avg"].lerp_(param.grad, 1 - group["momentum"])
            if group["nesterov"]:
                average = param.grad.lerp(average, group["momentum"])
            rows, columns = param.shape
            factor = 0.2 * math.sqrt(max(rows, columns))
            if group["adjust_lr_fn"] == "original":
                factor = math.sqrt(max(1, rows / columns))
            narrow = average.to(torch.bfloat16, copy=True)
            direction = orthogonalize(narrow, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(direction, alpha=-group["lr"] * factor)


def tag_matrices(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set ``use_muon`` on each parameter that lacks it, as DeepSpeed does.

    ``use_muon`` is true for matrices whose name has neither "embed" nor "lm_head", ignoring case.
    """
    for name, param in named:
        if not hasattr(param, "use_muon"):  # foreign: DeepSpeed's attribute on a torch parameter
            is_other = any(word in name.lower() for word in ("embed", "lm_head"))
            param.use_muon = param.ndim == 2 and not is_other  # type: ignore[attr-defined]


def split_groups(params: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split parameters and parameter groups by the parameters' attribute ``use_muon``.

    ``options``: settings for groups that lack them. ``muon_lr`` and ``adam_lr`` override ``lr``.
    """
    groups = [g for g in params if isinstance(g, dict)]
    loose = [p for p in params if not isinstance(p, dict)]
    everything = [*loose, *(p for group in groups for p in group["params"])]
    # foreign: DeepSpeed's attribute on a torch parameter
    unmarked = [tuple(p.shape) for p in everything if not hasattr(p, "use_muon")]
    if unmarked:
        raise ValueError(
            f"Muon: parameters of shapes {unmarked[:3]} do not say whether they are matrices: call "
            "zero_core.optim.muon.tag_matrices(model.named_parameters())"
        )
    shared = {k: v for k, v in options.items() if k not in ("lr", "muon_lr", "adam_lr")}
    found = []
    for group in [{"params": loose}, *groups]:
        for use_muon, own, default in ((True, "muon_lr", 0.02), (False, "adam_lr", 3e-4)):
            members = [p for p in group["params"] if p.use_muon is use_muon]
            rate = options.get(own, options.get("lr", default))
            if members:
                found.append({"lr": rate, **shared, **group, "use_muon": use_muon})
                found[-1]["params"] = members
    return found
