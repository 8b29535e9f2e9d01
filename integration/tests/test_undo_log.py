"""Units updated in backward although the step may be clipped or skipped: an undo log.

That no bit differs from the late update is shown by rows of test_equalities.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from tests.support.host_optimizers import OPTIMIZERS
from zero_core.testing import Case, SimulatedRanks, batch, make_model, make_tower, rows, simulate

ADAMW = {"optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]}}
SIZE = {"device": "cpu", "undo_buffer_size": 1 << 20}


def config_of(
    stage: int = 3, dtype: str = "fp32", clipping: float = 1.0, top: Any = None, **offload: Any
) -> dict[str, Any]:
    """Return a configuration with updates in backward, unless ``offload`` has others."""
    block = {"device": "cpu", "update_in_backward": True, **offload}
    zero = {"offload_optimizer": block}
    return Case(stage, dtype, clipping=clipping, zero=zero, top={**ADAMW, **(top or {})}).config()


def build(
    config: dict[str, Any] | None = None, ranks: SimulatedRanks | None = None
) -> zero_core.Engine:
    return zero_core.build(make_model(), config or config_of(), process_group=ranks)


def backward(engine: zero_core.Engine, step: int, factor: float = 1.0) -> None:
    """Run a forward and a backward, and wait until the host has begun what it can."""
    engine.backward(factor * engine(**batch(step, 0, engine.rank))["loss"])
    tier: Any = engine.sharded_state.tier
    for part in tier.parts:
        part.drain()


def count(engine: zero_core.Engine, what: str) -> int:
    """Return how many elements the log has "kept" or "undone"."""
    tier: Any = engine.sharded_state.tier
    return sum(getattr(part.tier, f"num_{what}") for part in tier.report() if part.is_host)


def bits_of(engine: zero_core.Engine) -> dict[str, Tensor]:
    """Return the bits of all that this rank has: states, the shards' values, and scalars."""
    tier: Any = engine.sharded_state.tier
    found = {name: tier.read_state(name, 0, tier.geometry.numel) for name in tier.state_names()}
    for flat in engine.sharded_state.params:
        found[f"shard {flat.segment.index}"] = flat.read_shard().clone()
    for i in range(len(tier.geometry.pieces)):
        scalars = tier.read_scalars(i)
        found[f"scalars {i}"] = torch.tensor([scalars[k] for k in sorted(scalars)])
    return {name: value.contiguous().view(torch.uint8) for name, value in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _kept(ranks: SimulatedRanks, offload: dict[str, Any]) -> int:
    engine = build(config_of(2, clipping=1e9, **offload), ranks)
    for step in range(3):
        backward(engine, step)
        engine.step()
    found = count(engine, "kept")
    assert count(engine, "undone") == 0
    engine.close()
    return found


def test_units_beyond_the_size_of_the_log_and_the_devices_are_updated_late() -> None:
    nothing, some, more, all_ = (
        simulate(_kept, 2, {"undo_buffer_size": size})[0] for size in (1, 4_000, 9_000, None)
    )
    assert 0 == nothing < some < more < all_
    none, third = (simulate(_kept, 2, {"ratio": ratio})[0] for ratio in (0.0, 0.3))
    assert 0 == none < third < all_


def _take_nan(ranks: SimulatedRanks, dtype: str) -> None:
    found = []
    for is_early in (False, True):
        top = {"check_grad_overflow": False}
        engine = build(config_of(3, dtype, 1e9, top, update_in_backward=is_early), ranks)
        for step in range(5):
            backward(engine, step, torch.nan if (step, ranks.rank) == (2, 0) else 1.0)
            engine.step()
        assert engine.skipped_steps == 0
        found.append(bits_of(engine))
        engine.close()
    assert_same(*found)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nan_has_the_same_bits_where_no_step_is_skipped(dtype: str) -> None:
    simulate(_take_nan, 2, dtype)


def _between(ranks: SimulatedRanks, folder: str) -> None:
    found = []
    for is_early in (False, True):
        own = f"{folder}/{is_early}"
        engine = build(config_of(2, "bf16", 1e9, update_in_backward=is_early), ranks)
        for step in range(6):
            backward(engine, step)
            tier: Any = engine.sharded_state.tier
            assert (tier.parts[0].tier._speculation is not None) == is_early
            if step == 1:
                assert engine.states.get_full("blocks.0.up.weight", "exp_avg") is not None
            elif step == 2:
                engine.clip_grad_norm_(0.5)
            elif step == 3:
                engine.optimizer.param_groups[0]["lr"] = 0.03
            elif step == 4:
                engine.save_checkpoint(own, "step-4")
            engine.step()
        engine.save_checkpoint(own, "end")
        found.append([bits_of(engine)])
        for tag in ("step-4", "end"):
            engine.load_checkpoint(own, tag)
            found[-1].append(bits_of(engine))
        engine.close()
    for late, early in zip(*found, strict=True):
        assert_same(early, late)


def test_whatever_is_done_between_backward_and_step_sees_no_update(tmp_path: Path) -> None:
    """Saves, reads of states, clipping by hand and changed settings."""
    simulate(_between, 2, str(tmp_path))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_error_in_backward_leaves_the_state_as_it_was(dtype: str) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("broken on purpose")

    engine = zero_core.build(make_tower(), config_of(dtype=dtype))
    x = rows(0, 0).to(engine.config.compute_dtype or torch.float32)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    before = bits_of(engine)
    engine.module.blocks[1].register_forward_hook(
        lambda module, args, out: out.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        engine.backward(engine(x))
    after = bits_of(engine)
    assert count(engine, "undone"), "units were updated"
    assert_same(after, before)
    engine.close()


def test_param_grad_may_be_read_and_changed() -> None:
    found = []
    for is_early in (False, True):
        engine = build(config_of(0, update_in_backward=is_early))
        for step in range(4):
            backward(engine, step)
            param = engine.module.get_parameter("blocks.1.up.weight")
            assert param.grad is not None
            if step == 2:
                param.grad.mul_(0.25)
            engine.step()
        found.append(bits_of(engine))
        engine.close()
    assert_same(*found)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parameters_keep_their_values_until_the_step(dtype: str) -> None:
    engine = build(config_of(1, dtype))
    shards = [flat.read_shard().clone() for flat in engine.sharded_state.params]
    backward(engine, 0)
    tier: Any = engine.sharded_state.tier
    assert tier.undo_bytes == engine.memory_report()["undo log"]
    for flat, shard in zip(engine.sharded_state.params, shards, strict=True):
        assert torch.equal(flat.read_shard(), shard)
    engine.step()
    engine.close()


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero_core.ConfigError, match="states in a file cannot be undone"):
        build(config_of(device="nvme", nvme_path=str(tmp_path)))
    with pytest.raises(zero_core.ConfigError, match="update_in_backward needs updates that can"):
        build(config_of(top={"optimizer": {"type": "NAdam", "params": {}}}))
    config = config_of(top={"optimizer": {"type": "Adamax", "params": {"lr": 1e-2}}})
    with pytest.raises(zero_core.ConfigError, match="updates of Adamax with these settings"):
        zero_core.plan(make_model(), config, 1, device_type="cpu")


def test_with_a_size_of_the_log_steps_begin_in_backward(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="zero_core.step.update")
    config = config_of(clipping=1e-3)
    config["zero_optimization"]["offload_optimizer"] = SIZE
    engine = build(config)
    assert "updated in backward, with" in caplog.text
    backward(engine, 0)
    engine.step()
    engine.sharded_state.tier.wait_params(0, 1)
    assert count(engine, "undone")
    engine.close()


def test_without_a_size_of_the_log_the_default_waits_for_the_decision() -> None:
    config = config_of()
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = build(config)
    assert "undo log" not in engine.memory_report()
    engine.close()


@pytest.mark.parametrize("size", [None, 5_000])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_has_the_bytes_of_the_log(dtype: str, state_dtype: str, size: int | None) -> None:
    config = config_of(dtype=dtype, undo_buffer_size=size, state_dtype=state_dtype)
    engine = build(config)
    # On a CPU a plan has the host's bytes among its own.
    memory = zero_core.plan(make_model(), config, 1, device_type="cpu").memory
    planned = {**memory.device, **memory.host}["undo log"]
    assert planned == engine.memory_report()["undo log"]
    engine.close()
