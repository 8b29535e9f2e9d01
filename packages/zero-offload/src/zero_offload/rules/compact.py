"""Adam and AdamW with moments of 16 or 8 bits.

Moments are bf16 with stochastic rounding, or block-wise 8 bits after Dettmers et al., 2021 (arXiv
2110.02861), with the codes of `zero_offload.rules.codes`. Beside them the master weight of a bf16
parameter is kept split: the parameter is its upper half, an int16 remainder the lower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_offload.protocols import Bf16AdamKernel, EightBitAdamKernel
from zero_offload.rules import codes
from zero_offload.rules.rule import MASTER, MOMENTS, PARAM, REMAINDER, AdamRule, Grad, Rule, Stored

_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
_RANDOM_BLOCK = 1 << 20
"""Elements after which the random numbers of the stochastic rounding start again."""


def _windows(numel: int) -> Iterator[slice]:
    size = codes.WINDOW_NUMEL
    return (slice(low, min(low + size, numel)) for low in range(0, numel, size))


class _CompactAdamRule(AdamRule):
    """Adam with compact moments, and a split master weight for bf16 parameters."""

    def __init__(self, kernel: Any, *, is_decoupled: bool, is_master_split: bool = False) -> None:
        super().__init__(kernel, is_decoupled=is_decoupled)
        self.is_master_split = is_master_split

    def for_params(self, dtype: torch.dtype) -> Rule:
        """Return the rule with a split master for bf16 and with a whole one for fp32 and fp16."""
        return type(self)(
            self._kernel, is_decoupled=self._is_decoupled, is_master_split=dtype == torch.bfloat16
        )

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        if not self.is_master_split:
            return self.stored_moments(numel)
        halves = {PARAM: (torch.bfloat16, numel), REMAINDER: (torch.int16, numel)}
        return {**halves, **self.stored_moments(numel)}

    @abstractmethod
    def stored_moments(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and length of each buffer of the moments."""

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        if not self.is_master_split:
            assert master is not None, "a whole master weight"
            self.call_kernel(master, grad, stored, remainder=None, **kw)
            return
        param, out = stored[PARAM], kw.pop("out")
        self.call_kernel(param, grad, stored, remainder=stored[REMAINDER], out=None, **kw)
        if out is not None and out.data_ptr() != param.data_ptr():
            out.copy_(param)

    def round_to(self, master: Tensor, out: Tensor) -> None:
        """Round ties of a split master weight to the greater magnitude, as its upper half is."""
        if not self.is_master_split:
            out.copy_(master)
            return
        for part in _windows(master.numel()):
            out[part].copy_(codes.upper_half(master[part]))

    @abstractmethod
    def call_kernel(self, param: Tensor, grad: Grad, stored: Stored, **kw: Any) -> None:
        """Call the kernel for ``param``: master weights, or upper halves with a ``remainder``."""

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
        if name == MASTER and self.is_master_split:
            found = torch.empty(stop - start, dtype=torch.float32, device="cpu")
            for part in _windows(stop - start):
                halves = (stored[half][start:stop][part] for half in (PARAM, REMAINDER))
                found[part].copy_(codes.join_master(*halves))
            return found
        return super().decode(name, stored, start, stop)

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        if name == MASTER and self.is_master_split:
            own = {half: stored[half][start:] for half in (PARAM, REMAINDER)}
            for part in _windows(values.numel()):
                param, remainder = codes.split_master(values[part].float())
                own[PARAM][part].copy_(param)
                own[REMAINDER][part].copy_(remainder)
        else:
            super().encode(name, stored, start, values)


class Bf16AdamRule(_CompactAdamRule):
    """Adam or AdamW with bf16 moments, stochastically rounded, by ``kernel.adam_step_bf16``.

    The random numbers are a function of the step and of an element's place in its block.
    """

    block = _RANDOM_BLOCK

    def stored_moments(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        return dict.fromkeys(MOMENTS, (torch.bfloat16, numel))

    def call_kernel(self, param: Tensor, grad: Grad, stored: Stored, **kw: Any) -> None:
        kernel: Bf16AdamKernel = self._kernel
        for start in range(0, param.numel(), self.block):
            part = slice(start, start + self.block)
            moments = (stored[name][part] for name in MOMENTS)
            own: dict[str, Any] = {
                name: kw[name][part] for name in ("remainder", "out") if kw[name] is not None
            }
            if "copies" in kw:
                own["copies"] = [(source[part], target[part]) for source, target in kw["copies"]]
            terms = [g[part] for g in grad] if isinstance(grad, list) else grad[part]
            kernel.adam_step_bf16(param[part], terms, *moments, **{**kw, **own})


class EightBitAdamRule(_CompactAdamRule):
    """Adam or AdamW with 8-bit moments by ``kernel.adam_step_8bit``."""

    block = codes.BLOCK_NUMEL

    def stored_moments(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        num_blocks = -(-numel // self.block)
        return {
            "exp_avg": (torch.int8, numel),
            "exp_avg_sq": (torch.uint8, numel),
            **dict.fromkeys(_SCALES.values(), (torch.float32, num_blocks)),
        }

    def call_kernel(self, param: Tensor, grad: Grad, stored: Stored, **kw: Any) -> None:
        kernel: EightBitAdamKernel = self._kernel
        moments = (stored[name] for name in (*MOMENTS, *_SCALES.values()))
        kernel.adam_step_8bit(param, grad, *moments, **kw)

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
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
