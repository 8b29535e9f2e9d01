"""Names of the last release keep working, and say what they are called now."""

import importlib

import pytest
import torch

from zero_comm import quantizer
from zero_comm.transport import protocol


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("zero_comm.native", "NativeCollectives", protocol.TransportCollectives),
        ("zero_comm.native", "NativeWork", protocol.Work),
    ],
)
def test_a_renamed_name_warns_when_used(module: str, old: str, new: object) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"{module}.{old} is now .*removed in the next release"
    ):
        assert getattr(importlib.import_module(module), old) is new


def test_an_unknown_name_of_a_former_module_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        importlib.import_module("zero_comm.native").missing  # noqa: B018


def test_the_functions_of_the_former_quantizer_module_are_in_its_folder() -> None:
    values = torch.tensor([0.5, -1.0])
    assert torch.equal(quantizer.dequantize(quantizer.quantize(values), 2)[1:], values[1:])
    for name in ("dequantize_rows", "dequantize_sum", "quantize_rows"):
        assert callable(getattr(quantizer, name))
    assert values.dtype in quantizer.QUANTIZABLE_DTYPES


def test_collectives_are_importable_from_their_folder() -> None:
    found = importlib.import_module("zero_comm.collectives")
    assert found.create_collectives is importlib.import_module("zero_comm").create_collectives
