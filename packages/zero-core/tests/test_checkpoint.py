"""Checkpoints: written at any stage and world size, read at any other; a save may die."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.json_values import MAX_NUMEL, decode, encode
from zero_core.checkpoint.load import read_client_state
from zero_core.testing import (
    Case,
    Hard,
    SimulatedRanks,
    batch,
    make_model,
    run_on_processes,
    simulate,
)


def _train(engine: zero_core.Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(**batch(step, 0, engine.rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _build(
    stage: int, dtype: str = "fp32", process_group: SimulatedRanks | None = None, **keys: object
) -> zero_core.Engine:
    config = {**Case(stage=stage, dtype=dtype).config(), **keys}
    return zero_core.build(make_model(), config, process_group=process_group)


def _everything(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    """Master weights and moments of every trainable parameter, whole."""
    state = engine.sharded_state
    found = {}
    for segment in state.layout.segments:
        if not segment.is_trainable:
            continue
        for name in ("master_weight", "exp_avg", "exp_avg_sq"):
            full = state.control.gather(state.own_state(segment.index, name))
            for slot in segment.slots:
                key = f"{name}/{state.layout.params[slot.param].name}"
                found[key] = full[slot.start : slot.stop].clone()
    return found


def _save(ranks: SimulatedRanks, folder: str, stage: int, dtype: str) -> None:
    engine = _build(stage, dtype, process_group=ranks)
    _train(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    kept = _everything(engine)
    if ranks.rank == 0:
        torch.save(kept, Path(folder) / "kept.pt")


def _load(ranks: SimulatedRanks, folder: str, stage: int, dtype: str) -> None:
    engine = _build(stage, dtype, process_group=ranks)
    _train(engine, 5, 6)  # whatever was there is replaced
    place, client_state = engine.load_checkpoint(folder)
    assert place == Path(folder) / "step-3"
    assert client_state == read_client_state(Path(folder)) == {"epoch": 7}
    assert engine.global_steps == 3
    kept = torch.load(Path(folder) / "kept.pt", weights_only=True)
    found = _everything(engine)
    assert kept.keys() == found.keys()
    for key, value in kept.items():
        assert torch.equal(found[key], value), key
    full = engine.full_state_dict(dtype=torch.float32)
    assert torch.equal(full["embed.weight"].flatten(), kept["master_weight/embed.weight"])
    _train(engine, 3, 4)


@pytest.mark.parametrize(
    ("saved", "loaded", "dtype"),
    [
        ((3, 2), (0, 1), "fp32"),
        ((0, 1), (3, 3), "fp32"),
        ((1, 3), (2, 2), "bf16"),
        ((3, 3), (1, 2), "bf16"),
    ],
)
def test_a_checkpoint_loads_at_another_stage_and_world_size(tmp_path, saved, loaded, dtype):
    simulate(_save, saved[1], str(tmp_path), saved[0], dtype)
    simulate(_load, loaded[1], str(tmp_path), loaded[0], dtype)


def _save_apart(ranks: SimulatedRanks, folder: str) -> None:
    engine = _build(3, process_group=ranks)
    _train(engine, 0, 3)
    # Two ranks share a folder, as on a machine, and the third has its own.
    own = Path(folder) / f"machine-{ranks.rank // 2}"
    engine.save_checkpoint(own, client_state={"epoch": 7})
    assert not list(own.glob(".*"))
    kept = _everything(engine)
    if ranks.rank == 0:
        torch.save(kept, Path(folder) / "kept.pt")


def test_parts_that_ranks_saved_to_folders_of_their_own_are_a_checkpoint_together(tmp_path):
    simulate(_save_apart, 3, str(tmp_path))
    for part in sorted(tmp_path.glob("machine-*")):
        shutil.copytree(part, tmp_path, dirs_exist_ok=True)
    simulate(_load, 2, str(tmp_path), 0, "fp32")


def _resume(ranks: SimulatedRanks, folder: str, stage: int) -> None:
    straight = _build(stage, process_group=ranks)
    expected = _train(straight, 0, 6)
    first = _build(stage, process_group=ranks)
    _train(first, 0, 3)
    first.save_checkpoint(folder)
    resumed = _build(stage, process_group=ranks)
    resumed.load_checkpoint(folder)
    assert _train(resumed, 3, 6) == expected[3:]
    ours, theirs = resumed.full_state_dict(), straight.full_state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_continues_bit_identically(tmp_path, stage):
    simulate(_resume, 3, str(tmp_path / "simulated"), stage)
    run_on_processes(_resume, 2, str(tmp_path / "processes"), stage)


def test_a_save_that_dies_leaves_the_previous_checkpoint_whole(tmp_path, monkeypatch):
    engine = _build(0)
    _train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="first")
    before = engine.full_state_dict()
    _train(engine, 1, 2)

    def die(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("zero_core.checkpoint.save.make_header", die)
    with pytest.raises(CheckpointError, match=r"rank 0: .*No space left"):
        engine.save_checkpoint(tmp_path, tag="second")
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest"]
    other = _build(0)
    assert other.load_checkpoint(tmp_path)[0] == tmp_path / "first"
    after = other.full_state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    engine.save_checkpoint(tmp_path, tag="second")  # and the next save works


def test_a_save_killed_between_its_renames_is_still_found(tmp_path):
    engine = _build(0)
    engine.save_checkpoint(tmp_path, tag="one")
    (tmp_path / "one").rename(tmp_path / ".one.old")
    assert _build(0).load_checkpoint(tmp_path)[0] == tmp_path / ".one.old"


def test_saving_a_tag_again_replaces_it(tmp_path):
    engine = _build(0)
    engine.save_checkpoint(tmp_path, tag="same")
    _train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="same")
    other = _build(0)
    other.load_checkpoint(tmp_path, "same")
    assert other.global_steps == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "same"]


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damaged_bytes_are_refused(tmp_path, how):
    engine = _build(0)
    _train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    victim = tmp_path / "t" / "exp_avg-00000.safetensors"
    data = bytearray(victim.read_bytes())
    if how == "flipped":
        data[-5] ^= 1
        victim.write_bytes(data)
    elif how == "truncated":
        victim.write_bytes(data[:-8])
    else:
        victim.unlink()
    with pytest.raises(CheckpointCorruptError, match="exp_avg-00000"):
        _build(0).load_checkpoint(tmp_path)


def test_a_broken_manifest_is_refused(tmp_path):
    _build(0).save_checkpoint(tmp_path, tag="t")
    (tmp_path / "t" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointCorruptError, match="not readable"):
        _build(0).load_checkpoint(tmp_path)


def test_a_missing_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    engine = _build(0)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        engine.load_checkpoint(tmp_path, "other")


def test_a_program_that_is_started_again_resumes_what_there_is(tmp_path):
    def once(group: SimulatedRanks, num_steps: int) -> tuple[object, list[float]]:
        engine = _build(3, process_group=group)
        found = engine.resume(tmp_path)
        first = 0 if found is None else found["step"]
        losses = _train(engine, first, num_steps)
        engine.save_checkpoint(tmp_path, client_state={"step": num_steps})
        return found, losses

    begun = simulate(once, 2, 3)
    resumed = simulate(once, 2, 6)
    assert [found for found, _ in begun + resumed] == [None, None, {"step": 3}, {"step": 3}]
    shutil.rmtree(tmp_path)
    straight = simulate(once, 2, 6)
    for (_, before), (_, after), (_, whole) in zip(begun, resumed, straight, strict=True):
        assert before + after == whole


def test_a_checkpoint_that_only_some_ranks_find_is_no_fresh_start(tmp_path):
    _build(0).save_checkpoint(tmp_path / "0")

    def resume(group: SimulatedRanks) -> str:
        engine = _build(0, process_group=group)
        with pytest.raises(CheckpointError) as raised:
            engine.resume(tmp_path / str(group.rank))
        return str(raised.value)

    for message in simulate(resume, 2):
        assert "rank 1" in message
        assert "holds no checkpoint" in message


def test_another_models_checkpoint_is_refused(tmp_path):
    _build(0).save_checkpoint(tmp_path)
    torch.manual_seed(0)
    deeper = zero_core.build(Hard(depth=4), Case().config())
    with pytest.raises(CheckpointError, match="belongs to another model: it lacks"):
        deeper.load_checkpoint(tmp_path)
    wider = zero_core.build(Hard(width=13), Case().config())
    with pytest.raises(CheckpointError, match=r"parameter .* has shape"):
        wider.load_checkpoint(tmp_path)


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"client_state\.x is a object .* keeps JSON"):
        _build(0).save_checkpoint(tmp_path / "c", client_state={"x": object()})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", ["__tensor__", "__tuple__", "__counter__", "__mapping__"])
def test_client_state_may_have_the_keys_of_its_json_form(key):
    former = {"__tensor__": "int64", "shape": [1], "values": [7]}
    for value in ({key: 1}, {key: [1], "other": (2,)}, former, {0: former}):
        assert decode(json.loads(json.dumps(encode(value, "w")))) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_of_client_state_are_restored(dtype, shape):
    value = torch.randint(2, shape).to(dtype)
    (found,) = decode(json.loads(json.dumps(encode((value,), "w"))))
    assert (found.shape, found.dtype) == (shape, dtype)
    assert torch.equal(found, value)


def test_tensors_and_mappings_of_former_checkpoints_are_read():
    former = [["__tensor__", "float16"], ["shape", [1, 2]], ["values", [0.5, 2.0]]]
    found = decode({"best": {"__items__": former}, "seen": {"__items__": [[3, "three"]]}})
    assert torch.equal(found["best"], torch.tensor([[0.5, 2.0]], dtype=torch.float16))
    assert found["seen"] == {3: "three"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(MAX_NUMEL + 1),
        torch.zeros(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
    ],
    ids=["large", "complex", "sparse"],
)
def test_tensor_that_a_checkpoint_does_not_keep_is_named_by_its_path(tensor):
    with pytest.raises(
        CheckpointError, match=r"state\.best\[1\] is a tensor of shape .* real, dense"
    ):
        encode({"best": [0, tensor]}, "state")


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden", "latest"])
def test_a_tag_that_is_no_folder_name_is_refused(tmp_path, tag):
    with pytest.raises(CheckpointError, match="plain folder name"):
        _build(0).save_checkpoint(tmp_path, tag=tag)


def test_saving_within_an_accumulation_is_refused_unless_its_part_may_be_left_out(tmp_path):
    engine = _build(0, gradient_accumulation_steps=2)
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    engine.step()
    with pytest.raises(CheckpointError, match="in the middle of an accumulation"):
        engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, drops_partial=True)
    other = _build(0, gradient_accumulation_steps=2)
    other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.micro_steps) == (0, 0)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    engine = _build(0)
    _train(engine, 0, 1)
    place = engine.save_checkpoint(tmp_path)
    for path in place.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_scheduler_and_learning_rate_come_back(tmp_path):
    def make() -> zero_core.Engine:
        return _build(0, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}})

    engine = make()
    _train(engine, 0, 4)
    engine.save_checkpoint(tmp_path)
    other = make()
    other.load_checkpoint(tmp_path)
    rates = []
    for e, first in ((engine, 4), (other, 4)):
        _train(e, first, first + 2)
        rates.append(e.optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert isinstance(other.optimizer.param_groups[0]["betas"], tuple)


def test_random_state_comes_back(tmp_path):
    engine = _build(0)
    engine.save_checkpoint(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(99)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    ],
    ids=["sgd", "adagrad", "nadam", "rmsprop"],
)
def test_every_optimizers_state_comes_back(tmp_path, make_optimizer):
    def make() -> zero_core.Engine:
        model = make_model()
        trainable = [p for p in model.parameters() if p.requires_grad]
        return zero_core.build(model, Case().config(), optimizer=make_optimizer(trainable))

    engine = make()
    _train(engine, 0, 1)  # `sometimes` has not been used yet
    engine.save_checkpoint(tmp_path)
    other = make()
    _train(other, 1, 2)
    other.load_checkpoint(tmp_path)
    assert _train(engine, 1, 4) == _train(other, 1, 4)


def test_export_is_read_by_safetensors_and_full_state_dict_by_the_model(tmp_path):
    engine = _build(3, "bf16")
    _train(engine, 0, 2)
    engine.export_safetensors(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    full = engine.full_state_dict()
    assert "head.weight" not in saved  # tied: stored once
    assert full["head.weight"] is full["embed.weight"]
    assert all(torch.equal(saved[k], full[k]) for k in saved)
    fresh = make_model()
    fresh.load_state_dict(engine.full_state_dict(dtype=torch.float32))
    assert saved["embed.weight"].dtype == torch.bfloat16


def test_a_large_export_is_split_and_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_core.checkpoint.model_files.MAX_FILE_BYTES", 1500)
    engine = _build(0)
    engine.export_safetensors(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    full = engine.full_state_dict()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], full[name])


def test_an_export_that_finds_no_room_for_a_part_names_it_and_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_core.checkpoint.model_files.MAX_FILE_BYTES", 3000)
    engine = _build(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # as a full disk
    try:
        # "export failed on": every rank has come as far as that, and hears of it.
        with pytest.raises(CheckpointError, match=r"export failed on rank 0.*part-\d.tmp"):
            engine.export_safetensors(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    engine.export_safetensors(tmp_path)


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.line(x)).square().mean()


def test_buffers_come_back(tmp_path):
    engine = zero_core.build(_WithBuffer(), Case().config())
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    other = zero_core.build(_WithBuffer(), Case().config())
    other.load_checkpoint(tmp_path)
    assert torch.equal(other.module.norm.running_mean, engine.module.norm.running_mean)
    assert int(other.module.norm.num_batches_tracked) == 1
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("name", "saved", "own", "message"),
    [
        ("extra", 3, None, r"lacks the buffers \[\] and has \['extra'\]"),
        ("extra", None, 3, r"lacks the buffers \['extra'\] and has \[\]"),
        ("extra", 3, 4, r"buffer extra has shape \(3,\) there and \(4,\) in the model"),
    ],
)
def test_buffers_that_do_not_match_are_refused_before_anything_is_written(
    tmp_path, name, saved, own, message
):
    engines = []
    for numel, bias in ((saved, 1.0), (own, 2.0)):
        model = nn.Linear(3, 3)
        nn.init.constant_(model.bias, bias)
        if numel is not None:
            model.register_buffer(name, torch.ones(numel))
        engines.append(zero_core.build(model, Case().config()))
    engines[0].save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        engines[1].load_checkpoint(tmp_path)
    assert engines[1].full_state_dict()["bias"].tolist() == [2.0] * 3
