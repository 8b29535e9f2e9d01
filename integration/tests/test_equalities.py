"""Each variant of a configuration is bit-identical to its base configuration.

The oracle is the engine without the variant, which zero-core's tests compare with DDP. zero-comm's
collectives get random delays. A feature that changes no bit is one entry of `VARIANTS`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rows import check

import cpu_adam
import zero_core
from tests.support.delayed import delayed_collectives
from tests.support.host_optimizers import OPTIMIZERS
from zero_core.testing import Case, equal, make_model, train_unread
from zero_core.testing.equal import FOLDER, Row, Variant, cover
from zero_offload import create_param_tier, create_tier
from zero_offload.steppers import file_stepper

HOST = {"offload_optimizer": {"device": "cpu"}}
REST = {"stage3_param_persistence_threshold": 0, **HOST}
FILES = {"device": "nvme", "nvme_path": FOLDER}
WEIGHTS = {"zero_lossless_weights": True}
GRADIENTS = {"zero_lossless_gradients": True}
HPZ = {"zero_hpz_partition_size": 2}
EIGHT_BITS = {"zero_quantized_weights": True, "zero_quantized_gradients": True, **HPZ}
FOUR_BITS = {
    **EIGHT_BITS,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_hadamard": True,
}
NODES = ((4, 2),)
SEVERAL = ((2, 2), (3, 1), *NODES)
CODED = 98
"""Width of a model whose shards are large enough for lossless coding."""
MOVES = (0.5, 0.25, 0.999, 0.0, 1.0, 0.3)
BLOCK_NUMEL = 1000
"""Elements per block of states in a file. Each shard has several blocks."""


@pytest.fixture(autouse=True)
def _small_blocks_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", BLOCK_NUMEL)


def prompt_tier(**given: Any) -> Any:
    """Make a tier whose host completes an update in backward before backward continues."""
    tier = create_tier(**{**given, "adam_kernel": cpu_adam})
    speculate = tier.speculate

    def speculate_at_once(*args: Any, **keys: Any) -> None:
        speculate(*args, **keys)
        tier.file_traffic()  # waits for the host

    tier.speculate = speculate_at_once  # type: ignore[method-assign]
    return tier


_first_moves = itertools.count()


def moving_tier(**given: Any) -> Any:
    """Make a tier whose ratio cycles through `MOVES`, from a different start on each rank."""
    kernel = None if given["optimizer_class"] is torch.optim.NAdam else cpu_adam
    tier: Any = create_tier(**{**given, "adam_kernel": kernel})
    left = itertools.islice(itertools.cycle(MOVES), next(_first_moves) % len(MOVES), None)
    tier.controller.observe = lambda *_: next(left)
    return tier


def _host(**keys: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", **keys}}


def _share(*, base: Mapping[str, Any] | None = None, **keys: Any) -> Variant:
    return Variant(_host(**keys), base=base or HOST, stages=(1, 2, 3), family="a share")


def _early(
    base: Mapping[str, Any] | None = None, base_top: Mapping[str, Any] | None = None, **keys: Any
) -> Variant:
    """Return a variant that updates in backward. A step keeps or undoes these updates."""
    zero = {**(base or {}), **_host(update_in_backward=True, **keys)}
    late = {k: v for k, v in keys.items() if k == "state_dtype"}
    return Variant(
        zero,
        base={**(base or {}), **_host(update_in_backward=False, **late)},
        base_top=base_top or {},
        further={"state_tier": prompt_tier},
        stages=(3,) if base else (1, 2, 3) if "ratio" in keys else (0, 1, 2, 3),
        family="undo log",
    )


def _coded(zero: Mapping[str, Any], stages: tuple[int, ...], **keys: Any) -> Variant:
    further = {"collectives": delayed_collectives}
    return Variant(zero, further=further, stages=stages, family="lossless", **keys)


def _rests(base: Mapping[str, Any] | None = None, **zero: Any) -> Variant:
    """Return a variant with offloaded parameters, whose tier copies them even on a CPU."""
    base = {**REST, **(base or {})}
    tier = {"param_tier": create_param_tier}
    return Variant(zero, base=base, further=tier, stages=(3,), family="parameters elsewhere")


def _filed(base: Mapping[str, Any], **keys: Any) -> Variant:
    return Variant({"offload_optimizer": {**FILES, **keys}}, base=base, family="states in files")


def _few_bits(bits: Mapping[str, Any], base: Mapping[str, Any] = HOST, **zero: Any) -> Variant:
    """Return a variant with delays. Its base has the same quantized messages and no delays."""
    further = {"collectives": delayed_collectives}
    base = {**bits, **base}
    return Variant(zero, base, further=further, stages=(3,), ranks=NODES, family="few bits")


EARLY = {
    "undo log": _early(),
    "undo log, too small": _early(undo_buffer_size=30_000),
    "undo log, ratio 0.3": _early(ratio=0.3),
    "undo log, the first half": _early(ratio=0.5, host_share="first"),
    "undo log, a border that moves": _early(ratio="auto"),
    "undo log, 8 bits": _early(state_dtype="int8"),
    "undo log, parameters on the host": _early(
        {"offload_param": {"device": "cpu"}}, state_dtype="bfloat16"
    ),
    **{
        f"undo log, {name}, ratio 0.3": _early(
            base_top={"optimizer": {"type": name, "params": params}}, ratio=0.3
        )
        for name, params in OPTIMIZERS.items()
        if name != "AdamW"
    },
}
SHARES = {
    "ratio 0.3": _share(ratio=0.3),
    "ratio 0.999": _share(ratio=0.999),
    "names on the host": _share(parameters=["blocks.1.*", "*.norm.bias", "embed.weight"]),
    "budget of the device": _share(device_budget=5_000),
}
VARIANTS: Mapping[str, Variant] = {
    "lossless weights": _coded(WEIGHTS, (1, 2, 3), ranks=SEVERAL, width=CODED),
    "lossless gradients": _coded(GRADIENTS, (0, 1, 2, 3), ranks=SEVERAL, width=CODED),
    "both lossless": _coded({**WEIGHTS, **GRADIENTS}, (1, 2, 3), ranks=SEVERAL, width=CODED),
    "hpZ": _coded(HPZ, (3,), ranks=NODES),
    "hpZ, lossless weights": _coded({**HPZ, **WEIGHTS}, (3,), ranks=NODES, width=CODED),
    **SHARES,
    **EARLY,
    "a border that moves": Variant(
        _host(ratio="auto"),
        base=HOST,
        further={"state_tier": moving_tier},
        stages=(1, 2, 3),
        family="a border that moves",
    ),
    "NAdam, a border that moves": Variant(
        _host(ratio="auto"),
        base=HOST,
        base_top={"optimizer": {"type": "NAdam", "params": {"lr": 1e-2}}},
        further={"state_tier": moving_tier},
        stages=(1, 2, 3),
        family="a border that moves",
    ),
    "states in files": _filed(HOST),
    "states in files, ratio 0.4": _filed(HOST, ratio=0.4, buffer_count=3),
    "states of 8 bits in files": _filed(_host(state_dtype="int8"), state_dtype="int8"),
    "parameters on the host": _rests(offload_param={"device": "cpu"}),
    "parameters on the host, 8 bits": _rests(
        _host(state_dtype="int8"), offload_param={"device": "cpu"}
    ),
    "parameters in files": _rests(offload_param={**FILES, "max_in_cpu": 0, "buffer_count": 1}),
    "some parameters in files": _rests(
        offload_param={**FILES, "max_in_cpu": 5_000, "buffer_count": 2}
    ),
    "all in files": _rests(
        offload_param={**FILES, "max_in_cpu": 0}, offload_optimizer={**FILES, "ratio": 0.7}
    ),
    "8-bit messages, ratio 0.3": _few_bits(EIGHT_BITS, **_host(ratio=0.3)),
    "4-bit messages, updates in backward": _few_bits(
        FOUR_BITS, **_host(ratio=0.3, update_in_backward=True)
    ),
    "8-bit messages, parameters in files": _few_bits(
        EIGHT_BITS, REST, offload_param={**FILES, "max_in_cpu": 0}
    ),
}
UNCHECKED = {
    f"update in backward that nothing calls off, ratio {ratio}": Variant(
        _host(update_in_backward=True, ratio=ratio),
        base=_host(update_in_backward=False),
        base_top={"check_grad_overflow": False},
        family="unchecked",
    )
    for ratio in (0.4, 1.0)
}
HOSTED = {
    "NAdam, which torch updates on both, on the host": Variant(
        _host(update_in_backward=False),
        base_top={"optimizer": {"type": "NAdam", "params": {"lr": 1e-2}}},
        ranks=((2, 1), (3, 1)),
    )
}
UNSKIPPED = {
    "undo log, no step is skipped": _early(
        base_top={"check_grad_overflow": False, "gradient_clipping": 1e9}
    )
}
ALL = {**VARIANTS, **UNCHECKED, **HOSTED, **UNSKIPPED}


DTYPES = ("fp32", "bf16")
PROGRAMS = ("trains", "recomputes", "accumulates", "is edited", "loads")


@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
@pytest.mark.parametrize(
    "row",
    [
        *cover(VARIANTS, by_family=True),
        *cover(UNCHECKED, scenarios=PROGRAMS, dtypes=DTYPES, by_family=True),
        *cover(
            HOSTED,
            scenarios=(
                *("accumulates", "repeats backward", "has edited gradients"),
                *("freezes and unfreezes", "loads"),
            ),
            dtypes=("fp32",),
        ),
        *(
            Row("edits param.grad", name, 0, "fp32", ranks, 1)
            for name in HOSTED
            for ranks in (2, 3)
        ),
        *(Row("has edited gradients", "undo log", stage, "bf16", 2, 1) for stage in (0, 2)),
        Row("edits param.grad", "undo log", 0, "bf16", 2, 1),
        Row("is edited", "states of 8 bits in files", 2, "bf16", 2, 1),
        *(Row("has edited gradients", name, 2, "fp32", 2, 1) for name in SHARES),
        *(Row("skips a step", name, 3, dtype, 2, 1) for name in UNSKIPPED for dtype in DTYPES),
    ],
    ids=str,
)
def test_a_variant_changes_no_bit(row: Row, tmp_path: Path) -> None:
    check(row, ALL[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", cover(VARIANTS, strength=3, by_family=True), ids=str)
def test_more_rows_of_the_table_hold(row: Row, tmp_path: Path) -> None:
    check(row, VARIANTS[row.variant], tmp_path)


SIZES = (("bf16", 1, 1), ("fp16", 2, 1), ("fp32", 3, 1), ("bf16", 2, 1))
LONG_ROWS = [
    *(Row("goes long", "lossless weights", stage, "bf16", 2, 1) for stage in (1, 2, 3)),
    Row("goes long", "both lossless", 1, "fp32", 3, 1),
    Row("goes long", "both lossless", 2, "bf16", 4, 2),
    *(
        Row("goes long", name, stage, *SIZES[(number + stage) % len(SIZES)])
        for number, name in enumerate(EARLY)
        for turn, stage in enumerate(ALL[name].stages)
        if name == "undo log" or turn == number % len(ALL[name].stages)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", LONG_ROWS, ids=str)
def test_a_variant_changes_no_bit_in_100_steps(row: Row, tmp_path: Path) -> None:
    check(row, ALL[row.variant], tmp_path)


def _drawn(number: int) -> Row:
    draw = random.Random(number)
    name, variant = draw.choice(list(VARIANTS.items()))
    of_nodes = {per_node for ranks, per_node in variant.ranks if ranks > 1}
    sizes = [size for size in ((4, 1), (4, 2), (8, 1), (8, 2)) if size[1] in of_nodes]
    sizes += [size for size in variant.ranks if size[0] == 1]
    scenario, stage = draw.choice(list(equal.SCENARIOS)), draw.choice(variant.stages)
    return Row(scenario, name, stage, draw.choice(("fp32", "bf16", "fp16")), *draw.choice(sizes))


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 501))
def test_a_variant_changes_no_bit_in_500_delayed_runs(number: int, tmp_path: Path) -> None:
    row = _drawn(number)
    check(row, VARIANTS[row.variant], tmp_path, seed=number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        *(("lossless weights", stage) for stage in (1, 2, 3)),
        *(("both lossless", stage) for stage in (1, 3)),
        *(("hpZ", 3), ("hpZ, lossless weights", 3), ("all in files", 3)),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_variant_changes_no_bit_on_processes(variant, stage, dtype, tmp_path):
    row = Row("trains", variant, stage, dtype, 4, 2)
    equal.check(row, VARIANTS[variant], tmp_path, is_simulated=False)


@pytest.mark.parametrize("name", SHARES)
def test_a_share_of_the_host_is_a_share(name: str) -> None:
    engine = zero_core.build(make_model(33), Case(2, zero=SHARES[name].zero).config())
    tier: Any = engine.sharded_state.tier
    assert 0 < tier.host_numel < tier.geometry.numel
    engine.close()


@pytest.mark.parametrize("name", EARLY)
def test_units_are_updated_before_the_decision_and_undone(name: str) -> None:
    variant, counts = EARLY[name], {}
    for clipping in (1e9, 1e-3):
        case = Case(3, clipping=clipping, zero=variant.zero, top=variant.base_top, width=33)
        engine = zero_core.build(make_model(33), case.config(), **variant.further)
        tier: Any = engine.sharded_state.tier
        train_unread(engine, 0, steps=2)
        parts = [part.tier for part in tier.report() if part.is_host]
        counts[clipping] = [
            sum(getattr(p, f"num_{of}") for p in parts) for of in ("kept", "undone")
        ]
    (kept, none), (nothing, undone) = counts.values()
    assert none == nothing == 0 < kept
    assert undone > 0
