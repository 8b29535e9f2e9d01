"""Quantizer backend of compiled kernels for host memory, with torch's thread count.

The kernels use the best instruction set that the machine supports. The environment variable
``ZERO_COMM_ISA`` ("generic", "avx2", "avx512" or "avx512_vbmi2") forces one. It is read at first
use. All instruction sets produce the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from zero_comm import _kernels
from zero_comm.quantizer.block_format import BlockFormat, seed_of_group
from zero_comm.quantizer.torch_backend import in_groups

_VARIABLE: Final = "ZERO_COMM_ISA"
# The numbers are those of the enumerations in native/kernels.h.
_KINDS: Final = {"int8": 0, "int4": 1, "e4m3": 2, "e5m2": 3}
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_active: int | None = None


class NativeBackend:
    """`zero_comm.quantizer.backend.Backend` of compiled kernels. fp64 passes through fp32."""

    name = "native"

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> bool | None:
        x = on_host(x if x.dtype in _DTYPES else x.to(torch.float32))
        shape, threads = _shape(fmt, x.dtype, x.shape[1]), torch.get_num_threads()
        groups, has_nan = in_groups(rows), False
        parts = x.view(*groups.shape[:2], x.shape[1])
        for number, (values, group) in enumerate(zip(parts, groups, strict=True)):
            own_seed, place = seed_of_group(seed, number), _place(group)
            has_nan |= _kernels.encode(
                active_isa(), shape, values.data_ptr(), *place, own_seed, threads
            )
        return has_nan

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        values = on_host(out)
        if out.dtype not in _DTYPES:
            values = torch.empty(out.shape, dtype=torch.float32)
        shape, threads = _shape(fmt, values.dtype, out.shape[1]), torch.get_num_threads()
        groups = in_groups(rows)
        parts = values.view(*groups.shape[:2], values.shape[1])
        for group, part in zip(groups, parts, strict=True):
            _kernels.decode(active_isa(), shape, *_place(group), part.data_ptr(), threads)
        if values is not out:
            out.copy_(values)

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        groups = in_groups(rows)
        totals = on_host(out).view(len(groups), -1)
        shape, threads = _shape(fmt, out.dtype, totals.shape[1]), torch.get_num_threads()
        for group, total in zip(groups, totals, strict=True):
            _kernels.decode_sum(active_isa(), shape, *_place(group), total.data_ptr(), threads)


def sum_words(words: Tensor, odd: Tensor) -> int:
    """Return the `zero_comm.quantizer.checksum` of ``words``: int64, contiguous, 1-D."""
    return _kernels.checksum(active_isa(), on_host(words).data_ptr(), words.numel(), odd.data_ptr())


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use instruction set ``name`` in all threads within the block. For tests and benchmarks."""
    global _active
    previous = _active
    _active = _choose(name)
    try:
        yield
    finally:
        _active = previous


def active_isa() -> int:
    global _active
    if _active is None:
        _active = _choose(os.environ.get(_VARIABLE, ""))
    return _active


def _choose(wanted: str) -> int:
    usable = _kernels.available_isas()
    name = wanted.strip().lower()
    if not name:
        return len(usable) - 1
    if name in usable:
        return usable.index(name)
    known = name in _kernels.known_isas()
    problem = "is not supported by this machine" if known else "is no instruction set"
    raise ValueError(
        f"{_VARIABLE}={wanted!r} {problem}; unset it, or use one of: {', '.join(usable)}"
    )


def _shape(
    fmt: BlockFormat, dtype: torch.dtype, numel: int
) -> tuple[int, int, bool, bool, int, int]:
    kind = _KINDS[fmt.kind]
    return kind, fmt.block_size, fmt.is_symmetric, fmt.has_rotation, _DTYPES[dtype], numel


def _place(rows: Tensor) -> tuple[int, int, int]:
    """Return the address, the stride in bytes, and the number of ``rows``."""
    return on_host(rows).data_ptr(), rows.stride(0), len(rows)


def on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"the native backend reads host memory, but a tensor is on {tensor.device}; unset "
            f"ZERO_COMM_BACKEND"
        )
    return tensor


BACKEND: Final = NativeBackend()
