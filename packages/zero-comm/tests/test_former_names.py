"""Names of the last release keep working, and say what they are called now."""

import importlib

import pytest

from zero_comm import collectives, create_collectives, quantizer
from zero_comm.transport import protocol


@pytest.mark.parametrize(
    ("old", "new"),
    [("NativeCollectives", protocol.TransportCollectives), ("NativeWork", protocol.Work)],
)
def test_a_renamed_name_warns_when_used(old: str, new: object) -> None:
    with pytest.warns(DeprecationWarning, match=rf"zero_comm.native.{old} is now .*removed"):
        assert getattr(importlib.import_module("zero_comm.native"), old) is new


def test_an_unknown_name_of_a_former_module_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        importlib.import_module("zero_comm.native").missing  # noqa: B018


def test_former_modules_are_folders_with_the_same_names() -> None:
    assert collectives.create_collectives is create_collectives
    names = {"dequantize", "dequantize_rows", "dequantize_sum", "quantize", "quantize_rows"}
    assert names | {"QUANTIZABLE_DTYPES"} <= {*dir(quantizer)}
