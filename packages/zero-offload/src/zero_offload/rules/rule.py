"""Base class of update rules, and the rules with fp32 states: Adam, Adagrad, SGD, Lion.

[Note: rules]
rule    computes an optimizer's update on flat host memory. The caller owns master weights,
        gradients and states, in memory or in a buffer of a state file.
state   the form in a checkpoint: one number per element, under torch's name.
stored  the form in memory: fp32 or bf16 numbers, 8-bit codes with scales, or a split master weight.
span    elements of one call. A rule with ``block`` 1 updates any span. Other rules count blocks of
        ``block`` elements from a piece's first element. Their span is inside one piece, and begins
        and ends between two of its blocks or at the piece's ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, optim

from zero_offload.protocols import (
    AdagradKernel,
    AdamKernel,
    CopyingKernel,
    LionKernel,
    OptimizerClass,
    SgdKernel,
    SummingKernel,
)
from zero_offload.threads import num_kernel_threads

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients and parameters that host kernels read and write."""
_LARGEST = torch.finfo(torch.float32).max
MASTER = "master_weight"
PARAM = "param"
REMAINDER = "remainder"

Grad = Tensor | list[Tensor]
"""The gradient of one span: fp32, bf16 or fp16. Tensors in a list are summed in fp32, in order."""
Stored = Mapping[str, Tensor]
"""The 1-D host buffers of one span, by name."""
Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a source, which is a buffer of the span, and a target of the same length."""


class Rule(ABC):
    """One update rule over flat host memory.

    Attributes:
        states: names and dtypes of the elementwise states in a checkpoint, except master weights.
        scalars: names of torch's scalar states: ``("step",)`` or none.
        block: see [Note: rules].
        summing: the kernel if it accepts several gradients, otherwise None.
        is_master_split: whether ``stored`` has the master weight as bf16 ``param`` and int16
            ``remainder``, which ``decode`` joins and ``encode`` splits.
    """

    states: Mapping[str, torch.dtype]
    scalars: tuple[str, ...] = ()
    block: int = 1
    is_master_split: bool = False

    def __init__(self, kernel: Any) -> None:
        self.summing: SummingKernel | None = None
        if isinstance(kernel, SummingKernel) and kernel.sums_grads:
            self.summing = kernel
        self._kernel: Any = kernel
        self._is_copying = isinstance(kernel, CopyingKernel) and kernel.copies_first

    def for_params(self, dtype: torch.dtype) -> Rule:
        """Return the rule for parameters of ``dtype``, which may split their master weights."""
        return self

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        """Return dtype and length of a span's buffers, without unsplit master weights."""
        return {name: (dtype, numel) for name, dtype in self.states.items()}

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """Return the value of a state before the first update."""
        return 0.0

    @abstractmethod
    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the kernel's arguments for update ``step`` (from 1), or raise ValueError."""

    @abstractmethod
    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        """Call the kernel for one span. ``kw`` are its keyword arguments. See `update`."""

    def hyper(self, group: Mapping[str, Any], step: int) -> Hashable:
        """Return the settings of update ``step`` (from 1). Pieces with equal settings may merge."""
        sign = -1.0 if group.get("maximize", False) else 1.0  # negating the gradient is exact
        return tuple(self.keywords(group, step).items()), sign

    def update(
        self,
        master: Tensor | None,
        grad: Grad,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
        copies: Copies = (),
    ) -> None:
        """Update one span in place by the kernel.

        ``master`` is fp32, or None if split. ``grad`` is multiplied by ``grad_scale`` first. It is
        a list only if `summing` is not None. ``hyper`` is a result of `hyper`. ``out`` receives the
        rounded new values. Targets of ``copies`` receive the values from before the update.
        """
        keywords, sign = hyper
        copied: dict[str, Any] = {}
        if copies and self._is_copying:
            copied = {"copies": copies}
        else:
            for source, target in copies:
                target.copy_(source)
        options = {"out": out, "grad_scale": sign * grad_scale, "num_threads": num_kernel_threads()}
        self.call(master, grad, stored, **options, **dict(keywords), **copied)

    def round_to(self, master: Tensor, out: Tensor) -> None:
        """Write fp32 master weights to ``out``, rounded as in `update`."""
        out.copy_(master)

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
        """Return a state or fp32 master weights of the span's elements ``[start, stop)``.

        The result is fp32 and 1-D. It is the memory in ``stored`` itself if that is fp32, so copy
        it before a file's buffer is reused.
        """
        return stored[name][start:stop].float()

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        """Overwrite a state or fp32 master weights from the span's element ``start`` on."""
        stored[name][start : start + values.numel()].copy_(values)


def setting(
    group: Mapping[str, Any], name: str, *, default: float | None = None, least: float = 0.0
) -> float:
    """Return a group's setting as a number >= ``least`` of fp32's range, or raise ValueError."""
    value = float(group[name] if default is None else group.get(name, default))
    if not least <= value <= _LARGEST:
        raise ValueError(
            f"{name} = {value} cannot be served by a host kernel, which takes fp32 numbers from "
            f"{least} up; pass adam_kernel=None for torch's own update"
        )
    return value


MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamRule(Rule):
    """Adam or AdamW with fp32 moments by ``kernel.adam_step``.

    Kingma and Ba, 2015 (arXiv 1412.6980); Loshchilov and Hutter, 2019 (arXiv 1711.05101).
    ``is_decoupled`` selects AdamW's weight decay, unless a group has ``decoupled_weight_decay``.
    """

    states = dict.fromkeys(MOMENTS, torch.float32)
    scalars = ("step",)

    def __init__(self, kernel: AdamKernel, *, is_decoupled: bool) -> None:
        super().__init__(kernel)
        self._is_decoupled = is_decoupled

    @classmethod
    def of(cls, kernel: Any, optimizer_class: OptimizerClass) -> AdamRule:
        return cls(kernel, is_decoupled=issubclass(optimizer_class, optim.AdamW))

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        if group.get("amsgrad", False):
            raise ValueError(
                "amsgrad is not served by a host kernel; set it before the optimizer is made, or "
                "pass adam_kernel=None for torch's own update"
            )
        return {
            "step": step,
            **_rate_and_betas(group),
            "eps": setting(group, "eps"),
            "weight_decay": setting(group, "weight_decay"),
            "adamw_mode": bool(group.get("decoupled_weight_decay", self._is_decoupled)),
            "bias_correction": bool(group.get("bias_correction", True)),
        }

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.adam_step(master, grad, *(stored[name] for name in MOMENTS), **kw)


class AdagradRule(Rule):
    """Adagrad (Duchi et al., 2011) like torch.optim.Adagrad, by ``kernel.adagrad_step``."""

    states = MappingProxyType({"sum": torch.float32})
    scalars = ("step",)
    _kernel: AdagradKernel

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        return float(group.get("initial_accumulator_value", 0.0))

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        names = ("lr", "lr_decay", "eps", "weight_decay")
        return {"step": step, **{name: setting(group, name) for name in names}}

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.adagrad_step(master, grad, stored["sum"], **kw)


class SgdRule(Rule):
    """Stochastic gradient descent like torch.optim.SGD, by ``kernel.sgd_step``."""

    def __init__(self, kernel: SgdKernel, *, has_momentum: bool) -> None:
        super().__init__(kernel)
        self.states = {"momentum_buffer": torch.float32} if has_momentum else {}

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        momentum = setting(group, "momentum")
        if momentum and not self.states:
            raise ValueError(
                "momentum was 0 when the optimizer was made, so there is no momentum_buffer; "
                "start with the momentum that is wanted, or pass adam_kernel=None"
            )
        return {
            "step": min(step, 2),  # the kernel distinguishes only step 1
            "lr": setting(group, "lr"),
            "momentum": momentum,
            "dampening": setting(group, "dampening", least=-_LARGEST),
            "weight_decay": setting(group, "weight_decay"),
            "nesterov": bool(group["nesterov"]),
        }

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        buffer = stored["momentum_buffer"] if kw["momentum"] else None
        self._kernel.sgd_step(master, grad, buffer, **kw)


class LionRule(Rule):
    """Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2) by ``kernel.lion_step``."""

    states = MappingProxyType({"exp_avg": torch.float32})
    _kernel: LionKernel

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        decay = setting(group, "weight_decay", default=0.0)
        return {**_rate_and_betas(group), "weight_decay": decay}

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.lion_step(master, grad, stored["exp_avg"], **kw)


def _rate_and_betas(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas = {(beta1, beta2)} must be from 0 up and below 1")
    return {"lr": setting(group, "lr"), "beta1": beta1, "beta2": beta2}
