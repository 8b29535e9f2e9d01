"""Gradient accumulation whose boundaries the training loop sets, compared with DDP."""

import pytest
import torch
from support.tiers import MadeTier

from zero_core.errors import CheckpointError
from zero_core.testing import Case, assert_same, batch, make_model, on_ranks, train_ddp

EPOCHS = (3, 3, 2, 3, 1)
"""Micro-steps of each step, in two epochs whose last step is shorter."""


def _ddp(ranks, counts):
    model = make_model()
    batches = [batch(s, micro, ranks.rank) for s, n in enumerate(counts) for micro in range(n)]
    train_ddp(model, ranks, batches, counts)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _train(engine, rank, counts):
    for step, count in enumerate(counts):
        for micro in range(count):
            is_last = micro == count - 1
            engine.set_gradient_accumulation_boundary(is_last)
            assert engine.is_gradient_accumulation_boundary() == is_last
            engine.backward(engine(**batch(step, micro, rank))["loss"], over=count)
            engine.step()
        assert engine.global_steps == step + 1
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    full = engine.full_state_dict(dtype=torch.float32)
    return {name: full[name] for name in names}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("configured", [1, 3])  # micro-steps per step. The loop runs 1 to 3
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_a_short_last_accumulation_has_the_numbers_of_ddp(ranks, stage, configured):
    expected = _ddp(ranks, EPOCHS)
    engine = Case(stage, accumulation=configured).build(ranks)
    found = _train(engine, ranks.rank, EPOCHS)
    assert engine.micro_steps == sum(EPOCHS)
    assert_same(found, expected)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
@on_ranks()
def test_a_boundary_declared_after_the_last_backward_is_in_time_for_its_step(ranks, stage):
    expected = _ddp(ranks, (2,))
    engine = Case(stage, accumulation=4).build(ranks)
    for micro in range(2):
        engine.backward(engine(**batch(0, micro, ranks.rank))["loss"], over=2)
        engine.set_gradient_accumulation_boundary(True if micro == 1 else None)
        engine.step()
    found = engine.full_state_dict()
    assert_same({n: found[n] for n in expected}, expected)


def _engine(accumulation):
    return Case(accumulation=accumulation).build()


def _micro_step(engine, micro=0, **over):
    engine.backward(engine(**batch(0, micro, 0))["loss"], **over)
    engine.step()


def test_the_count_begins_anew_after_a_step_that_was_ended_early(tmp_path):
    engine = _engine(3)
    _micro_step(engine)
    with pytest.raises(CheckpointError, match="1 are done"):
        engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(True)
    _micro_step(engine)
    engine.set_gradient_accumulation_boundary(None)
    assert engine.micro_steps == 2
    engine.save_checkpoint(tmp_path)
    seen = []
    for _ in range(6):
        seen.append(engine.is_gradient_accumulation_boundary())
        _micro_step(engine)
    assert seen == [False, False, True] * 2
    assert engine.global_steps == 3


def test_a_loss_over_no_micro_steps_is_refused():
    engine = _engine(2)
    with pytest.raises(ValueError, match="over = 0"):
        engine.scale(torch.ones(()), over=0)
    assert engine.scale(torch.ones(()), over=1) == 1.0
    assert engine.scale(torch.ones(()), over=4) == 0.25
    assert engine.scale(torch.ones(())) == 0.5


class _Keeper(MadeTier):
    owns_grads = True

    def offer_grad(self, start, grad):
        super().offer_grad(start, grad.float() if grad.dtype is torch.bfloat16 else grad.clone())


@pytest.mark.parametrize("tier", [None, _Keeper.made])
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_steps_of_one_rank_add_up_unrounded_however_their_number_is_given(stage, tier):
    found = []
    for how in ("config", "setter", "declared"):
        case = Case(stage, "bf16", accumulation=4 if how == "config" else 1)
        engine = case.build(state_tier=tier)
        if how == "setter":
            engine.gradient_accumulation_steps = 4
        for micro in range(8):
            if how == "declared":
                engine.set_gradient_accumulation_boundary(micro % 4 == 3)
            _micro_step(engine, micro, over=4)
        assert engine.global_steps == 2
        found.append(engine.full_state_dict(dtype=torch.float32))
    for other in found[1:]:
        assert_same(other, found[0])


@on_ranks(1)
def test_a_load_within_a_step_begins_it_again_and_a_refused_one_changes_nothing(ranks, tmp_path):
    engine = Case(accumulation=2).build(ranks)
    engine.save_checkpoint(tmp_path)
    _micro_step(engine, 0)
    with pytest.raises(CheckpointError, match="nowhere"):
        engine.load_checkpoint(tmp_path / "nowhere")
    _micro_step(engine, 1)
    assert engine.global_steps == 1
    expected, norm = engine.full_state_dict(), engine.get_global_grad_norm()
    oracle = _ddp(ranks, (2,))
    for without in ((), ("progress",)):
        _micro_step(engine, 0)
        done = engine.global_steps
        engine.load_checkpoint(tmp_path, without=without)
        for micro in range(2):
            _micro_step(engine, micro)
        assert engine.global_steps == (1 if not without else done + 1)
        assert engine.micro_steps == 2 * engine.global_steps
        assert not engine.is_gradient_accumulation_boundary()
        assert engine.get_global_grad_norm() == norm
        assert_same(engine.full_state_dict(), expected)
        assert all(torch.equal(expected[name], value) for name, value in oracle.items())
