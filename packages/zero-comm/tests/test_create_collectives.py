"""The factory: its entry point, the settings it reads, the settings it refuses."""

import ast
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from native_collectives import DelayedNative

import zero_comm
from zero_comm import create_collectives, quantized_nbytes
from zero_comm.collectives import QuantizedWeights


def make(config: dict[str, Any], *, rank: int = 0, world_size: int = 1) -> tuple[Any, Any]:
    native = DelayedNative(world_size)
    return native, create_collectives(native, rank=rank, world_size=world_size, config=config)


def sent_nbytes(config: dict[str, Any]) -> int:
    native, collectives = make(config)
    out = torch.empty(4096)
    collectives.all_gather(out, torch.randn(4096), unit=0, version=0, backward=False).wait()
    return int(native.calls[0].nbytes)


def test_the_entry_point_is_the_factory() -> None:
    (found,) = entry_points(group="zero_core.collectives", name="quantized")
    assert found.load() is create_collectives


def test_quantized_weights_are_8_bit_unless_said_otherwise() -> None:
    on = {"zero_quantized_weights": True}
    assert sent_nbytes(on) == quantized_nbytes(4096, "int8")
    assert sent_nbytes({**on, "zero_quantized_weights_bits": None}) == sent_nbytes(on)
    assert sent_nbytes({**on, "zero_quantized_weights_bits": 4}) == quantized_nbytes(4096, "int4")


def test_a_full_block_with_everything_else_off_is_accepted() -> None:
    config = {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_hpz_partition_size": 1,
        "zeropp_loco_param": None,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    }
    assert isinstance(make(config)[1], QuantizedWeights)


@pytest.mark.parametrize("config", [{}, {"zero_quantized_weights": False}])
def test_a_config_that_asks_for_nothing_gets_the_native_collectives(config: dict[str, Any]) -> None:
    native, collectives = make(config)
    assert collectives is native


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_quantized_gradients", True),
        ("zero_quantized_nontrainable_weights", True),
        ("zero_hpz_partition_size", 2),
        ("zero_hpz_partition_size", 0),
        ("zeropp_loco_param", {"err_beta": 0.8, "reset_T": 1024}),
        ("zero_quantized_weights", "yes"),
        ("zero_quantized_weights_bits", 3),
        ("zero_quantized_weights_bits", "8"),
        ("zero_quantized_weights_bits", True),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"zero_optimization\.{key} "):
        make({"zero_quantized_weights": True, key: value})


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank must"):
        make({"zero_quantized_weights": True}, rank=rank, world_size=world_size)


def test_nothing_is_imported_but_torch_and_the_standard_library() -> None:
    import sys

    allowed = {"torch", "zero_comm", *sys.stdlib_module_names}
    for path in Path(zero_comm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {n.partition(".")[0] for n in names} <= allowed, path
