"""Each variant of a configuration changes no bit, whatever the program does with the engine.

The oracle is the engine without the variant, which zero-core's tests compare with DDP. Collectives
of zero-comm fall behind at random. A feature that changes no bit is one line of `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zero_core
from tests.delayed import delayed_collectives
from zero_core.testing import Case, make_model
from zero_core.testing.equal import FOLDER, Row, Variant, check, cover

HOST = {"offload_optimizer": {"device": "cpu"}}
REST = {"stage3_param_persistence_threshold": 0, **HOST}
WEIGHTS = {"zero_lossless_weights": True}
GRADIENTS = {"zero_lossless_gradients": True}
HPZ = {"zero_hpz_partition_size": 2}
NODES = ((4, 2),)
SEVERAL = ((2, 1), (2, 2), (3, 1), *NODES)
CODED = 98
"""Width of a model whose shards are long enough to be coded."""


DELAYED = {"collectives": delayed_collectives}


def _host(**keys: Any) -> Variant:
    return Variant({"offload_optimizer": {"device": "cpu", **keys}}, base=HOST, stages=(1, 2, 3))


VARIANTS: Mapping[str, Variant] = {
    "lossless weights": Variant(
        WEIGHTS, further=DELAYED, stages=(1, 2, 3), ranks=SEVERAL, width=CODED
    ),
    "lossless gradients": Variant(GRADIENTS, further=DELAYED, ranks=SEVERAL, width=CODED),
    "both lossless": Variant(
        {**WEIGHTS, **GRADIENTS}, further=DELAYED, stages=(1, 2, 3), ranks=SEVERAL, width=CODED
    ),
    "hpZ": Variant(HPZ, further=DELAYED, stages=(3,), ranks=NODES),
    "hpZ, lossless weights": Variant(
        {**HPZ, **WEIGHTS}, further=DELAYED, stages=(3,), ranks=NODES, width=CODED
    ),
    "ratio 0.3": _host(ratio=0.3),
    "ratio 0.999": _host(ratio=0.999),
    "names on the host": _host(parameters=["blocks.1.*", "*.norm.bias", "embed.weight"]),
    "budget of the device": _host(device_budget=5_000),
    "update in backward": _host(update_in_backward=True),
    "update in backward, ratio 0.3": _host(update_in_backward=True, ratio=0.3),
    "states in files": Variant(
        {"offload_optimizer": {"device": "nvme", "nvme_path": FOLDER}}, base=HOST
    ),
    "parameters on the host": Variant({"offload_param": {"device": "cpu"}}, base=REST, stages=(3,)),
    "parameters in files": Variant(
        {"offload_param": {"device": "nvme", "nvme_path": FOLDER}}, base=REST, stages=(3,)
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", cover(VARIANTS), ids=str)
def test_a_variant_changes_no_bit(row: Row, tmp_path: Path) -> None:
    check(row, VARIANTS[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", cover(VARIANTS, strength=3), ids=str)
def test_any_three_settings_change_no_bit(row: Row, tmp_path: Path) -> None:
    check(row, VARIANTS[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        *(("lossless weights", stage) for stage in (1, 2, 3)),
        *(("both lossless", stage) for stage in (1, 3)),
        *(("hpZ", 3), ("hpZ, lossless weights", 3)),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_variant_changes_no_bit_on_processes(
    variant: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    row = Row("trains", variant, stage, dtype, 4, 2)
    check(row, VARIANTS[variant], tmp_path, is_simulated=False)


@pytest.mark.parametrize(
    "name", ["ratio 0.3", "ratio 0.999", "names on the host", "budget of the device"]
)
def test_a_share_of_the_host_is_a_share(name: str) -> None:
    engine = zero_core.build(make_model(33), Case(2, zero=VARIANTS[name].zero).config())
    tier: Any = engine.sharded_state.tier
    assert 0 < tier.host_numel < tier.geometry.numel
    engine.close()
