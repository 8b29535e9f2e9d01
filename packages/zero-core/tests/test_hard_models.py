"""Unusual models and loops: correct results, or an error that gives the reason."""

import gc
import time
import weakref
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core import CheckpointError
from zero_core.testing.equal import SCENARIOS, evaluate, micro_step
from zero_core.testing.models import batch, make_model, make_tower, rows
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.ranks import on_processes, run_on_processes
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import adamw, assert_same, train


def _build(ranks, stage, **case):
    return Case(stage, **case).build(ranks, make_tower())


def _calls(model, way, step, rank):
    numbers = (step, step + 50) if way == "two backwards" else (step,)
    return [model(rows(number, rank)) for number in numbers]


@pytest.mark.parametrize("way", ["two backwards", "a plain backward"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_step_follows_ddp_when_its_backward_is(ranks, stage, way):
    reference = make_tower()
    ddp = SimulatedDDP(reference, ranks)
    optimizer = adamw(reference)
    engine = _build(ranks, stage)
    for step in range(3):
        for loss in _calls(ddp, way, step, ranks.rank):
            loss.backward()
            ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        for loss in _calls(engine, way, step, ranks.rank):
            loss.backward() if way == "a plain backward" else engine.backward(loss)
        engine.step()
    close = 0.0 if way == "a plain backward" else 1e-5
    expected = dict(reference.state_dict())
    torch.testing.assert_close(engine.full_state_dict(), expected, rtol=close, atol=close)


@on_ranks(2)
def test_a_loss_that_is_dropped_frees_its_activations(ranks):
    engine = _build(ranks, 3)
    seen = []
    for module in engine.module.modules():
        module.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    loss = engine(rows(0, ranks.rank))
    assert seen[-1]() is loss
    del loss
    assert [ref() for ref in seen if ref() is not None] == []


@on_ranks(2)
def test_a_part_called_by_itself_works_without_gradients_and_is_refused_with(ranks):
    engine = _build(ranks, 3)
    with pytest.raises(RuntimeError, match=r"a part of unit 0 \(root\) was called by itself"):
        engine.module.first(rows(0, ranks.rank))
    with torch.no_grad():
        assert torch.equal(engine.module.first(rows(0, 0)), make_tower().first(rows(0, 0)))


def _late(ranks, stage):
    """Run a reduced backward, then one under no_sync (below stage 3 on rank 0 only)."""
    engine = _build(ranks, stage)
    engine.backward(engine(rows(0, ranks.rank)))
    with engine.no_sync():
        loss = engine(rows(1, ranks.rank))
        if ranks.rank == 0 or stage == 3:
            engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 0


@pytest.mark.parametrize(
    ("run", "stage"), [*((simulate, stage) for stage in range(4)), (run_on_processes, 3)]
)
def test_unreduced_gradients_of_one_rank_are_reduced_by_all(run, stage):
    run(_late, 2, stage)


def _skips_several(ranks):
    engine = _build(ranks, 3)
    blocks, x = engine.module.blocks, rows(0, ranks.rank)
    for block in blocks if ranks.rank == 0 else [blocks[0], blocks[3]]:
        x = block(x)
    engine.backward(x.sum())


def test_ranks_that_skip_several_blocks_get_an_error_not_wrong_weights():
    with pytest.raises(zero_core.CollectiveError, match="all_gather of unit"):
        simulate(_skips_several, 2, timeout_s=2.0)


@on_ranks(2)
def test_blocks_may_be_called_without_the_models_forward_and_each_rank_may_drop_one(ranks):
    results = []
    for stage in range(4):
        engine = _build(ranks, stage)
        blocks = [b for i, b in enumerate(engine.module.blocks) if i != 1 + ranks.rank]
        for step in range(3):
            x = rows(step, ranks.rank)
            for block in blocks:
                x = block(x)
            engine.backward(x.square().mean())
            engine.step()
        results.append(engine.full_state_dict())
    for one, other in pairwise(results):
        assert_same(one, other)


@on_ranks(2)
def test_an_order_other_than_the_module_trees_holds_two_blocks_at_most(ranks):
    engine = _build(ranks, 3)
    for step in range(3):
        train(engine, [(rows(step, ranks.rank), (3, 2, 1, 0))])
    block = max(sum(s.padded_numel for s in u.segments) for u in engine.layout.units if u.index)
    root = sum(s.padded_numel for s in engine.layout.units[0].segments)
    assert engine.memory_report()["gathered units"] <= 4 * (2 * block + root)


@on_processes(2)
def test_a_lost_peer_is_named_by_rank_unit_and_collective(ranks):
    engine = Case(stage=3).build()
    if ranks.rank == 1:
        dist.destroy_process_group()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    with pytest.raises(zero_core.CollectiveError, match=r"rank 0: all_gather of unit 0 \(root\)"):
        engine(**batch(0, 0, ranks.rank))


@on_ranks(2)
def test_a_failure_or_another_folder_of_one_rank_reaches_all(ranks, tmp_path, caplog):
    engine = _build(ranks, 3)
    engine.save_checkpoint(tmp_path / f"of {ranks.rank}")
    assert f"rank 1 to {tmp_path}/of 1/step-0. Neither folder is a whole" in caplog.text
    with pytest.raises(CheckpointError, match=r"find failed on rank 1: .* holds no checkpoint"):
        engine.load_checkpoint(tmp_path / ("of 0" if ranks.rank == 0 else "elsewhere"))
    with pytest.raises(CheckpointError, match=r"rank 1.*holds no checkpoint"):
        engine.resume(tmp_path / ("of 0" if ranks.rank == 0 else "elsewhere"))
    with pytest.raises(CheckpointError, match=r"prepare failed on rank 1: .* keeps JSON"):
        engine.save_checkpoint(tmp_path, client_state={"x": object() if ranks.rank else 1})
    with pytest.raises(CheckpointError, match=r"find failed on every rank: \S*none holds no"):
        engine.load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="export failed on rank 0"):
        engine.export_safetensors(tmp_path / "of 0/latest")


def test_an_exception_in_the_middle_of_an_accumulation_restarts_the_step(caplog):
    def fail(grad):
        handle.remove()
        raise ArithmeticError("as asked")

    results = []
    for breaks in (False, True):
        engine = _build(None, 0, accumulation=2)
        if breaks:
            train(engine, [rows(0, 0)])
            loss = engine(rows(1, 0))
            handle = engine.module.first.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                engine.backward(engine(rows(1, 0)) + loss)
            for take in (engine.step, lambda e=engine: e.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match="the last backward did not end"):
                    take()
        train(engine, [rows(0, 0), rows(1, 0)])
        assert engine.global_steps == 1
        results.append(engine.full_state_dict())
    assert_same(*results)
    assert "step 1 starts again from its first micro-step" in caplog.text


def test_a_loss_scale_of_a_run_without_one_is_not_taken_over(tmp_path):
    Case().build(model=make_tower()).save_checkpoint(tmp_path)
    engine = Case(dtype="fp16").build(model=make_tower())
    engine.load_checkpoint(tmp_path)
    assert engine.loss_scale == 65536.0


def test_gradients_from_before_build_are_forgotten():
    norms = []
    for has_old in (False, True):
        model = make_tower()
        if has_old:
            model(rows(5, 0)).backward()
        engine = Case().build(model=model)
        train(engine, [rows(0, 0)])
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


def test_half_precision_accumulation_keeps_small_gradients():
    top = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    top["fp16"] = {"enabled": True, "loss_scale": 65536.0}
    updates = []
    for dtype in (None, "fp16"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        case = Case(top=top | {"data_types": {"grad_accum_dtype": dtype}})
        engine = case.build(model=model)
        engine.backward(engine(torch.ones(1, 4)).float().sum() * 2e-8)
        engine.step()
        updates.append(engine.full_state_dict(dtype=torch.float32)["weight"])
    assert (updates[0] != 0).all()
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-2, atol=0.0)


def test_weight_decay_is_zero_unless_given_as_in_deepspeed():
    engine = Case(top={"optimizer": {"type": "Adam"}}).build(model=make_tower())
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.0


def test_a_plain_backward_in_fp16_needs_the_loss_scale():
    config = {**Case(accumulation=2).config(), "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = zero_core.build(make_model(), config)
    with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
        engine(**batch(0, 0, 0))["loss"].backward()
    for _ in range(2):
        engine.scale(engine(**batch(0, 0, 0))["loss"]).backward()
        engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (1, 0)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (3, 2), (1, 3), (2, 3), (3, 3)])
@on_ranks()
def test_training_goes_on_after_it_broke_off(ranks, stage, tmp_path):
    breaks_off, _ = SCENARIOS["breaks off"]
    first, _, *rest = breaks_off(Case(stage).build(ranks), tmp_path)
    engine = Case(stage).build(ranks)
    straight = [micro_step(engine, step) for step in range(3)]
    assert [first, *rest] == [*straight, evaluate(engine, 2)]


@on_ranks(2)
def test_parameters_can_be_changed_and_an_engine_closed_after_ctrl_c(ranks):
    def interrupt(*args):
        raise KeyboardInterrupt

    engine = _build(ranks, 3)
    model = engine.module
    model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 7))
    with engine.gathered(modifier_rank=0):
        model.blocks[0][0].weight.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 7))
    engine.close()
    part = weakref.ref(engine.sharded_state.params[0])
    del engine, model
    for _ in range(100):  # gc.collect() does nothing while another thread collects
        gc.collect()
        if part() is None:
            break
        time.sleep(0.01)
    assert part() is None, "a hook of the engine's is left on this thread"
