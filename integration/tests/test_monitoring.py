"""Monitors that write DeepSpeed's files, and reported times, operations and bytes."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from zero_core.errors import ConfigError
from zero_core.testing import spawn
from zero_engine import deepspeed
from zero_engine.deepspeed.config.reader import read
from zero_engine.deepspeed.engine.engine import Watch
from zero_engine.monitoring import MemoryBreakdown, Scalars, StepFacts, WallClock

LR_BY_DEEPSPEED = "step,lr\r\n4,0.0\r\n8,0.00430676558073393\r\n12,0.006826061944859854\r\n"
"""``Train_Samples_lr.csv`` as DeepSpeed 0.19.8 writes it for the training below."""


def _config(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **more}


def _train(config: dict[str, Any], steps: int = 2, model: nn.Module | None = None) -> Any:
    model = nn.Linear(3, 4) if model is None else model
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
    return engine


def _csv(folder: Path) -> dict[str, list[list[str]]]:
    return {p.name: list(csv.reader(p.open(newline=""))) for p in folder.glob("csv/*.csv")}


def _board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "board")).Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_files_are_those_that_deepspeed_writes(tmp_path, capsys):
    place = {"enabled": True, "output_path": str(tmp_path)}
    config = {
        **_config(gradient_accumulation_steps=2, zero_optimization={"stage": 2}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "wall_clock_breakdown": True,
        "csv_monitor": {**place, "job_name": "csv"},
        "tensorboard": {**place, "job_name": "board"},
    }
    _train(config, steps=6)
    assert (tmp_path / "csv" / "Train_Samples_lr.csv").read_bytes().decode() == LR_BY_DEEPSPEED
    found = _csv(tmp_path)
    names = ["lr", *(f"elapsed_time_ms_{part}" for part in ("forward", "backward", "step"))]
    assert found.keys() == {f"Train_Samples_{name}.csv" for name in names}
    for name in names:
        head, *rows = found[f"Train_Samples_{name}.csv"]
        assert head == ["step", name]
        assert [row[0] for row in rows] == ["4", "8", "12"]
    board = _board(tmp_path)
    assert board.keys() == {f"Train/Samples/{name}" for name in names}
    lr = [(int(s), float(v)) for s, v in found["Train_Samples_lr.csv"][1:]]
    assert board["Train/Samples/lr"] == [(s, pytest.approx(v)) for s, v in lr]
    times = r"time \(ms\) \| fwd: [\d.]+ \| bwd: [\d.]+ \| step: [\d.]+"
    assert len(re.findall(times, capsys.readouterr().out)) == 3


def test_the_loss_scale_is_monitored_with_fp16_only(tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}}
    _train(_config(**monitor, fp16={"enabled": True, "loss_scale": 64.0, "auto_cast": True}))
    rows = _csv(tmp_path)["Train_Samples_loss_scale.csv"]
    assert rows == [["step", "loss_scale"], ["2", "64.0"], ["4", "64.0"]]
    _train(_config(csv_monitor={**monitor["csv_monitor"], "job_name": "other/csv"}))
    assert _csv(tmp_path / "other").keys() == {"Train_Samples_lr.csv"}


class _Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> _Told:
            self.calls.append((name, args or kwargs))
            return self

        return call


def test_wandb_and_comet_are_given_the_scalars(monkeypatch):
    wandb, comet = _Told(), _Told()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    blocks = {
        "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"},
        "comet": {"enabled": True, "samples_log_interval": 4, "experiment_name": "n"},
    }
    _train(_config(**blocks), steps=4)
    assert wandb.calls[0] == ("init", {"project": "p", "group": "g", "entity": "t"})
    logged = [args for name, args in wandb.calls if name == "log"]
    assert logged == [({"Train/Samples/lr": 0.1},)] * 4
    assert comet.calls[0][0] == "start"
    assert comet.calls[1] == ("set_name", ("n",))
    # Each step has two samples, and Comet gets values at intervals of four samples.
    steps = [kwargs["step"] for name, kwargs in comet.calls if name == "log_metric"]
    assert steps == [2, 6]


def test_a_monitor_without_its_package_says_what_to_install(monkeypatch):
    modules = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "torch.utils.tensorboard"}
    for block, module in modules.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=f'pip install "{module.rpartition(".")[2]}'):
            _train(_config(**{block: {"enabled": True}}))


class _Clock:
    """A clock for `zero_engine.monitoring` that only a model advances."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = _Clock()
    monkeypatch.setattr("zero_engine.monitoring.time", made)
    return made


class _Slow(nn.Linear):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(3, 4)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 0.03
        return super().forward(x)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.now += 0.03
        return grad, None


class _Outputs(_Slow):
    """A model with two outputs. The loss's backward is slow before any parameter has a gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)
        return {"loss": _SlowBackward.apply(y, self.clock).sum(), "logits": y}


def test_backward_that_the_script_calls_itself_is_measured_alike(clock, capsys):
    block = {"enabled": True, "profile_step": 0}
    config = _config(memory_breakdown=True, flops_profiler=block, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=_Outputs(clock), config=config)
    with pytest.raises(RuntimeError, match="does not require grad"):
        (engine(torch.ones(2, 3))["loss"].detach()).backward()
    for _ in range(2):
        found = engine(torch.ones(2, 3))
        (found["loss"] + found["logits"].square().sum()).backward()
        engine.step()
    # The time starts at the first gradient of an output, before any parameter's gradient.
    assert engine.watch.observers[1].last_ms["bwd"] == pytest.approx(60.0)
    out = capsys.readouterr().out
    # Each backward is reported once, for any number of outputs.
    assert out.count("memory after backward") == 2
    assert "backward: not counted: call engine.backward(loss)" in out
    for _ in range(2):
        engine.module(torch.ones(2, 3))["loss"].backward()
        engine.step()
    assert re.search(r"fwd: not measured \| bwd: not measured \| step: \d", capsys.readouterr().out)


def test_evaluation_counts_in_no_time_and_a_failed_forward_ends_its_own(clock):
    engine = _train(_config(wall_clock_breakdown=True), steps=1, model=_Slow(clock))
    engine.eval()
    for _ in range(10):
        engine(torch.ones(2, 3))
    engine.train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine(torch.ones(2, 7))
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
    # The time includes the failed forward.
    assert engine.watch.observers[0].last_ms["fwd"] == pytest.approx(60.0)


def test_a_script_may_make_the_monitors_itself(tmp_path):
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    given = {**_config(), "csv_monitor": block}
    config = deepspeed.monitor.config.get_monitor_config(param_dict=given)
    master = deepspeed.monitor.monitor.MonitorMaster(config)
    assert master.enabled
    master.write_events([("Eval/my loss", 0.5, 3), ("Eval/my loss", 0.25, 6)])
    rows = [["step", "my loss"], ["3", "0.5"], ["6", "0.25"]]
    assert _csv(tmp_path) == {"Eval_my_loss.csv": rows}


def test_operations_and_memory_are_reported_as_asked(tmp_path, capsys):
    path = tmp_path / "folder" / "flops.txt"
    block = {"enabled": True, "profile_step": 1, "output_file": str(path), "top_modules": 2}
    more = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    for steps in (2, 4):
        assert not path.exists()
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
        _train(_config(flops_profiler=block, **more), steps=steps, model=model)
    text = path.read_text()
    # A product of [2, k] and [k, n] is 2 * 2 * k * n operations. The run has two micro-steps.
    first, second = 2 * (4 * 3 * 5), 2 * (4 * 5 * 7)
    assert f"forward:  {first + second:,}\n" in text
    # Backward computes the gradient of each weight and of the second layer's input.
    assert f"backward: {first + 2 * second:,}\n" in text
    assert f"Sequential.0 {first:,}" in text
    assert f"most at depth 1: Sequential.1 {second:,} (70.0%), Sequential.0 {first:,}" in text
    assert "floating" not in capsys.readouterr().out
    block = {"enabled": True, "profile_step": 0, "module_depth": 0, "detailed": False}
    config = _config(flops_profiler=block, memory_breakdown=True)
    _train(config, model=nn.Sequential(nn.Linear(3, 4)), steps=1)
    out = capsys.readouterr().out
    assert "most at depth 0: Sequential" in out
    assert "depth 1" not in out
    assert "time (ms)" in out  # DeepSpeed's profiler reports times too
    told = [line.split() for line in out.splitlines() if line.startswith("memory after")]
    assert [words[2] for words in told] == ["forward", "backward", "step"]
    assert all(0.05 < float(words[-1]) < 64.0 for words in told)


def test_step_and_samples_per_second_are_told_every_so_many_steps(clock, capsys):
    engine = _train(_config(steps_per_print=2), steps=5, model=_Slow(clock))
    out = capsys.readouterr().out
    assert re.findall(r"step (\d+), skipped 0, lr \[0\.1\], loss scale 1,", out) == ["2", "4"]
    told = re.findall(r"step (\d+): ([\d.e+]+) samples/s", out)
    assert [step for step, _ in told] == ["2", "4"]
    assert [float(rate) for _, rate in told] == pytest.approx([2 / 0.03] * 2, rel=1e-3)
    timer = engine.tput_timer
    assert timer.avg_samples_per_sec() == pytest.approx(2 / 0.03)
    timer.update_epoch_count()  # called by scripts that print the rate themselves
    assert (timer.epoch_count, timer.global_step_count, timer.batch_size) == (1, 5, 2)
    off = _config(steps_per_print=2, timers={"throughput": {"enabled": False}})
    _train(off, steps=2)
    assert "samples/s" not in capsys.readouterr().out
    engine = _train(_config(), steps=1)
    assert engine.watch.observers == []
    assert not engine.monitor.enabled
    engine.monitor.write_events([("a", 1.0, 1)])


def _watch(rank: int, comm_report: Any = None, **more: Any) -> Watch:
    of_rank = {"rank": rank, "world_size": 2, "device": torch.device("cpu")}
    engine: Any = SimpleNamespace(**of_rank, module=nn.Linear(1, 1), comm_report=comm_report)
    return Watch(read(_config(**more)), engine, 1)


def _logs_communication(rank: int, world_size: int) -> None:
    block = {"enabled": True, "verbose": True, "debug": True}
    engine = _train(_config(comms_logger=block, zero_optimization={"stage": 2}), steps=0)
    expected: dict[str, list[int]] = {}
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
        for row in engine.core.comm_report():
            total = expected.setdefault(f"{row.collective} ({row.content})", [0, 0, 0])
            total[0] += row.num_calls
            total[1] += row.within_node_bytes
            total[2] += row.between_nodes_bytes
    found = deepspeed.comm.log_summary(return_dict=True)["summary"]
    assert all(type(row) is dict for row in found.values())
    assert {name: list(row.values()) for name, row in found.items()} == expected
    assert expected["reduce_scatter (gradients)"][1] > 0


def test_bytes_sent_add_up_to_the_engines_own_report():
    spawn(_logs_communication, 2)


def test_the_summary_of_communication_is_a_table_of_what_was_asked_for(capsys):
    with pytest.raises(ValueError, match="show_straggler"):
        deepspeed.comm.log_summary(show_straggler=True)
    numbers = {"content": "x", "num_calls": 2, "within_node_bytes": 30, "between_nodes_bytes": 4}
    names = ("all_gather", "reduce_scatter")
    traffic = tuple(SimpleNamespace(collective=name, **numbers) for name in names)
    block = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"]}
    watch = _watch(0, comm_report=lambda: traffic, comms_logger=block)
    for step in (1, 2):
        watch.step_done(StepFacts(step, 2 * step, [0.1], None))
    assert capsys.readouterr().out == "", "only verbose tells each step"
    deepspeed.comm.log_summary()
    out = capsys.readouterr().out
    assert "reduce_scatter" in out
    assert {"4", "60", "8"} <= {*out.split()}
    assert "all_gather" not in out
    assert "2 steps, rank 0" in out


def test_other_ranks_than_0_write_and_print_nothing(tmp_path, capsys):
    block = {"enabled": True, "output_path": str(tmp_path)}
    watch = _watch(1, csv_monitor=block, wall_clock_breakdown=True, memory_breakdown=True)
    kinds = [type(one) for one in watch.observers]
    assert kinds == [Scalars, WallClock, MemoryBreakdown]
    with watch.part("step"):
        pass
    watch.step_done(StepFacts(1, 2, [0.1], None))
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
