"""``param.grad`` at stage 0 between a step's last backward and ``step()``, compared with DDP."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core.testing.models import batch, make_model
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import adamw, assert_same, step_ddp

STEPS = 3


def _clip_norm(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _clamp_data(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.clamp_(-1e-3, 1e-3)


def _freeze(model):
    list(model.parameters())[1].grad = None
    del list(model.parameters())[-2].grad


def _zero_and_assign(model):
    first, second, *_ = (p for p in model.parameters() if p.grad is not None)
    first.grad.zero_()
    second.grad = second.grad * 3.0
    second.grad *= 0.5


def _change_a_bias(model):
    next(p for p in model.parameters() if p.dim() == 1 and p.grad is not None).grad.add_(1.0)


def _change_much(model):
    for edit in (_zero_and_assign, _freeze, _change_a_bias):
        edit(model)


EDITS = {
    "nothing": lambda model: None,
    "clipped": _clip_norm,
    "clipped by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "clamped": _clamp_data,
    "None": _freeze,
    "assigned": _zero_and_assign,
    "dropped": lambda model: model.zero_grad(),
    "changed after clipping": _change_much,
}


def _read(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: None if g is None else g.clone() for name, g in grads.items()}


def _norm(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(grads).item() if grads else 0.0


def _build(ranks=None, **case):
    return Case(**case).build(ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_grad_reads_and_counts_as_with_ddp(ranks, name):
    def edit(model):
        grads = [_read(model)]
        EDITS[name](model)
        seen.append([*grads, _read(model), _norm(model)])

    seen = []
    model, engine = make_model(), _build(ranks)
    assert engine.get_global_grad_norm() is None
    ddp, optimizer = SimulatedDDP(model, ranks), adamw(model)
    for step in range(STEPS):
        inputs = batch(step, 0, ranks.rank)
        step_ddp(ddp, optimizer, inputs, edit)
        engine.backward(engine(**inputs)["loss"])
        if name == "changed after clipping":
            engine.clip_grad_norm_(1e9)
        edit(engine.module)
        engine.step()
        assert math.isclose(engine.get_global_grad_norm(), seen[-1][-1], rel_tol=1e-6)
        assert all(p.grad is None for p in engine.module.parameters())
    assert_same(seen[1::2], seen[::2])
    assert_same(engine.full_state_dict(), dict(model.state_dict()))


def _step_with_late_ranks(ranks, steps, case, edits):
    """Edit gradients on rank 0 before other ranks have read them.

    The other ranks wait to read ``param.grad`` until rank 0 is in the all-reduce of the step's
    statistics.
    """
    wanted, model = make_model(), make_model()
    ddp, optimizer = SimulatedDDP(wanted, ranks), adamw(wanted)
    engine = case.build(model=model, optimizer=adamw(model))
    control, group, is_due = engine.sharded_state.control, dist.new_group(), [False]
    plain_sum = control.sum

    def sum_and_release(tensor):
        if is_due[0] and ranks.rank == 0:
            for peer in range(1, ranks.size):
                dist.send(torch.zeros(1), peer, group=group)
        is_due[0] = False
        return plain_sum(tensor)

    control.sum = sum_and_release
    for step in range(steps):
        inputs, edit = batch(step, 0, ranks.rank), edits[step % len(edits)]
        step_ddp(ddp, optimizer, inputs, edit)
        engine.backward(engine(**inputs)["loss"])
        is_due[0] = True
        if ranks.rank > 0:
            dist.recv(torch.zeros(1), 0, group=group)
        edit(engine.module)
        engine.step()
        own = torch.cat([p.detach().flatten().double() for p in model.parameters()])
        values = control.gather(own).view(ranks.size, -1)
        assert (values == values[0]).all(), (step, edit)
    if case == Case():
        close = 0.0 if ranks.size == 2 else 1e-5
        found, values = (dict(m.named_parameters()) for m in (model, wanted))
        torch.testing.assert_close(found, values, rtol=close, atol=close)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@on_processes()
def test_changes_do_not_reach_peers_that_read_later(ranks):
    _step_with_late_ranks(ranks, 30, Case(), list(EDITS.values()))
    edits = (_clip_norm, _zero_and_assign)
    # a narrower communication dtype, and 16-bit parameters
    _step_with_late_ranks(ranks, 4, Case(top={"communication_data_type": "bf16"}), edits)
    _step_with_late_ranks(ranks, 4, Case(dtype="bf16"), edits)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_changes_of_one_rank_are_refused_by_all(ranks):
    engine, inputs = _build(ranks), batch(0, 0, ranks.rank)
    told = r"changes: .*param.grad of .* on rank 0"
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.backward(engine(**inputs)["loss"])
    if ranks.rank == 0:
        _change_a_bias(engine.module)
    with pytest.raises(zero_core.RankMismatchError, match=told):
        engine.step()
    assert_same(dict(engine.module.named_parameters()), before)
    engine.optimizer.zero_grad()
    engine.backward(engine(**inputs)["loss"])
    engine.clip_grad_norm_(1e9)
    if ranks.rank == 0:
        next(p for p in engine.module.parameters() if p.grad is not None).grad.fill_(math.inf)
    engine.step()
    engine.backward(engine(**inputs)["loss"])
    with pytest.raises(zero_core.RankMismatchError, match=told):
        engine.step()


def _reads(ranks, case, *, is_read):
    engine = case.build(ranks)
    for step in range(STEPS):
        for micro in range(case.accumulation):
            if case.num_backwards == 2:  # one more backward, before the gradient is read
                engine.scale(engine(**batch(step, 5, ranks.rank))["loss"]).backward()
            if is_read and micro < case.accumulation - 1:
                assert not any(_read(engine.module).values())
            elif is_read and ranks.rank == 0:
                _read(engine.module)
            engine.scale(engine(**batch(step, micro, ranks.rank))["loss"]).backward()
            if case.num_backwards == 3 and micro == case.accumulation - 1:
                engine.clip_grad_norm_(0.1)
            if is_read and ranks.rank == 0:
                _read(engine.module)
            engine.step()
    return engine.full_state_dict(dtype=torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(clipping=0.1), Case(accumulation=2), Case(num_backwards=3)),
        *(Case(num_backwards=2, clipping=0.1), Case(dtype="bf16", clipping=0.1)),
        Case(dtype="fp16", accumulation=2),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_reading_on_one_rank_changes_no_bit(ranks, case):
    wanted, found = (_reads(ranks, case, is_read=is_read) for is_read in (False, True))
    assert_same(found, wanted)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_further_backward_adds_to_what_was_changed(ranks):
    model, engine = make_model(), _build(ranks)
    for micro in range(2):
        losses = [model(**batch(0, micro, rank))["loss"] for rank in range(ranks.size)]
        (sum(losses) / ranks.size).backward()
        engine(**batch(0, micro, ranks.rank))["loss"].backward()
        for each in (model, engine.module) if micro == 0 else ():
            _clip_norm(each)
    torch.testing.assert_close(_read(engine.module), _read(model), rtol=1e-6, atol=1e-8)
    adamw(model).step()
    engine.step()
    values = dict(model.state_dict())
    torch.testing.assert_close(engine.full_state_dict(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_grad_of_16_bit_parameters_has_their_dtype(ranks, dtype):
    fp16 = {"fp16": {"enabled": dtype == torch.float16, "loss_scale": 64.0}}
    engine = _build(ranks, dtype="bf16" if dtype == torch.bfloat16 else "fp16", top=fp16)
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    params = {n: p for n, p in engine.module.named_parameters() if p.grad is not None}
    exact = [engine.states.get_full(name, "grad") * engine.loss_scale for name in params]
    rounded = [grad.to(dtype) for grad in exact]
    assert all(torch.equal(p.grad, g) for p, g in zip(params.values(), rounded, strict=True))
    for param in params.values():
        param.grad.mul_(0.5)
    wanted = torch.stack([(g * 0.5).float().norm() for g in rounded]).norm()
    engine.step()
    assert engine.skipped_steps == 0
    norm = engine.get_global_grad_norm()
    assert math.isclose(norm, wanted.item() / engine.loss_scale, rel_tol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_what_is_assigned_without_a_backward_is_stepped_with(ranks):
    wanted, engine = make_model(), _build(ranks)
    optimizer = adamw(wanted)
    for _ in range(2):
        for model in (wanted, engine.module):
            for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
                if number != 2:
                    param.grad = torch.full_like(param, 0.1 * number)
        norm = _norm(wanted)
        optimizer.step()
        engine.step()
        assert math.isclose(engine.get_global_grad_norm(), norm, rel_tol=1e-6)
    assert_same(engine.full_state_dict(), dict(wanted.state_dict()))


def test_a_gradient_that_is_made_infinite_skips_the_step():
    engine = _build()
    before = {n: v.clone() for n, v in engine.full_state_dict().items()}
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    next(p for p in engine.module.parameters() if p.grad is not None).grad[0] = math.inf
    engine.step()
    assert engine.skipped_steps == 1
    assert_same(engine.full_state_dict(), before)


def test_states_by_name_and_clipping_of_the_engine_see_changes():
    engine = _build()
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    _clip_norm(engine.module)
    name, param = next((n, p) for n, p in engine.module.named_parameters() if p.grad is not None)
    assert torch.equal(engine.states.get_full(name, "grad"), param.grad)
    assert math.isclose(engine.clip_grad_norm_(1.0), _norm(engine.module), rel_tol=1e-6)
    engine.states.set_full(name, torch.ones(param.shape), "grad")
    assert torch.equal(param.grad, torch.ones(param.shape))
    with pytest.raises(RuntimeError, match="assign a gradient of size"):
        param.grad = torch.ones(3, 3, 3)
    engine.optimizer.zero_grad()
    assert param.grad is None
