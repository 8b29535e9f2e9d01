"""The backends on an accelerator, held against plain torch on the host, which defines them."""

import pytest
import torch
from quantizer_cases import (
    Case,
    all_bytes,
    cases,
    differences,
    formats,
    group_differences,
    long_cases,
    name_of,
)
from quantizer_cases import value_differences as differences_of_values

from zero_comm import BlockFormat, dequantize_sum, quantize, quantize_rows
from zero_comm.quantizer.backend import Backend, find_backend
from zero_comm.quantizer.torch_backend import TorchBackend

if not torch.accelerator.is_available():
    pytest.skip("torch finds no accelerator", allow_module_level=True)

DEVICE = torch.accelerator.current_accelerator()
assert DEVICE is not None
CASES = [*cases(), *long_cases()]
NAMES = sorted({name_of(fmt) for fmt in formats()})


def backends() -> list[Backend]:
    """The one that serves the device, and plain torch there."""
    found = [find_backend(DEVICE), TorchBackend()]
    return found if found[0].name != "torch" else found[:1]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_values_on_the_device_are_those_of_the_host(backend: Backend, name: str) -> None:
    wrong = []
    for case in CASES:
        if name_of(case.fmt) == name:
            wrong += differences(case, backend, DEVICE)
    for fmt in formats():
        if name_of(fmt) == name and fmt.block_size == 128:
            wrong += differences_of_values(*all_bytes(fmt), backend, DEVICE)
            wrong += group_differences(fmt, backend, DEVICE)
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_millions_of_elements_give_the_bytes_of_the_host(dtype: torch.dtype) -> None:
    for kind in ("int8", "int4", "e4m3", "e5m2"):
        case = Case(BlockFormat.make(kind), dtype, 3, (1 << 20) + 77, 5, True)
        assert differences(case, find_backend(DEVICE), DEVICE) == []


def test_quantizing_waits_for_nothing_on_the_device() -> None:
    """On the current stream, and seen by what follows there, without a host synchronization."""
    fmt = BlockFormat.make("int4")
    numel = 1 << 16
    x = torch.ones(2 * numel, device=DEVICE)
    rows = torch.empty(2, fmt.nbytes(numel), dtype=torch.uint8, device=DEVICE)
    total = torch.empty(numel, device=DEVICE)
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())  # x is filled on it
    with stream:
        x.mul_(3)
        assert quantize_rows(x, fmt, rows) is None
        dequantize_sum(rows, numel, fmt, total)
    torch.accelerator.current_stream().wait_stream(stream)  # total is filled on it
    assert torch.equal(total.cpu(), torch.full((numel,), 6.0))


def test_non_finite_values_are_refused_when_asked_to() -> None:
    x = torch.ones(1000, device=DEVICE)
    x[700] = float("inf")
    with pytest.raises(ValueError, match=r"the first among elements \[512, 768\)"):
        quantize(x, nonfinite="refuse")
