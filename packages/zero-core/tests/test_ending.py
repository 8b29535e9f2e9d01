"""An engine ends: a rank closes it alone, or all give the model back; nothing looks like values
that isn't.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

import zero_core
from zero_core import ConfigError
from zero_core.comm.shared_memory import SharedMemory
from zero_core.core import access
from zero_core.testing import Case, batch, make_model, run_ddp, spawn


def _step(engine: zero_core.Engine, rank: int) -> None:
    engine.backward(engine(**batch(0, 0, rank))["loss"])
    engine.step()


def _closed(rank: int, world_size: int) -> None:
    expected = run_ddp(Case(), rank, 1).values
    for stage in (1, 2):
        engine = zero_core.build(make_model(), Case(stage).config())
        _step(engine, rank)
        engine.close()  # its values are whole on every rank
        found = engine.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine = zero_core.build(make_model(), Case(2).config())
    _step(engine, rank)
    if rank == 0:
        engine.close()  # the others have gone


def _closed_twice(rank: int, world_size: int, path: str) -> None:
    model = make_model()
    config = Case(3, zero={"stage3_param_persistence_threshold": 0}).config()
    num_hooks = []
    for _ in range(2):
        engine = zero_core.build(model, config, pretrained=path)
        expected = make_model().state_dict()
        torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)
        assert any(access.is_refused(p) for p in model.parameters())
        with pytest.raises(RuntimeError, match=r"engine\.full_state_dict\(\)"):
            model.state_dict()
        engine.close()
        with pytest.raises(RuntimeError, match="holds no value"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="was read after its engine was closed"):
            model.gain.item()
        with pytest.raises(ConfigError, match="holds no value"):
            zero_core.build(model, config)
        num_hooks.append(len(model._state_dict_pre_hooks))
    assert num_hooks[0] == num_hooks[1]


def test_a_rank_that_closes_waits_for_no_other_and_leaves_no_mixture_of_values():
    spawn(_closed, 2)


def test_the_next_engine_of_a_closed_model_takes_its_values_from_a_file(tmp_path: Path):
    path = str(tmp_path / "model.safetensors")
    save_model(make_model(), path)
    spawn(_closed_twice, 2, path)


def _given_back(rank: int, world_size: int) -> None:
    for stage in (1, 2):
        engine = zero_core.build(make_model(), Case(stage).config())
        _step(engine, rank)
        expected = engine.full_state_dict()
        model = engine.unwrap()
        engine.close()  # a second time
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)
        again = zero_core.build(model, Case(stage).config())
        torch.testing.assert_close(again.full_state_dict(), expected, rtol=0.0, atol=0.0)
        gathered: tuple[dict[str, Any], ...] = ({}, {"params": [again.module.gain]})
        for options in gathered:
            with (
                pytest.raises(RuntimeError, match=r"unwrap\(\) within gathered"),
                again.gathered(**options),
            ):
                again.unwrap()
        again.backward(again(**batch(0, 0, rank))["loss"])
        with pytest.raises(RuntimeError, match="step first, or drop it by drops_partial=True"):
            again.unwrap()
        again.unwrap(drops_partial=True)
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)
        with torch.no_grad():
            model.gain.fill_(5.0)  # as a plain loop after the engine does
        with pytest.raises(RuntimeError, match="engine that has ended"):
            again.unwrap(drops_partial=True)
        assert (model.gain == 5.0).all()


def test_a_trained_model_is_given_back_between_two_steps_alone():
    spawn(_given_back, 2)


def _dropped(rank: int, world_size: int) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        windows = sum(isinstance(found, SharedMemory) for found in gc.get_objects())
        # That of heartbeats ends with the next beat.
        threads = [t for t in threading.enumerate() if t.name != "zero_core watch"]
        return len(os.listdir("/proc/self/fd")), len(threads), windows

    def use(stage: int) -> None:
        engine = zero_core.build(make_model(), Case(stage).config())
        _step(engine, rank)

    use(0)
    before = held()
    for stage in range(4):
        use(stage)
    assert before[-1] == 0
    deadline = time.monotonic() + 60.0
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, f"{held()} held, {before} before"
        time.sleep(0.05)  # the thread of heartbeats is at work


def test_engines_that_are_dropped_without_close_are_freed():
    spawn(_dropped, 2)


class _Far(Tensor):
    """Stands for a buffer on an accelerator."""

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full((3,), 2.0)


def test_optimizer_and_buffers_serve_a_plain_loop_after_the_engine():
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    x = torch.ones(2, 3)
    expected, oracle = make()
    for _ in range(2):
        expected(x).square().mean().backward()
        oracle.step()
        oracle.zero_grad()
    model, optimizer = make()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine = zero_core.build(model, config, optimizer=optimizer)
    engine.backward(engine(x).square().mean())
    engine.step()
    with pytest.raises(RuntimeError, match=r"call engine\.step"):
        optimizer.step()
    model.register_buffer("scale", torch.ones(3).as_subclass(_Far))
    engine.unwrap()
    assert torch.equal(model.scale, torch.full((3,), 2.0))
    model(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))
