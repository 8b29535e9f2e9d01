"""Engines that end by close(), by unwrap(), or because they are dropped."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_model
from support import fake_cuda
from torch import Tensor, nn

import zero_core
from zero_core import ConfigError
from zero_core.comm import p2p
from zero_core.comm.shared_memory import SharedMemory
from zero_core.core import access
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    make_model,
    on_ranks,
    run_ddp,
    run_on_processes,
    simulate,
    spawn,
)
from zero_core.testing.training import assert_same, train_steps


def _closed(ranks: SimulatedRanks) -> None:
    expected = run_ddp(Case(), ranks.rank, 1, ranks).values
    for stage in (1, 2):
        engine = zero_core.build(make_model(), Case(stage).config(), process_group=ranks)
        train_steps(engine, 0, 1)
        engine.close()
        found = engine.module.state_dict()
        assert_same({name: found[name] for name in expected}, expected)
    engine = zero_core.build(make_model(), Case(2).config(), process_group=ranks)
    train_steps(engine, 0, 1)
    if ranks.rank == 0:
        engine.close()  # needs no other rank: rank 1 does not call it


@pytest.mark.parametrize("run", [simulate, run_on_processes])
def test_a_rank_that_closes_waits_for_no_other_and_leaves_no_mixture_of_values(run: Any):
    run(_closed, 2)


def _close_early(rank: int, world_size: int, folder: Path) -> None:
    torch.accelerator.set_device_index(rank)
    fake_cuda.set_delays(seed=rank, kernel_s=2e-3, copy_s=2e-2 * rank)
    engine = Case(3, top={"name_waits_within_s": 0}).build().eval()
    with torch.no_grad():
        loss = float(engine(**batch(0, 0, 0))["loss"])
    if rank:
        time.sleep(1.5)  # as if it evaluated for longer than rank 0
        (folder / f"{rank} {loss}").touch()
    engine.close()
    # close() waits for slower ranks: an abort would drop what NCCL still sends in the background.
    assert sorted(os.listdir(folder)) == [f"{r} {loss}" for r in range(1, world_size)]


@pytest.mark.cuda
def test_a_rank_that_closes_on_a_device_lets_the_others_finish_their_evaluation(tmp_path: Path):
    spawn(_close_early, 3, tmp_path, backend="nccl")


@on_ranks(2)
def test_the_next_engine_of_a_closed_model_takes_its_values_from_a_file(ranks, tmp_path):
    model, path = make_model(), tmp_path / f"{ranks.rank}.safetensors"
    save_model(model, str(path))
    config = Case(3, zero={"stage3_param_persistence_threshold": 0}).config()
    num_hooks = []
    for _ in range(2):
        engine = zero_core.build(model, config, pretrained=path, process_group=ranks)
        assert_same(engine.full_state_dict(), dict(make_model().state_dict()))
        assert any(access.is_refused(p) for p in model.parameters())
        with pytest.raises(RuntimeError, match=r"engine\.full_state_dict\(\)"):
            model.state_dict()
        engine.close()
        with pytest.raises(RuntimeError, match="was read after its engine was closed"):
            model.gain.item()
        num_hooks.append(len(model._state_dict_pre_hooks))
    assert num_hooks[0] == num_hooks[1]


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_a_trained_model_is_given_back_between_two_steps_alone(ranks, stage):
    config = Case(stage).config()
    engine = zero_core.build(make_model(), config, process_group=ranks)
    train_steps(engine, 0, 1)
    expected = engine.full_state_dict()
    model = engine.unwrap()
    engine.close()
    assert_same(dict(model.state_dict()), expected)
    again = zero_core.build(model, config, process_group=ranks)
    assert_same(again.full_state_dict(), expected)
    for options in ({}, {"params": [again.module.gain]}):
        refused = pytest.raises(RuntimeError, match=r"unwrap\(\) within gathered")
        with refused, again.gathered(**options):
            again.unwrap()
    again.backward(again(**batch(0, 0, ranks.rank))["loss"])
    with pytest.raises(RuntimeError, match="step first, or drop it by drops_partial=True"):
        again.unwrap()
    again.unwrap(drops_partial=True)
    assert_same(dict(model.state_dict()), expected)
    with torch.no_grad():
        model.gain.fill_(5.0)
    with pytest.raises(RuntimeError, match="engine that has ended"):
        again.unwrap(drops_partial=True)
    assert (model.gain == 5.0).all()


def _dropped(rank: int, world_size: int) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        windows = sum(isinstance(found, SharedMemory) for found in gc.get_objects())
        # The heartbeat thread ends only at its next heartbeat.
        threads = [t for t in threading.enumerate() if t.name != "zero_core watch"]
        assert not any(p2p._under_way.values())
        return len(os.listdir("/proc/self/fd")), len(threads), windows

    def use(stage: int) -> None:
        engine = zero_core.build(make_model(), Case(stage).config())
        train_steps(engine, 0, 1)

    use(0)
    before = held()
    for stage in range(4):
        use(stage)
    assert before[-1] == 0
    deadline = time.monotonic() + 60.0
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, f"{held()} held, {before} before"
        time.sleep(0.05)


def test_engines_that_are_dropped_without_close_are_freed():
    spawn(_dropped, 2)


class _Far(Tensor):
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
    engine = Case(3).build(model=model, optimizer=optimizer)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("end", ["dropped", "closed", "unwrapped"])
@on_ranks()
def test_a_model_can_be_built_again_after_its_engine(ranks, stage, end):
    model = make_model()
    plain = [dict(vars(module)).keys() for module in model.modules()]
    engine = zero_core.build(model, Case(stage).config(), process_group=ranks)
    train_steps(engine, 0, 1)
    engine.publish()
    expected = engine.full_state_dict()
    tier = weakref.ref(engine.sharded_state.tier)
    if end == "closed":
        engine.close()
    elif end == "unwrapped":
        engine.unwrap()
    del engine
    assert tier() is None, "only the cycle collector frees the memory that another build needs"
    if end != "unwrapped" and stage == 3 and ranks.size > 1:
        with pytest.raises(RuntimeError, match="went with an engine that was closed or dropped"):
            model.state_dict()
        with pytest.raises(ConfigError, match=r"closed or dropped\. Have the values read from a f"):
            zero_core.build(model, Case(stage).config(), process_group=ranks)
        # The error message recommends load_state_dict(), which needs memory to copy into.
        for param in model.parameters():
            param.data = torch.empty(param.shape)
        model.load_state_dict(expected)
    assert_same(dict(model.state_dict()), expected)
    for module, keys in zip(model.modules(), plain, strict=True):
        assert vars(module).keys() == keys
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(type(param) is nn.Parameter for param in model.parameters())
    other = make_model()
    other.load_state_dict(expected)
    trained = []
    for each in (model, other):
        engine = zero_core.build(each, Case(stage).config(), process_group=ranks)
        train_steps(engine, 0, 1)
        trained.append(engine.full_state_dict())
        engine.close()
    assert_same(*trained)


READERS = {
    *("autocast", "close", "comm_report", "get_global_grad_norm", "leave_shards", "memory_report"),
    *("is_gradient_accumulation_boundary", "name_cures", "owns", "remove_at_end", "report"),
    "stay_with_model",
}
"""Members that an ended engine still serves."""
SAVES = ("async_save", "save_checkpoint", "load_checkpoint", "export_safetensors", "resume")
PREFETCHES = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")


def test_an_engine_describes_itself_and_names_what_serves_instead_of_a_modules_method():
    engine = zero_core.build(nn.Linear(3, 2).bfloat16(), Case(1).config())
    assert repr(engine) == "Engine(stage 1, 1 rank on cpu, bfloat16, 8 parameters, step 0)"
    with pytest.raises(AttributeError, match=r"use engine\.module\.parameters"):
        engine.parameters()
    engine.close()
    assert repr(engine).startswith("Engine(ended by close(), ")
    assert {*dir(zero_core)} - {*zero_core.__all__} <= {*zero_core._HOMES[""].split()}


@pytest.mark.parametrize("end", ["close", "unwrap"])
def test_every_verb_of_an_ended_engine_says_that_it_has_ended(end):
    engine = zero_core.build(make_model(), Case(3).config())
    params = list(engine.module.parameters())
    train_steps(engine, 0, 1)
    getattr(engine, end)()
    verbs = {name for name, _ in inspect.getmembers(zero_core.Engine, inspect.isfunction)}
    arguments = {
        "__call__": {},
        "allow_empty_entries": {"advice": ""},
        "backward": {"loss": torch.ones((), requires_grad=True)},
        "clip_grad_norm_": {"max_norm": 1.0},
        "holds_value": {"param": params[0]},
        "own_part": {"param": params[0]},
        "scale": {"loss": torch.ones(())},
        "set_gradient_accumulation_boundary": {"is_boundary": True},
        "set_is_last_backward": {"is_last_backward": True},
        "set_requires_gradient_sync": {"requires_gradient_sync": False},
        "set_reshard_after_forward": {"reshard_after_forward": False},
        "train_batch": {"batches": []},
        "record": {"folder": "never"},
        "get_full": {"name": "gain"},
        **{verb: {"directory": "never"} for verb in SAVES},
        **{verb: {"module": engine.module, "modules": []} for verb in PREFETCHES},
    }

    def use(owner: Any, verb: str) -> None:
        with getattr(owner, verb)(**arguments.get(verb, {})):  # contexts may raise on entry only
            pass

    named = {verb for verb in verbs if not verb.startswith("_")} - READERS
    for owner, verb in ((engine.states, "get_full"), *((engine, v) for v in {"__call__", *named})):
        with pytest.raises(RuntimeError, match=rf"of an engine that has ended, by {end}\(\)"):
            use(owner, verb)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_ends_while_its_parameters_are_offloaded_leaves_no_values(caplog, stage):
    model = make_model()
    engine = zero_core.build(model, Case(stage).config())
    engine.offload_states()
    engine.close()
    assert "values cannot be read" in caplog.text
    assert "call reload_states() before close()" in caplog.text
    with pytest.raises(ConfigError, match="holds no value"):
        zero_core.build(model, Case(stage).config())


def test_an_engine_that_is_dropped_after_a_failed_step_logs_it_and_leaves_the_model_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    engine = zero_core.build(model, Case().config())
    kind = type(engine.sharded_state.tier)
    with mock.patch.object(kind, "wait_params", side_effect=OSError("the disk is gone")):
        del engine
    assert "the disk is gone" in caplog.text
    zero_core.build(model, Case().config())
