"""Adam and AdamW with moments of 16 or 8 bits.

Moments are bf16 with stochastic rounding, or 8-bit block-wise (Dettmers et al., 2021, arXiv
2110.02861). The master weight of a bf16 parameter can be split: see [Note: split master].

[Note: 8-bit codes]
128 elements form a block with an fp32 scale: the largest magnitude of first moments, or the
largest square root of second moments. A scale below ``2**-100`` becomes 0, a non-finite one NaN.

A first moment's code is about ``127 * sqrt(magnitude / scale)``, with the moment's sign. The root
is approximated by halving the exponent, with linear interpolation between powers of two. A second
moment's code stands for its square root divided by the scale, rounded to 4 mantissa bits: 255 for
1, 16 codes per power of two, and 0 for ``17 / 2**20`` or less.

[Note: split master]
An fp32 master weight is kept as its bf16 parameter, rounded to nearest (ties to the greater
magnitude), and an int16 remainder, the lower half of its bits. Together they restore all bits, but
not of NaN, and not of magnitudes below ``2**-134``, which become 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_offload.protocols import Bf16AdamKernel, EightBitAdamKernel
from zero_offload.rules.rule import MASTER, MOMENTS, PARAM, REMAINDER, AdamRule, Grad, Rule, Stored

WINDOW_NUMEL = 1 << 15
"""Elements that are converted at once: a multiple of `BLOCK_NUMEL` that fits in a CPU cache."""
BLOCK_NUMEL = 128

_HALF_OF_ONE = 0x3F800000 // 2
_ROOT_SHIFT = 19
_ROOT_BASE = 0x3F800000 - (255 << _ROOT_SHIFT)
_LEAST_SCALE = 2.0**-100


def _rows(values: Tensor) -> Tensor:
    return pad(values, (0, -values.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)


def _expand(codes: Tensor) -> Tensor:
    """Return the magnitudes of first moments with codes >= 0, up to a constant factor."""
    bits = codes.to(torch.float32).view(torch.int32) - _HALF_OF_ONE
    return (bits.clamp(min=0) << 1).view(torch.float32)


# The device is explicit because the module may be imported under torch.device("meta").
_LARGEST = float(_expand(torch.tensor([127], device="cpu"))[0])
_TOP = _LARGEST - 1.0  # A block's largest element is scaled to this, which rounds to code 127.


def decode_exp_avg(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 first moments of int8 ``codes``, [n], and fp32 ``scales``, one per block."""
    rows = _rows(codes).to(torch.int32)
    magnitudes = _expand(rows.abs()) * (scales[:, None] * (1.0 / _LARGEST))
    magnitudes = torch.where(rows.abs() == 127, scales[:, None], magnitudes)
    return torch.where(rows < 0, -magnitudes, magnitudes).view(-1)[: codes.numel()]


def encode_exp_avg(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and fp32 scales. A block with NaN or Inf has codes 0 and scale NaN."""
    rows = _rows(values)
    scales, inverse = _scales(rows.abs(), _TOP)
    # Invert `_expand`. The result is not rounded to a code yet.
    bits = ((rows.abs() * inverse[:, None]).view(torch.int32) >> 1) + _HALF_OF_ONE
    magnitudes = bits.view(torch.float32)
    codes = torch.where(rows < 0, -magnitudes, magnitudes).round()
    codes[scales.isnan()] = 0
    return codes.to(torch.int8).view(-1)[: values.numel()], scales


def decode_exp_avg_sq(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 second moments of uint8 ``codes``, [n], and fp32 ``scales``, one per block."""
    bits = (_rows(codes).to(torch.int32) << _ROOT_SHIFT) + _ROOT_BASE
    roots = bits.view(torch.float32) * scales[:, None]
    return roots.square_().view(-1)[: codes.numel()]


def encode_exp_avg_sq(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes and fp32 scales. A block with NaN or Inf has codes 0 and scale NaN."""
    # In double precision the root of a normal fp32 square rounds to the number that was squared.
    rows = _rows(values).double().sqrt_().float()
    scales, inverse = _scales(rows, 1.0)
    bits = (rows * inverse[:, None]).view(torch.int32).clamp(min=_ROOT_BASE) - _ROOT_BASE
    codes = (bits + (1 << (_ROOT_SHIFT - 1))) >> _ROOT_SHIFT
    codes[scales.isnan()] = 0
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def _scales(magnitudes: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return scales (0 below `_LEAST_SCALE`, NaN if not finite) and ``top / scale`` (or 0)."""
    largest = magnitudes.amax(dim=1)
    largest = torch.where(largest < _LEAST_SCALE, 0.0, largest)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    return largest, torch.where(largest == 0, 0.0, top / largest)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return fp32 master weights of bf16 parameters and int16 remainders, 0 for a parameter 0."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    is_zero = (upper & 0x7FFFFFFF) == 0
    return torch.where(is_zero, upper, upper + remainder.to(torch.int32)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 parameters and int16 remainders of fp32 master weights."""
    return upper_half(master), master.view(torch.int32).to(torch.int16)


def upper_half(master: Tensor) -> Tensor:
    """Return the bf16 parameters of split fp32 master weights. NaN stays NaN."""
    bits = master.view(torch.int32)
    rounded = torch.where(master.isnan(), bits | 0x00400000, bits + 0x8000)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
_RANDOM_BLOCK = 1 << 20
"""Maximum elements of a kernel call. Each call of a step rounds by the same random numbers."""


class _CompactAdamRule(AdamRule):
    """Adam with 16-bit or 8-bit moments. `for_params` splits bf16 parameters' master weights."""

    def __init__(self, kernel: Any, *, is_decoupled: bool, is_master_split: bool = False) -> None:
        super().__init__(kernel, is_decoupled=is_decoupled)
        self.is_master_split = is_master_split

    def for_params(self, dtype: torch.dtype) -> Rule:
        """Return the rule for parameters of ``dtype``: bf16 has split master weights."""
        return type(self)(
            self._kernel, is_decoupled=self._is_decoupled, is_master_split=dtype == torch.bfloat16
        )

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        """Return the buffers of split master weights, if any. Subclasses add the moments."""
        halves = {PARAM: (torch.bfloat16, numel), REMAINDER: (torch.int16, numel)}
        return halves if self.is_master_split else {}

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
        if not self.is_master_split:
            out.copy_(master)
            return
        for low in range(0, master.numel(), WINDOW_NUMEL):
            part = slice(low, low + WINDOW_NUMEL)
            out[part].copy_(upper_half(master[part]))

    @abstractmethod
    def call_kernel(self, param: Tensor, grad: Grad, stored: Stored, **kw: Any) -> None:
        """Call the kernel. ``param`` is bf16 if ``remainder`` is a tensor, else fp32."""

    def decode(self, name: str, stored: Stored, start: int, stop: int) -> Tensor:
        if name == MASTER and self.is_master_split:
            return join_master(stored[PARAM][start:stop], stored[REMAINDER][start:stop])
        return super().decode(name, stored, start, stop)

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        if name == MASTER and self.is_master_split:
            part = slice(start, start + values.numel())
            stored[PARAM][part], stored[REMAINDER][part] = split_master(values.float())
        else:
            super().encode(name, stored, start, values)


class Bf16AdamRule(_CompactAdamRule):
    """Adam or AdamW with stochastically rounded bf16 moments, by ``kernel.adam_step_bf16``."""

    block = _RANDOM_BLOCK

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        return {**super().stored(numel), **dict.fromkeys(MOMENTS, (torch.bfloat16, numel))}

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

    block = BLOCK_NUMEL

    def stored(self, numel: int) -> Mapping[str, tuple[torch.dtype, int]]:
        num_blocks = -(-numel // self.block)
        return {
            **super().stored(numel),
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
        read = decode_exp_avg if name == "exp_avg" else decode_exp_avg_sq
        return read(stored[name][low:stop], scales)[start - low :]

    def encode(self, name: str, stored: Stored, start: int, values: Tensor) -> None:
        """Overwrite a moment or master weights. Partly overwritten blocks are encoded again."""
        if name == MASTER:
            super().encode(name, stored, start, values)
            return
        numel, stop = stored[name].numel(), start + values.numel()
        low, high = start - start % self.block, min(numel, stop + -stop % self.block)
        if (low, high) != (start, stop):
            whole = self.decode(name, stored, low, high)
            whole[start - low : stop - low] = values
            values = whole
        write = encode_exp_avg if name == "exp_avg" else encode_exp_avg_sq
        found, scales = write(values.float())
        stored[name][low:high] = found
        stored[_SCALES[name]][low // self.block : -(-high // self.block)] = scales
