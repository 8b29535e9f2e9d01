"""Adam and AdamW with moments of 32, 16 or 8 bits.

Kingma and Ba, 2015 (arXiv 1412.6980); Loshchilov and Hutter, 2019 (arXiv 1711.05101). Compact
moments: block-wise 8 bits after Dettmers et al., 2021 (arXiv 2110.02861), with the codes of
`zero_offload.rules.codes`; bf16 with stochastic rounding. Beside compact moments, the master weight
of a bf16 parameter is kept split: the parameter is its upper half, an int16 remainder the lower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, optim

from zero_offload.protocols import AdamKernel, Bf16AdamKernel, EightBitAdamKernel
from zero_offload.rules import codes
from zero_offload.rules.rule import MASTER, PARAM, REMAINDER, Rule, Stored, setting

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
_RANDOM_BLOCK = 1 << 20
"""Elements after which the random numbers of the stochastic rounding start again."""


@dataclass(frozen=True, slots=True)
class _AdamHyper:
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings that pieces of one kernel call share: keywords, and the gradient's sign."""

    hyper: _AdamHyper
    sign: float

    def keywords(self, grad_scale: float) -> dict[str, Any]:
        return {
            **asdict(self.hyper),
            "grad_scale": self.sign * grad_scale,
            "num_threads": torch.get_num_threads(),
        }


class AdamRule(Rule):
    """Adam or AdamW with fp32 moments by ``kernel.adam_step``.

    Args:
        kernel: see `AdamKernel`.
        is_decoupled: AdamW's weight decay, unless a group says otherwise.
    """

    states = dict.fromkeys(_MOMENTS, torch.float32)
    scalars = ("step",)

    def __init__(self, kernel: AdamKernel, *, is_decoupled: bool) -> None:
        self._kernel = kernel
        self._is_decoupled = is_decoupled

    @classmethod
    def of(cls, kernel: Any, optimizer_class: type[optim.Optimizer]) -> AdamRule:
        """Return the rule of ``torch.optim.Adam`` or ``AdamW``."""
        return cls(kernel, is_decoupled=issubclass(optimizer_class, optim.AdamW))

    def hyper(self, group: Mapping[str, Any], step: int) -> Hashable:
        """Return the settings, or raise ValueError for amsgrad."""
        if group.get("amsgrad", False):
            raise ValueError(
                "amsgrad is not served by a host kernel; set it before the optimizer is made, or "
                "pass adam_kernel=None for torch's own update"
            )
        beta1, beta2 = group["betas"]
        hyper = _AdamHyper(
            step=step,
            lr=setting(group, "lr"),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=setting(group, "eps"),
            weight_decay=setting(group, "weight_decay"),
            adamw_mode=bool(group.get("decoupled_weight_decay", self._is_decoupled)),
            bias_correction=bool(group.get("bias_correction", True)),
        )
        return _Settings(hyper, -1.0 if group.get("maximize", False) else 1.0)

    def update(
        self,
        master: Tensor | None,
        grad: Tensor,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
    ) -> None:
        """Update one span by one kernel pass."""
        moments = (stored[name] for name in _MOMENTS)
        self._kernel.adam_step(master, grad, *moments, out=out, **hyper.keywords(grad_scale))


class _CompactAdamRule(AdamRule):
    """Adam with compact moments, and a split master weight for bf16 parameters."""

    def __init__(self, kernel: Any, *, is_decoupled: bool, is_master_split: bool = False) -> None:
        super().__init__(kernel, is_decoupled=is_decoupled)
        self.is_master_split = is_master_split

    def for_params(self, dtype: torch.dtype) -> Rule:
        """Return the rule with a split master for bf16 and with a whole one for fp32 and fp16."""
        return type(self)(
            self._kernel,
            is_decoupled=self._is_decoupled,
            is_master_split=dtype == torch.bfloat16,
        )

    def _halves(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        if not self.is_master_split:
            return {}
        return {PARAM: (torch.bfloat16, numel), REMAINDER: (torch.int16, numel)}

    def update(
        self,
        master: Tensor | None,
        grad: Tensor,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
    ) -> None:
        """Update one span by one kernel pass."""
        keywords = hyper.keywords(grad_scale)
        if self.is_master_split:
            self._pass(stored[PARAM], grad, stored, stored[REMAINDER], None, keywords)
            if out is not None and out.data_ptr() != stored[PARAM].data_ptr():
                out.copy_(stored[PARAM])
        else:
            assert master is not None, "a whole master weight"
            self._pass(master, grad, stored, None, out, keywords)

    @abstractmethod
    def _pass(
        self,
        param: Tensor,
        grad: Tensor,
        stored: Stored,
        remainder: Tensor | None,
        out: Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        """Run the kernel over master weights, whole or upper halves."""

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
        """Return a state or the master weights in fp32."""
        if name == MASTER:
            return codes.join_master(stored[PARAM][start:stop], stored[REMAINDER][start:stop])
        return super().decode(name, stored, start, stop)

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        """Overwrite a state or the master weights."""
        if name == MASTER:
            param, remainder = codes.split_master(values.float())
            stop = start + values.numel()
            stored[PARAM][start:stop].copy_(param)
            stored[REMAINDER][start:stop].copy_(remainder)
        else:
            super().encode(name, stored, start, values)


class Bf16AdamRule(_CompactAdamRule):
    """Adam or AdamW with bf16 moments, stochastically rounded, by ``kernel.adam_step_bf16``.

    The random numbers are a function of the step and of an element's place in its block.
    """

    block = _RANDOM_BLOCK

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        """Return two bf16 moments, and the halves of the master weight."""
        return {**self._halves(numel), **dict.fromkeys(_MOMENTS, (torch.bfloat16, numel))}

    def _pass(
        self,
        param: Tensor,
        grad: Tensor,
        stored: Stored,
        remainder: Tensor | None,
        out: Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        kernel: Bf16AdamKernel = self._kernel  # type: ignore[assignment]
        for start in range(0, param.numel(), self.block):
            part = slice(start, start + self.block)
            kernel.adam_step_bf16(
                param[part],
                grad[part],
                *(stored[name][part] for name in _MOMENTS),
                remainder=None if remainder is None else remainder[part],
                out=None if out is None else out[part],
                **keywords,
            )


class EightBitAdamRule(_CompactAdamRule):
    """Adam or AdamW with 8-bit moments by ``kernel.adam_step_8bit``."""

    block = codes.BLOCK_NUMEL

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        """Return codes and scales of the moments, and the halves of the master weight."""
        num_blocks = -(-numel // self.block)
        return {
            **self._halves(numel),
            "exp_avg": (torch.int8, numel),
            "exp_avg_sq": (torch.uint8, numel),
            **dict.fromkeys(_SCALES.values(), (torch.float32, num_blocks)),
        }

    def _pass(
        self,
        param: Tensor,
        grad: Tensor,
        stored: Stored,
        remainder: Tensor | None,
        out: Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        kernel: EightBitAdamKernel = self._kernel  # type: ignore[assignment]
        names = (*_MOMENTS, *_SCALES.values())
        kernel.adam_step_8bit(
            param, grad, *(stored[n] for n in names), remainder=remainder, out=out, **keywords
        )

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
        """Return a state or the master weights in fp32."""
        if name == MASTER:
            return super().decode(name, stored, start, stop)
        low = start - start % self.block
        scales = stored[_SCALES[name]][low // self.block : -(-stop // self.block)]
        read = codes.decode_exp_avg if name == "exp_avg" else codes.decode_exp_avg_sq
        return read(stored[name][low:stop], scales)[start - low :]

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        """Overwrite a state. A block that is overwritten in part is encoded again as a whole."""
        if name == MASTER:
            super().encode(name, stored, start, values)
            return
        numel, stop = stored[name].numel(), start + values.numel()
        low, high = start - start % self.block, min(numel, stop + -stop % self.block)
        if (low, high) != (start, stop):
            whole = self.decode(name, stored, low, high)
            whole[start - low : stop - low] = values
            values = whole
        write = codes.encode_exp_avg if name == "exp_avg" else codes.encode_exp_avg_sq
        found, scales = write(values.float())
        stored[name][low:high] = found
        stored[_SCALES[name]][low // self.block : -(-high // self.block)] = scales
