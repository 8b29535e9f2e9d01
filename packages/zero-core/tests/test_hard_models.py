"""Models and runs that leave the usual path: the numbers stay right, or an error says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_core import CheckpointError
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    make_model,
    run_on_processes,
    seeded,
    simulate,
    spawn,
)

STAGES = (0, 1, 2, 3)
OPT: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class _Block(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6) if shared is None else shared
        self.mlp = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.recompute = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.recompute:
            return x + checkpoint(self.mlp, y, use_reentrant=self.recompute == "reentrant")
        return x + self.mlp(y)


class _Net(nn.Module):
    def __init__(self, *, is_shared: bool = False, recompute: str = "") -> None:
        super().__init__()
        with seeded(3):
            shared = nn.LayerNorm(6) if is_shared else None
            self.first = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(_Block(shared if i == 0 else None) for i in range(4))
            self.last = shared if shared is not None else nn.LayerNorm(6)
            for block in self.blocks:
                block.recompute = recompute
            self.mode = "plain"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.mode == "parts":  # blocks taken apart, in an order of its own
            for block in (*self.blocks[2:], *self.blocks[:2]):
                x = x + block.mlp(block.norm(x))
        elif self.mode == "pairs":
            x = checkpoint(self._pair, x, 2, 0, use_reentrant=True)
            x = checkpoint(self.blocks[2], x, use_reentrant=True)
        else:
            for block in self.blocks:
                x = block(x)
        return self.last(x).square().mean() + x.mean()

    def _pair(self, x: Tensor, i: int, j: int) -> Tensor:
        return self.blocks[j](self.blocks[i](x))


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(model: nn.Module, stage: int, ranks: SimulatedRanks, run=None) -> dict[str, Tensor]:
    engine = zero_core.build(model, Case(stage=stage).config() | OPT, process_group=ranks)
    for step in range(3):
        x = _x(step, ranks.rank).requires_grad_()
        engine.backward(engine(x) if run is None else run(engine, x))
        engine.step()
    assert engine.skipped_steps == 0
    return engine.full_state_dict()


def _same_at_all_stages(ranks: SimulatedRanks, how: str) -> None:
    def make() -> nn.Module:
        if how in ("reentrant", "plain"):
            return _Net(recompute=how)
        net = _Net(is_shared=how == "shared")
        net.mode = how if how in ("parts", "pairs") else "plain"
        return net

    run = _outside if how == "outside" else None
    results = [_train(make(), stage, ranks, run) for stage in STAGES]
    for result in results[1:]:
        assert all(torch.equal(result[k], results[0][k]) for k in result)


def _outside(engine: zero_core.Engine, x: Tensor) -> Tensor:
    """Blocks called one by one, without the model's own forward."""
    for block in engine.module.blocks:
        x = block(x)
    return x.square().mean()


@pytest.mark.parametrize("how", ["reentrant", "plain", "shared", "parts", "pairs", "outside"])
def test_blocks_used_in_unusual_ways_give_the_same_numbers_at_every_stage(how):
    simulate(_same_at_all_stages, 2, how)


def _part_alone(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Net(), Case(stage=3).config() | OPT, process_group=ranks)
    with pytest.raises(RuntimeError, match=r"a part of unit 0 \(root\) was called by itself"):
        engine.module.first(_x(0, ranks.rank))
    with torch.no_grad():
        expected = _Net().first(_x(0, 0))
        assert torch.equal(engine.module.first(_x(0, 0)), expected)


def test_a_part_called_by_itself_works_without_gradients_and_is_refused_with():
    simulate(_part_alone, 2)


def _state_dict(ranks: SimulatedRanks, stage: int) -> None:
    engine = zero_core.build(_Net(), Case(stage=stage).config() | OPT, process_group=ranks)
    engine.backward(engine(_x(0, ranks.rank)))
    engine.step()
    if stage < 3:
        found = engine.module.state_dict()
    else:
        with pytest.raises(RuntimeError, match=r"use engine.full_state_dict\(\)"):
            engine.module.state_dict()
        with engine.gathered() as module:
            found = {k: v.clone() for k, v in module.state_dict().items()}
    full = engine.full_state_dict()
    assert all(torch.equal(found[k], full[k]) for k in full)


@pytest.mark.parametrize("stage", range(4))
def test_a_state_dict_has_the_values_after_the_step_or_is_refused_at_stage_3(stage):
    simulate(_state_dict, 2, stage)


def _inference(ranks: SimulatedRanks) -> None:
    results = []
    for stage in STAGES:
        engine = zero_core.build(_Net(), Case(stage=stage).config() | OPT, process_group=ranks)
        with torch.inference_mode():
            engine(_x(9, ranks.rank))
        engine.backward(engine(_x(0, ranks.rank)))
        engine.step()
        results.append(engine.full_state_dict())
    for result in results[1:]:
        assert all(torch.equal(result[k], results[0][k]) for k in result)


def test_inference_mode_before_the_first_step_does_no_harm():
    simulate(_inference, 2)


def _late(ranks: SimulatedRanks, stage: int) -> None:
    """A backward after the reduced one, within no_sync, on one rank only."""
    engine = zero_core.build(_Net(), Case(stage=stage).config() | OPT, process_group=ranks)
    engine.backward(engine(_x(0, ranks.rank)))
    with engine.no_sync():
        loss = engine(_x(1, ranks.rank))
        if ranks.rank == 0 or stage == 3:
            engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 0


@pytest.mark.parametrize("stage", range(4))
def test_unreduced_gradients_of_one_rank_are_reduced_by_all(stage):
    simulate(_late, 2, stage)


def _idle(ranks: SimulatedRanks, stage: int) -> None:
    config = Case(stage=stage, accumulation=2).config() | OPT
    engine = zero_core.build(_Net(), config, process_group=ranks)
    for step in range(2):
        for micro in range(2):
            loss = engine(_x(step, ranks.rank))
            is_idle = micro == 1 and (ranks.rank == 1 or step == 1)
            engine.backward(torch.zeros((), requires_grad=True) if is_idle else loss)
            engine.step()
    assert engine.global_steps == 2
    assert engine.skipped_steps == 0


@pytest.mark.parametrize("stage", range(3))
def test_a_last_micro_step_that_uses_no_parameter_still_steps(stage):
    simulate(_idle, 2, stage)


def _skips_a_block(rank: int, world_size: int, store: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10),
    )
    engine = zero_core.build(_Net(), Case(stage=3).config() | OPT)
    blocks = engine.module.blocks
    used = blocks if rank == 0 else [blocks[0], blocks[3]]

    def run(x: Tensor) -> Tensor:
        for block in used:
            x = block(x)
        return x.square().mean()

    def step() -> None:
        engine.backward(run(_x(0, rank)))
        engine.step()

    with pytest.raises(zero_core.CollectiveError, match="all_gather of unit"):
        step()
    os._exit(0)  # with collectives under way that nobody will answer


def _drops_one(ranks: SimulatedRanks) -> None:
    results = []
    for stage in STAGES:
        engine = zero_core.build(_Net(), Case(stage=stage).config() | OPT, process_group=ranks)
        blocks = [b for i, b in enumerate(engine.module.blocks) if i != 1 + ranks.rank]
        for step in range(3):
            x = _x(step, ranks.rank)
            for block in blocks:
                x = block(x)
            engine.backward(x.square().mean())
            engine.step()
        results.append(engine.full_state_dict())
    for result in results[1:]:
        assert all(torch.equal(result[k], results[0][k]) for k in result)


def test_ranks_may_each_drop_one_block_in_between():
    simulate(_drops_one, 2)


def test_ranks_that_skip_several_blocks_get_an_error_not_wrong_weights(tmp_path):
    spawn(_skips_a_block, 2, str(tmp_path / "store"))


def _load_then_idle(ranks: SimulatedRanks, folder: str) -> None:
    engine = zero_core.build(_Net(), Case(stage=1).config() | OPT, process_group=ranks)
    engine.save_checkpoint(folder)
    engine.backward(engine(_x(0, ranks.rank)))
    engine.load_checkpoint(folder)
    loss = engine(_x(0, ranks.rank))
    engine.backward(loss if ranks.rank == 0 else torch.zeros((), requires_grad=True))
    engine.step()
    assert engine.global_steps == 1


def test_gradients_from_before_a_load_are_forgotten(tmp_path):
    simulate(_load_then_idle, 2, str(tmp_path))


def _one_rank_fails(ranks: SimulatedRanks, folder: str) -> None:
    engine = zero_core.build(_Net(), Case(stage=3).config() | OPT, process_group=ranks)
    engine.save_checkpoint(Path(folder) / "c")
    with pytest.raises(CheckpointError, match=r"find failed on rank 1: .* holds no checkpoint"):
        engine.load_checkpoint(Path(folder) / ("c" if ranks.rank == 0 else "elsewhere"))
    with pytest.raises(CheckpointError, match=r"prepare failed on rank 1: .* keeps JSON"):
        engine.save_checkpoint(folder, client_state={"x": object() if ranks.rank else 1})
    (Path(folder) / "file").touch()
    with pytest.raises(CheckpointError, match="export failed on rank 0"):
        engine.export_safetensors(Path(folder) / "file")


def test_a_failure_on_one_rank_reaches_all(tmp_path):
    simulate(_one_rank_fails, 2, str(tmp_path))


def test_an_exception_in_the_middle_of_an_accumulation_restarts_the_step(caplog):
    config = {**Case(accumulation=2).config(), "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    results = []
    for breaks in (False, True):
        engine = zero_core.build(_Net(), config)
        if breaks:
            engine.backward(engine(_x(0, 0)))
            engine.step()
            loss = engine(_x(1, 0))
            engine.module.first.weight.register_hook(_raise_once())
            with pytest.raises(ArithmeticError):
                engine.backward(engine(_x(1, 0)) + loss)
        for micro in range(2):
            engine.backward(engine(_x(micro, 0)))
            engine.step()
        assert engine.global_steps == 1
        results.append(engine.full_state_dict())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])
    assert "starts again from its first micro-step" in caplog.text


def _raise_once():
    left = [1]

    def hook(grad: Tensor) -> None:
        if left:
            left.pop()
            raise ArithmeticError("as asked")

    return hook


def test_a_schedule_with_milestones_goes_on_after_a_resume(tmp_path):
    def make() -> zero_core.Engine:
        model = _Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4], gamma=0.1)
        return zero_core.build(
            model,
            {"train_batch_size": 1},
            optimizer=optimizer,
            lr_scheduler=schedule,
        )

    def rates(engine: zero_core.Engine, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            engine.backward(engine(_x(step, 0)))
            engine.step()
            found.append(engine.optimizer.param_groups[0]["lr"])
        return found

    expected = rates(make(), 5)
    first = make()
    rates(first, 1)
    first.save_checkpoint(tmp_path, client_state={"by_number": {1: (2, 3)}})
    resumed = make()
    assert resumed.load_checkpoint(tmp_path)[1] == {"by_number": {1: (2, 3)}}
    assert rates(resumed, 4) == expected[1:]


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    zero_core.build(_Net(), {"train_batch_size": 1} | OPT).save_checkpoint(tmp_path)
    other = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    with pytest.raises(
        CheckpointError, match="trained by AdamW with 1 groups, this engine has SGD"
    ):
        zero_core.build(_Net(), other).load_checkpoint(tmp_path)


def test_gradients_from_before_build_are_forgotten():
    norms = []
    for has_old in (False, True):
        model = _Net()
        if has_old:
            model(_x(5, 0)).backward()
        engine = zero_core.build(model, {"train_batch_size": 1} | OPT)
        engine.backward(engine(_x(0, 0)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


def _old_graph(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Net(), Case(stage=3).config() | OPT, process_group=ranks)
    old = engine(_x(0, ranks.rank))
    engine.backward(engine(_x(1, ranks.rank)))
    engine.step()
    with pytest.raises(RuntimeError, match="ran before the last step"):
        engine.backward(old)


def test_a_backward_of_an_older_forward_is_refused_at_stage_three():
    simulate(_old_graph, 2)


def test_a_process_killed_while_it_saves_leaves_the_previous_checkpoint_whole(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, zero_core\n"
        "from zero_core.testing import Case, batch, make_model\n"
        "engine = zero_core.build(make_model(), Case().config())\n"
        "for step in range(10000):\n"
        "    engine.backward(engine(**batch(step, 0, 0))['loss'])\n"
        "    engine.step()\n"
        "    engine.save_checkpoint(sys.argv[1])\n"
        "    print(step, flush=True)\n"
    )
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for delay in (0.0, 0.003, 0.006):
        process.stdout.readline()
        time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = [2, *map(int, process.stdout.read().split())][-1] + 1
    process.stdout.close()
    engine = zero_core.build(make_model(), Case().config())
    engine.load_checkpoint(folder)
    assert engine.global_steps in (last, last + 1)
    expected = zero_core.build(make_model(), Case().config())
    for step in range(engine.global_steps):
        expected.backward(expected(**batch(step, 0, 0))["loss"])
        expected.step()
    full = expected.full_state_dict()
    assert all(torch.equal(v, full[k]) for k, v in engine.full_state_dict().items())


def test_an_export_replaces_one_of_another_size(tmp_path, monkeypatch):
    engine = zero_core.build(_Net(), {"train_batch_size": 1} | OPT)
    engine.export_safetensors(tmp_path)
    monkeypatch.setattr("zero_core.checkpoint.model_files.MAX_FILE_BYTES", 300)
    engine.export_safetensors(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.undo()
    engine.export_safetensors(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.nothing = nn.Parameter(torch.zeros(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum() + self.nothing.sum()


def _empty(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Empty(), Case(stage=3).config() | OPT, process_group=ranks)
    engine.backward(engine(torch.ones(1, 2)))
    engine.step()
    assert engine.full_state_dict()["nothing"].shape == (0,)


def test_a_parameter_without_elements_is_carried_along():
    simulate(_empty, 2)


def test_half_precision_accumulation_keeps_small_gradients():
    torch.manual_seed(0)
    updates = []
    for keys in ({}, {"data_types": {"grad_accum_dtype": "fp16"}}):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        config = {
            "train_batch_size": 1,
            "fp16": {"enabled": True, "loss_scale": 65536.0},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            **keys,
        }
        engine = zero_core.build(model, config)
        engine.backward(engine(torch.ones(1, 4)).float().sum() * 2e-8)
        engine.step()
        updates.append(engine.full_state_dict(dtype=torch.float32)["weight"])
    assert (updates[0] != 0).all()
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-2, atol=0.0)


def test_a_loss_scale_of_a_run_without_one_is_not_taken_over(tmp_path):
    base = {"train_batch_size": 1} | OPT
    zero_core.build(_Net(), base).save_checkpoint(tmp_path)
    engine = zero_core.build(_Net(), {**base, "fp16": {"enabled": True}})
    engine.load_checkpoint(tmp_path)
    assert engine.loss_scale == 65536.0


def _reversed(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Net(), Case(stage=3).config() | OPT, process_group=ranks)
    engine.module.mode = "parts"
    for step in range(3):
        engine.backward(engine(_x(step, ranks.rank)))
        engine.step()
    block = max(sum(s.padded_numel for s in u.segments) for u in engine.layout.units if u.index)
    root = sum(s.padded_numel for s in engine.layout.units[0].segments)
    assert engine.memory_report()["gathered units"] <= 4 * (2 * block + root)


def test_an_order_other_than_the_module_trees_holds_two_blocks_at_most():
    simulate(_reversed, 2)


def test_weight_decay_is_zero_unless_given_as_in_deepspeed():
    engine = zero_core.build(_Net(), {"train_batch_size": 1, "optimizer": {"type": "Adam"}})
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.0


def test_unscaled_micro_steps_of_fp16_are_refused_at_once():
    config = {**Case(accumulation=2).config(), "fp16": {"enabled": True}}
    engine = zero_core.build(make_model(), config)
    with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
        engine(**batch(0, 0, 0))["loss"].backward()


def test_a_late_gradient_is_reduced_where_ranks_share_memory() -> None:
    run_on_processes(_late, 2, 3)
