"""Parameters frozen and unfrozen during training, compared with DDP."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing.models import Tower, make_tower, rows, seeded
from zero_core.testing.oracle import LR, WEIGHT_DECAY, Case, SimulatedDDP
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, step_ddp, train

STEPS_PER_PHASE = 2


def _freeze(model, phase):
    """Freeze the parameters of a phase, and unfreeze all others. Phases 1 and 3 freeze nothing."""
    model.requires_grad_(True)
    if phase == 0:
        model.blocks[:3].requires_grad_(False)
    elif phase == 2:
        model.blocks[4].requires_grad_(False)
        model.blocks[5][0].requires_grad_(False)
        model.first.requires_grad_(False)
    return model


def _tower(phase=1):
    return _freeze(make_tower(6), phase)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _steps(phase):
    return range(phase * STEPS_PER_PHASE, (phase + 1) * STEPS_PER_PHASE)


def _reference(case, ranks, phases):
    model = _tower()
    optimizer = _adamw(model)
    for phase in range(phases):
        ddp = SimulatedDDP(_freeze(model, phase), ranks)
        for step in _steps(phase):
            optimizer.zero_grad()
            for micro in range(case.accumulation):
                (ddp(rows(10 * step + micro, ranks.rank)) / case.accumulation).backward()
            ddp.average_gradients()
            optimizer.step()
    return dict(model.state_dict())


def _run(engine, rank, phase):
    _freeze(engine.module, phase)
    micros = engine.gradient_accumulation_steps
    for step in _steps(phase):
        for micro in range(micros):
            with engine.no_sync() if micro < micros - 1 else nullcontext():
                engine.backward(engine(rows(10 * step + micro, rank)))
            engine.step()


def _build(config, phase=0, process_group=None):
    model = _tower(phase)
    return zero_core.build(model, config, optimizer=_adamw(model), process_group=process_group)


@pytest.mark.parametrize(
    ("world_size", "stage", "accumulation", "again"),
    [
        *((1, 0, 1, None), (1, 3, 2, None), (2, 1, 1, None), (2, 2, 2, None), (2, 3, 1, {})),
        *((3, 0, 2, None), (3, 1, 1, {}), (3, 2, 1, None), (3, 3, 1, None)),
    ],
)
@on_ranks()
def test_frozen_and_unfrozen_parameters_follow_ddp(ranks, stage, accumulation, again):
    case = Case(stage, accumulation=accumulation, is_local=True)
    expected = _reference(case, ranks, phases=4)
    engine = _build(case.config() | {"activation_checkpointing": again}, process_group=ranks)
    for phase in range(4):
        _run(engine, ranks.rank, phase)
    # With three ranks, the average of a sum and the sum of averages round differently.
    atol = 4e-6 if ranks.size == 3 and accumulation > 1 else 0.0
    torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=atol)


@on_ranks(2)
def test_reductions_do_not_wait_for_gradients_that_will_not_come(ranks):
    underway = []
    for is_frozen in (False, True):
        engine = _build(Case(stage=2).config(), phase=1, process_group=ranks)
        engine.module.blocks[5][0].bias.requires_grad_(not is_frozen)
        engine.module.blocks[4].requires_grad_(not is_frozen)
        train(engine, [rows(step, ranks.rank) for step in range(2)])
        underway.append(engine.memory_report()["gradients under way"])
    assert underway[0] == underway[1]


_OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=LR, initial_accumulator_value=0.5),
    "whole AdamW": lambda params: type("Mine", (torch.optim.AdamW,), {})(params, lr=LR),
    "whole Adagrad": lambda params: type("Mine", (torch.optim.Adagrad,), {})(
        params, lr=LR, initial_accumulator_value=0.5
    ),
}


def _in_phase(phase, optimizer):
    model = _tower(phase)
    trained = [p for p in model.parameters() if p.requires_grad]
    if phase == 3:
        trained = [{"params": trained[:9], "lr": LR / 3}, {"params": trained[9:]}]
    return model, _OPTIMIZERS[optimizer](trained)


def _staged_in_torch(ranks, name):
    """Train in torch. Each phase has a new optimizer, with the last states of its parameters."""
    values, states = _tower().state_dict(), {}
    for phase in range(4):
        model, optimizer = _in_phase(phase, name)
        model.load_state_dict(values)
        trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
        for path in trained.keys() & states.keys():
            optimizer.state[trained[path]] = states[path]
        ddp = SimulatedDDP(model, ranks)
        for step in _steps(phase):
            step_ddp(ddp, optimizer, rows(10 * step, ranks.rank))
        values = model.state_dict()
        states = {path: optimizer.state[param] for path, param in trained.items()}
    return dict(values)


def _resumes_in_stages(ranks, stage, name, folder):
    for phase in range(4):
        model, optimizer = _in_phase(phase, name)
        engine = Case(stage=(stage + phase) % 4 if name == "AdamW" else stage).build(
            ranks, model, optimizer=optimizer
        )
        if phase:
            _run(engine, ranks.rank, phase)
            engine.load_checkpoint(folder)
        _run(engine, ranks.rank, phase)
        engine.save_checkpoint(folder)
    assert_same(engine.full_state_dict(), _staged_in_torch(ranks, name))


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        *((0, "AdamW"), (2, "AdamW")),
        *((0, "momentum"), (3, "Adagrad"), (3, "whole AdamW"), (0, "whole Adagrad")),
    ],
)
def test_runs_that_freeze_other_parameters_resume_with_the_states_that_pair_by_name(
    tmp_path, caplog, stage, optimizer
):
    simulate(_resumes_in_stages, 2, stage, optimizer, str(tmp_path))
    first, second, third = (m for m in caplog.messages if "other parameters frozen" in m)
    assert "start with fresh optimizer states: blocks.0.0.weight, blocks.0.0.bias" in first
    assert "keep their values" not in first
    assert "keep their values: first.weight, first.bias" in second
    assert "fresh" not in second
    assert "fresh optimizer states: first.weight, first.bias" in third
    (groups,) = (m for m in caplog.messages if "parameter groups" in m)
    assert groups.startswith("1 parameter groups were saved, the engine has 2: it keeps its own")


_PAIRED = ("blocks.1.0.weight", "blocks.4.0.weight", "blocks.3.0.weight")
"""From phase 0 to 2 the first becomes trained and the second frozen. The third stays trained."""


def _read_after(ranks, phase, stage, name, folder, memory):
    model, optimizer = _in_phase(phase, name)
    config = Case(stage, "bf16").config()
    if memory is not None:
        config["memory_checkpoint"] = {"path": memory}
    engine = zero_core.build(model, config, optimizer=optimizer, process_group=ranks)
    was_found = engine.resume(folder) is not None
    assert was_found == bool(phase)
    if not was_found:
        _run(engine, ranks.rank, phase)
        if memory is None:
            engine.save_checkpoint(folder)
    states = engine.states
    found = [states.get_full(path) for path in _PAIRED], states.get_full(_PAIRED[2], "exp_avg")
    if phase:
        assert states.scalars(_PAIRED[0])["num_steps"] == 0
        _run(engine, ranks.rank, phase)
    engine.close()
    return found


@pytest.mark.parametrize("optimizer", ["AdamW", "whole AdamW"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (3, 3)])
@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_states_pair_by_name_at_another_number_of_ranks(
    tmp_path, world_size, stage, optimizer, in_memory
):
    place = str(tmp_path / "disk"), str(tmp_path / "memory") if in_memory else None
    (values, moment), _ = simulate(_read_after, 2, 0, 2, optimizer, *place)
    values[1] = values[1].bfloat16().float()
    for found, own in simulate(_read_after, world_size, 2, stage, optimizer, *place):
        assert_same([*found, own], [*values, moment])


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_unfreezing_what_no_optimizer_group_holds_is_refused_by_name(ranks, stage):
    model = _tower(0)
    engine = Case(stage).build(ranks, model)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.0\.weight requires .* Freeze it"):
        engine(rows(0, ranks.rank))
    with pytest.raises(RuntimeError, match=r"blocks\.1\.0\.weight"):
        engine.step()
    model.blocks[1].requires_grad_(False)
    train(engine, [rows(0, ranks.rank)])
    assert engine.global_steps == 1


def test_memory_kept_for_frozen_parameters_is_told(caplog):
    engine = _build({"train_batch_size": 1})
    assert "12 parameters (426 elements; the first is blocks.0.0.weight)" in caplog.text
    trained = sum(s.padded_numel for s in engine.layout.segments)
    assert engine.memory_report()["gradient shards"] == 4 * trained
    caplog.clear()
    _build({"train_batch_size": 1}, phase=1)
    assert not caplog.records


class _Quantized(Tower):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)

    def forward(self, x, used=None):
        return super().forward(x * self.codes.float())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_an_integer_parameter_is_frozen_even_if_the_optimizer_holds_it(ranks, stage):
    with seeded(5):
        model = _Quantized()
    engine = Case(stage).build(ranks, model, optimizer=_adamw(model))
    assert [p.name for p in engine.layout.params if not p.is_trainable] == ["codes"]
    train(engine, [rows(0, ranks.rank)])
    assert torch.equal(engine.full_state_dict()["codes"], torch.arange(7, dtype=torch.uint8))
