"""Units updated in backward although the step may be clipped or skipped: an undo log.

That no bit differs from the late update, whatever is done between backward and step, is shown by
rows of test_equalities.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_core
from tests.support.host_optimizers import OPTIMIZERS
from zero_core.testing import Case, batch, make_model

ADAMW = {"optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]}}
BY_DEFAULT = {"update_in_backward": None, "undo_buffer_size": 1 << 20}


def config_of(
    stage: int = 3, dtype: str = "fp32", clipping: float = 1.0, top: Any = None, **offload: Any
) -> dict[str, Any]:
    """Return a configuration with updates in backward, unless ``offload`` has others."""
    block = {"device": "cpu", "update_in_backward": True, **offload}
    zero = {"offload_optimizer": block}
    return Case(stage, dtype, clipping=clipping, zero=zero, top={**ADAMW, **(top or {})}).config()


def build(config: dict[str, Any]) -> zero_core.Engine:
    return zero_core.build(make_model(), config)


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


def num_kept(**offload: Any) -> int:
    """Return how many elements of three steps the log has had, which nothing has undone."""
    engine = build(config_of(2, clipping=1e9, **offload))
    for step in range(3):
        backward(engine, step)
        engine.step()
    assert count(engine, "undone") == 0
    found = count(engine, "kept")
    engine.close()
    return found


def test_units_beyond_the_size_of_the_log_and_the_devices_are_updated_late() -> None:
    nothing, some, more, all_ = (
        num_kept(undo_buffer_size=size) for size in (1, 8_000, 18_000, None)
    )
    assert 0 == nothing < some < more < all_
    assert 0 == num_kept(ratio=0.0) < num_kept(ratio=0.3) < all_


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
    engine = build(config_of(clipping=1e-3, **BY_DEFAULT))
    assert "updated in backward, with" in caplog.text
    backward(engine, 0)
    engine.step()
    engine.sharded_state.tier.wait_params(0, 1)
    assert count(engine, "undone")
    engine.close()


def test_without_a_size_of_the_log_the_default_waits_for_the_decision() -> None:
    engine = build(config_of(update_in_backward=None))
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
