"""Parameters offloaded to host memory and to a file: the numbers do not change, nor does DDP's.

Entry points are looked up in ``integration/conformance``; here the factory is passed, so that the
shards are copied on a CPU too, where the configuration alone would use them where they lie. Grids
run on simulated ranks, the comparison with DDP on processes.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    Trace,
    batch,
    make_model,
    run_ddp,
    run_engine,
    simulate,
    spawn,
)
from zero_offload import create_param_tier
from zero_offload.errors import StorageCorruptError

STEPS = 4
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": {"device": "cpu", "ratio": 1.0}},
    {"offload_optimizer": {"device": "cpu", "ratio": 0.4}},
]


def _params(folder: str) -> list[dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": folder}
    return [
        {"device": "cpu"},
        {**nvme, "max_in_cpu": 0},
        {**nvme, "max_in_cpu": 700, "buffer_count": 2},
        {**nvme, "max_in_cpu": 0, "buffer_count": 1},
    ]


def _zero(optimizer: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {**optimizer, "offload_param": params, "stage3_param_persistence_threshold": 0}


def _assert_same(found: Trace, expected: Trace, what: object) -> None:
    assert found.losses == expected.losses, what
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value), (what, name)


def _run(ranks: SimulatedRanks, case: Case, **more: Any) -> Trace:
    return run_engine(case, ranks.rank, STEPS, process_group=ranks, **more)


def _grid(ranks: SimulatedRanks, folder: str, dtype: str, optimizers: list[dict[str, Any]]) -> None:
    keys: dict[str, Any] = {"dtype": dtype, "accumulation": 2, "clipping": 0.5}
    for optimizer in optimizers:
        expected = _run(ranks, Case(3, zero=optimizer, **keys))
        for params in _params(folder) if optimizer is OPTIMIZERS[0] else _params(folder)[1:3]:
            case = Case(3, zero=_zero(optimizer, params), **keys)
            found = _run(ranks, case, param_tier=create_param_tier)
            _assert_same(found, expected, (optimizer, params))


@pytest.mark.parametrize(
    ("world_size", "dtype", "optimizers"),
    [(1, "fp32", OPTIMIZERS), (3, "bf16", OPTIMIZERS), (3, "fp32", OPTIMIZERS[2:])],
)
def test_offloaded_parameters_change_no_bit(
    world_size: int, dtype: str, optimizers: list[dict[str, Any]], tmp_path: Path
) -> None:
    simulate(_grid, world_size, str(tmp_path), dtype, optimizers)


def _beside_ddp(rank: int, world_size: int, folder: str) -> None:
    warnings.filterwarnings("ignore", "the file system of .* has no direct I/O")
    for dtype, bound in (("fp32", 4e-6), ("bf16", 0.07)):
        keys: dict[str, Any] = {"dtype": dtype, "accumulation": 2, "clipping": 0.5}
        ddp = run_ddp(Case(**keys), rank, STEPS)
        for optimizer, params in zip(OPTIMIZERS, _params(folder), strict=False):
            case = Case(3, zero=_zero(optimizer, params), **keys)
            found = run_engine(case, rank, STEPS, param_tier=create_param_tier)
            gaps = [abs(a - b) for a, b in zip(found.losses, ddp.losses, strict=True)]
            assert max(gaps) <= bound


def test_losses_are_those_of_ddp(tmp_path: Path) -> None:
    spawn(_beside_ddp, 3, str(tmp_path))


def _with_file_states(ranks: SimulatedRanks, folder: str) -> None:
    state = {"device": "nvme", "nvme_path": folder, "ratio": 0.7}
    expected = _run(ranks, Case(3, "bf16", zero=OPTIMIZERS[1]))
    for params in _params(folder)[:3]:
        case = Case(3, "bf16", zero=_zero({"offload_optimizer": state}, params))
        _assert_same(_run(ranks, case, param_tier=create_param_tier), expected, params)


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_and_parameters_may_both_rest_in_files(world_size: int, tmp_path: Path) -> None:
    simulate(_with_file_states, world_size, str(tmp_path))


def _quantized(ranks: SimulatedRanks, folder: str) -> None:
    zero = {"zero_quantized_weights": True, **OPTIMIZERS[1]}
    expected = _run(ranks, Case(3, "bf16", zero=zero))
    for params in _params(folder)[:2]:
        case = Case(3, "bf16", zero=_zero(zero, params))
        _assert_same(_run(ranks, case, param_tier=create_param_tier), expected, params)


def test_shards_that_rest_are_gathered_in_eight_bits_as_others_are(tmp_path: Path) -> None:
    simulate(_quantized, 2, str(tmp_path))


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_compact_states_go_with_parameters_in_a_file(state_dtype: str, tmp_path: Path) -> None:
    states = {"offload_optimizer": {"device": "cpu", "state_dtype": state_dtype}}
    expected = run_engine(Case(3, "bf16", zero=states), 0, STEPS)
    for params in _params(str(tmp_path))[:2]:
        case = Case(3, "bf16", zero=_zero(states, params))
        found = run_engine(case, 0, STEPS, param_tier=create_param_tier)
        # A split master rounds ties another way than a whole one, which a file needs.
        assert found.losses == pytest.approx(expected.losses, rel=1e-2)
        if params["device"] == "cpu":
            _assert_same(found, expected, params)


def _engine(folder: Path, **keys: Any) -> tuple[zero_core.Engine, Any]:
    made: list[Any] = []

    def factory(**arguments: Any) -> Any:
        made.append(create_param_tier(**arguments))
        return made[0]

    zero = _zero(OPTIMIZERS[1], {**_params(str(folder))[1], **keys})
    config = Case(3, "bf16", zero=zero).config()
    return zero_core.build(make_model(), config, param_tier=factory), made[0]


def _train(engine: zero_core.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(**batch(step, 0, 0))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _no_direct_io_is_fine() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the file system of .* has no direct I/O")
        yield


def test_a_damaged_file_stops_the_forward_and_is_named(tmp_path: Path) -> None:
    engine, tier = _engine(tmp_path, buffer_count=2)  # no shard stays in one from step to step
    _train(engine, range(2))
    engine.full_state_dict()  # waits for the update, and reads all shards
    blocks = tier.file.blocks
    descriptor = os.open(f"/proc/self/fd/{blocks.fileno()}", os.O_WRONLY)
    tier.fetch(
        2, torch.empty(blocks.block_bytes[tier.file.block_of(2)] // 2, dtype=torch.bfloat16)
    ).wait()
    os.pwrite(descriptor, b"\x7f" * 64, blocks.offset(tier.file.block_of(2)))
    os.fsync(descriptor)
    os.close(descriptor)
    with pytest.raises(StorageCorruptError, match=str(tmp_path)):
        _train(engine, range(2, 3))


def test_a_run_on_a_file_resumes_from_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    engine, tier = _engine(tmp_path)
    _train(engine, range(3))
    engine.save_checkpoint(tmp_path / "kept")
    expected = _train(engine, range(3, 6))
    other, _ = _engine(tmp_path, max_in_cpu=900)
    other.load_checkpoint(tmp_path / "kept")
    assert _train(other, range(3, 6)) == expected
    plain = zero_core.build(make_model(), Case(2, "bf16", zero=OPTIMIZERS[1]).config())
    plain.load_checkpoint(tmp_path / "kept")
    assert _train(plain, range(3, 6)) == expected
    report = engine.memory_report()
    assert report["host parameters"] == 0
    assert report["file parameters"] > 0
    assert tier.file.blocks.bytes_read > 0


def test_a_shard_that_exceeds_a_buffer_is_refused_by_the_configurations_key(tmp_path: Path) -> None:
    with pytest.raises(zero_core.ConfigError, match=r"offload_param\.buffer_size = 100 elements"):
        _engine(tmp_path, buffer_size=100)
