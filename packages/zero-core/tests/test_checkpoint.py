"""Checkpoints: saved at any stage and world size, and loaded in full or in part at any other."""

import json
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.changed_checkpoints import rewrite
from support.full_disk import files_up_to
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR, StepLR

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint import read_client_state
from zero_core.checkpoint.files import read_weights
from zero_core.checkpoint.json_values import MAX_NUMEL, decode, encode
from zero_core.extensions.weight_average import AVERAGE, WeightAverage
from zero_core.optim.train_state import TrainState
from zero_core.schedules import WarmupLR
from zero_core.testing import Case, Hard, batch, make_model, on_ranks, simulate
from zero_core.testing.training import assert_same, train_steps

WEIGHTS_ALONE = ("optimizer", "lr_scheduler", "progress")
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
LION = {"type": "Lion", "params": {"lr": 1e-2}}


def _build(stage=0, ranks=None, dtype="fp32", extensions=(), **top):
    return Case(stage=stage, dtype=dtype, top=top).build(ranks, extensions=extensions)


def _values(engine):
    return engine.full_state_dict(dtype=torch.float32)


def _rate(engine):
    return engine.optimizer.param_groups[0]["lr"]


def _everything(engine):
    found = _values(engine)
    for name, param in engine.module.named_parameters():
        if param.requires_grad and name != "never":
            for what in ("exp_avg", "exp_avg_sq", AVERAGE):
                found[f"{what} of {name}"] = engine.states.get_full(name, what)
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "dtype"),
    [
        ((3, 2), (0, 1), "fp32"),
        ((0, 1), (3, 3), "fp32"),
        ((1, 3), (2, 2), "bf16"),
        ((3, 3), (1, 2), "bf16"),
        ((3, 3), (0, 2), "fp32"),
    ],
)
def test_a_checkpoint_loads_at_another_stage_and_world_size(tmp_path, saved, loaded, dtype):
    def save(ranks):
        engine = _build(saved[0], ranks, dtype, [WeightAverage(0.9)])
        train_steps(engine, 0, 3)
        found = _everything(engine)
        # Ranks 0 and 1 share a folder like ranks of one machine. Rank 2 has a separate folder.
        own = tmp_path / f"machine-{ranks.rank // 2}"
        if saved[0] == 3:
            pending = engine.async_save(own, client_state={"epoch": 7})
            train_steps(engine, 3, 4)  # the pending save has its own copy of the states
            pending.result()
        else:
            engine.save_checkpoint(own, client_state={"epoch": 7})
        assert not list(own.glob(".*"))
        return found

    def load(ranks):
        engine = _build(loaded[0], ranks, dtype, [WeightAverage(0.9)])
        train_steps(engine, 5, 6)  # load_checkpoint() must replace the states of this step
        place, client_state = engine.load_checkpoint(tmp_path)
        assert place == tmp_path / "step-3"
        assert client_state == read_client_state(tmp_path) == {"epoch": 7}
        assert engine.global_steps == 3
        assert_same(_everything(engine), values)
        train_steps(engine, 3, 4)

    values, *_ = simulate(save, saved[1])
    for part in sorted(tmp_path.glob("machine-*")):
        shutil.copytree(part, tmp_path, dirs_exist_ok=True)
    simulate(load, loaded[1])


@pytest.mark.parametrize(("stage", "world_size", "has_latest"), [(0, 3, False), (3, 2, True)])
def test_resume_continues_with_the_same_bits_when_a_program_starts_again(
    tmp_path, stage, world_size, has_latest
):
    def once(ranks, num_steps):
        engine = _build(stage, ranks)
        found = engine.resume(tmp_path)
        losses = train_steps(engine, 0 if found is None else found["step"], num_steps)
        engine.save_checkpoint(tmp_path, client_state={"step": num_steps})
        return found, losses

    begun = simulate(once, world_size, 3)
    if not has_latest:  # as after a kill in the first save
        (tmp_path / "latest").unlink()
    resumed = simulate(once, world_size, 6)
    assert [found for found, _ in begun] == [None] * world_size
    assert [found for found, _ in resumed] == [{"step": 3}] * world_size
    shutil.rmtree(tmp_path)
    straight = simulate(once, world_size, 6)
    for (_, before), (_, after), (_, whole) in zip(begun, resumed, straight, strict=True):
        assert before + after == whole


def test_states_of_any_optimizer_and_of_the_generator_come_back(tmp_path):
    optimizer = partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True)
    engine, other = (_build_with(optimizer, lambda _: None) for _ in range(2))
    train_steps(engine, 0, 1)  # no step has used the parameter `sometimes` yet
    engine.save_checkpoint(tmp_path)
    drawn = torch.rand(3)
    train_steps(other, 1, 2)
    other.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert train_steps(engine, 1, 4) == train_steps(other, 1, 4)


def test_save_without_room_keeps_the_checkpoint_before(tmp_path):
    engine = _build()
    train_steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="first")
    before = _values(engine)
    train_steps(engine, 1, 2)
    room = pytest.raises(CheckpointError, match=r"rank 0: .*could not be written .* make room")
    with files_up_to(300), room:
        engine.save_checkpoint(tmp_path, tag="second")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest"]
    (tmp_path / "first").rename(tmp_path / ".first.old")  # as left by a kill between two renames
    other = _build()
    assert other.load_checkpoint(tmp_path)[0] == tmp_path / ".first.old"
    assert_same(_values(other), before)
    engine.save_checkpoint(tmp_path, tag="second")
    train_steps(engine, 2, 3)
    engine.save_checkpoint(tmp_path, tag="second")
    other.load_checkpoint(tmp_path, "second")
    assert other.global_steps == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest", "second"]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("exp_avg-00000.safetensors", lambda d: d[:-5] + bytes([d[-5] ^ 1]) + d[-4:], "exp_avg"),
        ("exp_avg-00000.safetensors", lambda d: d[:-8], "exp_avg-00000"),
        ("exp_avg-00000.safetensors", None, "exp_avg-00000"),
        ("manifest.json", lambda d: d.replace(b"zero-", b"hero-"), "is damaged: its SHA-256"),
    ],
    ids=["flipped", "truncated", "missing", "manifest"],
)
def test_damaged_bytes_are_refused(tmp_path, file, damage, message):
    engine = _build()
    train_steps(engine, 0, 1)
    victim = engine.save_checkpoint(tmp_path, tag="t") / file
    if damage is None:
        victim.unlink()
    else:
        victim.write_bytes(damage(victim.read_bytes()))
    with pytest.raises(CheckpointCorruptError, match=message):
        _build().load_checkpoint(tmp_path)


def test_wrong_saves_and_loads_are_refused_before_anything_is_written(tmp_path):
    engine = _build(gradient_accumulation_steps=2)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} holds no checkpoint"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"client_state\.x is a object .* keeps JSON"):
        engine.save_checkpoint(tmp_path, client_state={"x": object()})
    with pytest.raises(CheckpointError, match=r"client_state = \[1\]: give a dict"):
        engine.save_checkpoint(tmp_path, client_state=[1])
    for tag in ("", "a/b", ".hidden", "latest", 5):
        with pytest.raises(CheckpointError, match="plain folder name"):
            engine.save_checkpoint(tmp_path, tag=tag)
    train_steps(engine, 0, 1)
    with pytest.raises(CheckpointError, match="in the middle of an accumulation"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path, drops_partial=True)
    other = _build(gradient_accumulation_steps=2)
    for load in (other.load_checkpoint, other.resume):
        with pytest.raises(CheckpointError, match=f"single checkpoint: .*'{tmp_path}'"):
            load(tmp_path / "step-0")
    with pytest.raises(CheckpointError, match="latest is a file: give a folder"):
        other.save_checkpoint(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=rf"is not a checkpoint: .* of {tmp_path}: step-0"):
        other.load_checkpoint(tmp_path, "other")
    with pytest.raises(CheckpointError, match=rf"load_checkpoint.'{tmp_path}', tag='step-0'."):
        other.load_checkpoint(tmp_path / "step-0")
    other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.micro_steps) == (0, 0)


def test_accumulation_changes_between_steps_only():
    engine = _build(gradient_accumulation_steps=2)
    train_steps(engine, 0, 1)
    with pytest.raises(RuntimeError, match="1 micro-steps of a step are done"):
        engine.gradient_accumulation_steps = 3
    with pytest.raises(ValueError, match="expected 1 or more"):
        engine.gradient_accumulation_steps = 0


def _linear(numel):
    model = nn.Linear(3, 3)
    if numel is not None:
        model.register_buffer("extra", torch.ones(numel))
    return model


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (Hard(depth=3), Hard(depth=4), "belongs to another model: it lacks"),
        (Hard(width=11), Hard(width=13), r"parameter .* has shape"),
        (_linear(3), _linear(None), r"lacks the buffers \[\] and has \['extra'\]"),
        (_linear(None), _linear(3), r"lacks the buffers \['extra'\] and has \[\]"),
        (_linear(3), _linear(4), r"buffer extra has shape \(3,\) there and \(4,\) in the model"),
    ],
)
def test_another_models_checkpoint_is_refused_before_anything_is_written(
    tmp_path, saved, own, message
):
    Case().build(model=saved).save_checkpoint(tmp_path)
    engine = Case().build(model=own)
    before = engine.full_state_dict()
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path)
    assert_same(engine.full_state_dict(), before)


_FORMER = {"__tensor__": "int64", "shape": [1], "values": [7]}
_KEYS = ("__tensor__", "__tuple__", "__counter__", "__mapping__")


@pytest.mark.parametrize(
    "value",
    [
        *({key: value} for key in _KEYS for value in (1, [1], {"other": (2,)})),
        *(_FORMER, {0: _FORMER}, Counter({2: 2, 4: 1})),
        *((torch.ones(2, 3).to(t),) for t in (torch.float64, torch.bfloat16, torch.int64)),
        *((torch.ones(shape, dtype=torch.bool),) for shape in ((), (0, 3))),
    ],
    ids=repr,
)
def test_client_state_comes_back(value):
    assert repr(decode(json.loads(json.dumps(encode(value, "w"))))) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(MAX_NUMEL + 1), torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()],
    ids=["large", "complex", "sparse"],
)
def test_tensor_that_a_checkpoint_does_not_keep_is_named_by_its_path(tensor):
    with pytest.raises(CheckpointError, match=r"state\.best\[1\] is a tensor of shape .* real, de"):
        encode({"best": [0, tensor]}, "state")


def test_export_is_read_by_safetensors_and_full_state_dict_by_the_model(tmp_path):
    engine = _build(3, dtype="bf16")
    train_steps(engine, 0, 2)
    engine.export_safetensors(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    full = engine.full_state_dict()
    assert full["head.weight"] is full["embed.weight"]
    del full["head.weight"]
    assert_same(saved, full)
    make_model().load_state_dict(_values(engine))
    assert saved["embed.weight"].dtype == torch.bfloat16
    for path in engine.save_checkpoint(tmp_path / "saved").iterdir():
        # A checkpoint has JSON and safetensors files only, no pickle.
        json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)


def test_a_large_export_is_split_and_one_without_room_leaves_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_core.checkpoint.safetensors_files.MAX_FILE_BYTES", 3000)
    engine = _build()
    failed = pytest.raises(CheckpointError, match=r"export failed on rank 0.*part-\d.tmp")
    with files_up_to(2000), failed:
        engine.export_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="names a file: give its folder"):
        engine.export_safetensors(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    engine.export_safetensors(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    full = engine.full_state_dict()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], full[name])
    monkeypatch.undo()
    (tmp_path / "model_best.safetensors").touch()  # does not belong to an export, so it stays
    engine.export_safetensors(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "model_best.safetensors"}


def test_an_export_that_one_rank_cannot_gather_ends_with_that_ranks_error(tmp_path):
    def fail():
        raise OSError("the disk under rank 1 is gone")

    def export(ranks):
        engine = _build(3, ranks)
        if ranks.rank == 1:
            engine.sharded_state.params[-1].source.read = fail
        engine.export_safetensors(tmp_path)

    with pytest.raises(OSError, match="the disk under rank 1 is gone"):
        simulate(export, 2)


@on_ranks(2)
def test_gradients_are_there_between_backward_and_step(ranks):
    engine = _build(3, ranks)
    with pytest.raises(ValueError, match="rank = 7: expected a rank below 2"):
        engine.full_state_dict(rank=7)
    assert engine.states.has_gradient() is False
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    assert engine.states.has_gradient() is True
    engine.step()
    assert engine.states.has_gradient() is False


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_without_elements_are_read(tmp_path, world_size):
    def save(ranks):
        model = nn.Linear(3, 3)
        model.register_parameter("low", nn.Parameter(torch.empty(0).half(), requires_grad=False))
        model.register_parameter("last", nn.Parameter(torch.empty(0, 3)))
        engine = Case(3).build(ranks, model)
        engine.save_checkpoint(tmp_path)

    simulate(save, world_size)
    by_name = {w.names[0]: w.value for w in read_weights(tmp_path)}
    shapes = {name: tuple(value.shape) for name, value in by_name.items()}
    assert shapes == {"weight": (3, 3), "bias": (3,), "last": (0, 3), "low": (0,)}
    assert by_name["low"].dtype is torch.float16


def _check_parts(ranks, folder):
    first = _build(3, ranks, **WARM_UP)
    train_steps(first, 0, 3)
    first.save_checkpoint(folder, "whole")
    first.save_checkpoint(folder, "light", has_frozen=False, is_latest=False)
    expected = _values(first)
    moments = {}
    for without in ((), ("optimizer",), ("lr_scheduler",), ("progress",), ("rng",), WEIGHTS_ALONE):
        engine = _build(2, ranks, **WARM_UP)
        train_steps(engine, 0, 1)
        rate = _rate(engine)
        place, _ = engine.load_checkpoint(folder, without=without)
        assert place.name == "whole"
        assert_same(_values(engine), expected)
        assert engine.global_steps == (1 if "progress" in without else 3)
        assert rate != _rate(first)
        assert _rate(engine) == (rate if without == WEIGHTS_ALONE else _rate(first))
        assert engine.lr_scheduler is not None
        count = engine.lr_scheduler.state_dict()["last_batch_iteration"]
        assert count == (0 if "lr_scheduler" in without else 2)
        moments[without] = engine.states.get_full("embed.weight", "exp_avg")
        engine.close()
    assert torch.equal(moments[()], moments[("progress",)])
    assert not torch.equal(moments[()], moments[("optimizer",)])
    engine = _build(1, ranks)
    with pytest.raises(CheckpointError, match="without the values of frozen parameters"):
        engine.load_checkpoint(folder, "light")
    with pytest.raises(CheckpointError, match="a checkpoint's parts are"):
        engine.load_checkpoint(folder, without=("everything",))
    own = {n: v for n, v in _values(engine).items() if n.startswith("frozen")}
    engine.load_checkpoint(folder, "light", without=("frozen",))
    assert_same(_values(engine), expected | own)


def test_load_leaves_out_parts_when_asked(tmp_path):
    simulate(_check_parts, 2, tmp_path)
    assert (tmp_path / "latest").read_text() == "whole"
    by_name = {n: w for w in read_weights(tmp_path) for n in w.names}
    assert by_name["head.weight"].value is by_name["embed.weight"].value
    assert not by_name["frozen.0.up.weight"].is_trainable
    light = {n for w in read_weights(tmp_path, "light") for n in w.names}
    assert {n for n in by_name if not n.startswith("frozen")} == light


@on_ranks(2)
def test_weights_alone_go_to_another_optimizer_other_frozen_parameters_and_an_evaluation(
    ranks, tmp_path
):
    first = _build(3, ranks, **WARM_UP)
    train_steps(first, 0, 2)
    first.save_checkpoint(tmp_path)
    expected = _values(first)
    other = _build(2, ranks, optimizer=LION, **WARM_UP)
    with pytest.raises(CheckpointError, match=r'same optimizer; load without=\("optimizer", "lr'):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, without=WEIGHTS_ALONE)
    assert_same(_values(other), expected)
    model = make_model()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("frozen"))
    tuned = Case(3).build(ranks, model)
    tuned.load_checkpoint(tmp_path, without=WEIGHTS_ALONE)
    assert_same(_values(tuned), expected)
    for stage, dtype in ((0, "fp32"), (3, "bf16")):
        evaluated = Case(stage, dtype).build(ranks, is_training=False)
        state = torch.get_rng_state()
        evaluated.load_checkpoint(tmp_path)
        assert torch.equal(torch.get_rng_state(), state)
        rounded = first.full_state_dict(dtype=evaluated.layout.params[0].dtype)
        assert_same(evaluated.full_state_dict(), rounded)
        loss = evaluated(**batch(0, 0, ranks.rank))["loss"]
        if dtype == "fp32":
            with torch.no_grad():
                assert torch.equal(loss, first(**batch(0, 0, ranks.rank))["loss"])


def _build_with(make_optimizer, make_schedule):
    model = make_model()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    schedule = make_schedule(optimizer)
    return Case().build(model=model, optimizer=optimizer, lr_scheduler=schedule)


def _rewrite_schedule(folder, state):
    rewrite(folder / "step-3", lambda content: content["progress"].update(lr_scheduler=state))


_STEPS = {"step_size": 2, "gamma": 0.1, "base_lrs": [1e-2], "last_epoch": 3}
"""A state of torch's StepLR."""


@pytest.mark.parametrize(
    ("make_schedule", "saved"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=10), {"num_bad_epochs": 0}),
        (lambda o: StepLR(o, 2), {"num_bad_epochs": 0}),
        (lambda o: StepLR(o, 2), {**_STEPS, "base_lrs": [1e-2, 1e-3]}),
        (lambda o: LambdaLR(o, lambda step: 1 / (step + 1)), _STEPS),
        (lambda o: SequentialLR(o, [StepLR(o, 3), StepLR(o, 5)], [4]), _STEPS),
        (
            lambda o: SequentialLR(o, [StepLR(o, 3), CosineAnnealingLR(o, 5)], [4]),
            {"last_epoch": 3, "_schedulers": [_STEPS, _STEPS]},
        ),
    ],
    ids=["warm-up", "steps", "groups", "lambda", "parts", "within-parts"],
)
def test_schedule_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, make_schedule, saved
):
    def adamw(params):
        return torch.optim.AdamW(params, lr=1e-2)

    first = _build_with(adamw, lambda o: WarmupLR(o, warmup_num_steps=10))
    train_steps(first, 0, 3)
    first.save_checkpoint(tmp_path)
    _rewrite_schedule(tmp_path, saved)
    second = _build_with(adamw, make_schedule)
    before = _values(second)
    with pytest.raises(CheckpointError, match=r'without=\("lr_scheduler",\)'):
        second.load_checkpoint(tmp_path)
    assert second.global_steps == 0
    assert_same(_values(second), before)
    second.load_checkpoint(tmp_path, without=("lr_scheduler",))
    assert second.global_steps == 3


@pytest.mark.parametrize("without", [(), ("optimizer",)])
@pytest.mark.parametrize(
    "scheduler",
    [WARM_UP["scheduler"], {"type": "CosineAnnealingLR", "params": {"T_max": 12}}],
    ids=lambda scheduler: scheduler["type"],
)
def test_schedule_continues_when_the_optimizer_starts_anew(tmp_path, scheduler, without):
    straight = _build(scheduler=scheduler)
    train_steps(straight, 0, 3)
    straight.save_checkpoint(tmp_path)
    if scheduler["type"] == "WarmupLR" and without:  # the state format of torch's LambdaLR
        form = {"base_lrs": [1e-2], "last_epoch": 3, "_step_count": 4, "lr_lambdas": [None]}
        _rewrite_schedule(tmp_path, form)
    resumed = _build(scheduler=scheduler, **({"optimizer": LION} if without else {}))
    resumed.load_checkpoint(tmp_path, without=without)
    for step in range(3, 6):
        groups = [engine.optimizer.param_groups[0] for engine in (straight, resumed)]
        assert groups[1]["lr"] == groups[0]["lr"]
        assert without or groups[1]["betas"] == groups[0]["betas"]
        for engine in (straight, resumed):
            train_steps(engine, step, step + 1)


def test_a_schedule_that_only_the_checkpoint_or_the_engine_has_is_logged(tmp_path, caplog):
    engines = [_build(), _build(**WARM_UP)]
    for number, told in ((0, "stays where it is: none was saved"), (1, "the engine has none")):
        place = tmp_path / str(number)
        engines[number].save_checkpoint(place)
        for loading in engines:
            loading.load_checkpoint(place)
        (line,) = caplog.messages  # only the engine that differs from the saved one warns
        assert told in line
        assert line.endswith("load without the schedule"), "front ends name arguments otherwise"
        caplog.clear()
        engines[1 - number].load_checkpoint(place, without=("lr_scheduler",))
        assert not caplog.messages


def test_a_rate_that_is_a_tensor_stays_the_object_that_a_captured_graph_reads():
    rate = torch.tensor(0.5)
    config = zero_core.load_config(Case().config(), world_size=1)
    train = TrainState(config, [{"params": [], "lr": rate}], None, rank=0)
    saved = json.loads(json.dumps(encode(train.state_dict(), "state")))
    rate.fill_(0.25)
    train.load_state_dict(decode(saved))
    assert train.hyperparameters()[0]["lr"] is rate
    assert rate.item() == 0.5
