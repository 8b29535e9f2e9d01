"""Checkpoints and whole models of the DeepSpeed stand-in."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from tests.support.facade import NO_PERSISTENCE, config, make, on_ranks
from zero_core import CheckpointError
from zero_core.testing import assert_same, spawn, train
from zero_engine import deepspeed
from zero_engine.deepspeed.checkpoint import clone_tensors_for_torch_save
from zero_engine.deepspeed.utils import zero_to_fp32
from zero_engine.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint


class _Model(nn.Module):
    seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.numel()
        y: Tensor = self.head(self.frozen(self.embed(ids)))
        return y.square().mean()


class _Average:
    """A user's schedule, which stores an average as a tensor."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2)

    def step(self) -> None:
        self.mean = 0.5 * self.mean + 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def _engine(stage: int, seed: int = 0, mpu: Any = None, **more: Any) -> Any:
    schedule = None if "scheduler" in more else lambda o: StepLR(o, 2, gamma=0.5)
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 1.0}
    settings = config(stage, **sizes, **more)
    return make(_Model(seed), config=settings, lr_scheduler=schedule, mpu=mpu)


def _train(engine: Any, steps: range) -> list[float]:
    seeds = [10 * step + engine.global_rank for step in steps]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return train(engine, [torch.randint(0, 7, (3,), generator=g) for g in generators])


def _go_on(rank: int, world_size: int, folder: str) -> None:
    for stage in (1, 3):
        place = Path(folder, f"goes on {stage}")
        first = _engine(stage)
        _train(first, range(3))
        assert first.save_checkpoint(place, client_state={"epoch": 2}) is True
        expected = _train(first, range(3, 6))
        first.destroy()
        other = _engine((stage + 1) % 4, seed=1)
        found, client_state = other.load_checkpoint(place)
        assert Path(found) == place / "global_step3"
        assert client_state == {"epoch": 2}
        assert (other.global_steps, other.global_samples) == (3, 9 * world_size)
        assert _train(other, range(3, 6)) == pytest.approx(expected, rel=1e-6)
        assert other.get_lr() == first.get_lr()
        other.destroy()


def _save(rank: int, world_size: int, folder: str) -> None:
    for mode in ("FAIL", "Ignore"):
        engine = _engine(0, checkpoint={"tag_validation": mode})
        if mode == "FAIL":
            with pytest.raises(AssertionError, match="under different tags"):
                engine.save_checkpoint(f"{folder}/tags", tag=f"of_rank_{rank}")
        else:
            engine.save_checkpoint(f"{folder}/tags", tag=f"of_rank_{rank}")
            assert engine.load_checkpoint(f"{folder}/tags")[0] == f"{folder}/tags/of_rank_0"
        engine.destroy()
    engine = _engine(3)
    _train(engine, range(2))
    engine.save_checkpoint(folder, tag=f"of_rank_{rank}")  # rank 0's tag wins
    assert Path(folder, "latest").read_text() == "of_rank_0"
    engine.destroy()


def _load(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(3, seed=1)
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {}
    expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert_same(dict(expected), engine.core.full_state_dict())
    engine.destroy()
    if world_size == 3:
        _save_on_some_ranks(rank, folder)


def _save_on_some_ranks(rank: int, folder: str) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        engine = _engine(1, mpu=SimpleNamespace(get_data_parallel_group=lambda: group))
        engine.save_checkpoint(f"{folder}/some", tag=f"of_rank_{rank}")
        assert engine.load_checkpoint(f"{folder}/some")[0] == f"{folder}/some/of_rank_0"
        engine.destroy()


def test_checkpoint_of_two_ranks_loads_on_one_and_on_three(tmp_path: Path) -> None:
    spawn(_save, 2, str(tmp_path))
    on_ranks(1, [_load], str(tmp_path))
    spawn(_load, 3, str(tmp_path))


def test_tag_and_latest_are_deepspeeds(tmp_path: Path) -> None:
    engine = _engine(2)
    _train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "global_step2"
    engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "7").is_dir()
    engine.save_checkpoint(tmp_path, "pytorch_model")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "pytorch_model")
    assert engine.load_checkpoint(tmp_path, tag=7)[0] == str(tmp_path / "7")


def test_load_without_latest_and_save_without_a_key_do_nothing(tmp_path: Path) -> None:
    engine = _engine(3)
    assert engine.save_16bit_model(tmp_path) is False, "nothing asks to gather"
    assert not list(tmp_path.iterdir())
    before = engine.core.full_state_dict()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert_same(engine.core.full_state_dict(), before)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        engine.load_checkpoint(tmp_path, tag="absent")
    for nowhere in ("", None):
        with pytest.raises(ValueError, match="needs a directory"):
            engine.save_checkpoint(nowhere)
    for refused in (engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError, match="is a URL"):
            refused("memory://run")


def test_small_tensors_of_client_state_and_scheduler_come_back(tmp_path: Path) -> None:
    state = {"best": torch.tensor(0.1, dtype=torch.float64)}
    engine, other = _engine(1), _engine(1)
    engine.core.lr_scheduler, other.core.lr_scheduler = _Average(), _Average()
    _train(engine, range(2))
    engine.save_checkpoint(tmp_path, client_state=state)
    _, found = other.load_checkpoint(tmp_path)
    assert_same(found, state)
    assert_same(other.lr_scheduler.mean, torch.full((2,), 1.5))
    assert isinstance(engine.lr_scheduler, _Average)


def _save_within_a_step(rank: int, world_size: int, folder: str) -> None:
    accumulation = {"gradient_accumulation_steps": 2}
    for stage in (0, 3):
        place = f"{folder}/within {stage}"
        expected, engine = (_engine(stage, **accumulation) for _ in range(2))
        losses = _train(expected, range(6))
        found = _train(engine, range(3))
        engine.save_checkpoint(place)
        other = _engine(stage, seed=1, **accumulation)
        other.load_checkpoint(place)
        assert (other.global_steps, other.micro_steps) == (1, 2)
        # The first engine continues. The other repeats the interrupted accumulation.
        assert found + _train(engine, range(3, 6)) == losses
        assert _train(other, range(2, 6)) == losses[2:]
        for made in (expected, engine, other):
            made.destroy()


def test_checkpoint_within_an_accumulation_warns_once(tmp_path, caplog):
    engine = _engine(2, gradient_accumulation_steps=4)
    _train(engine, range(4))
    engine.save_checkpoint(tmp_path)
    assert not caplog.records
    _train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    assert caplog.text.count("after step 1 and in the middle of the next one") == 1
    with pytest.raises(CheckpointError, match="in the middle of an accumulation"):
        engine.core.save_checkpoint(tmp_path)
    engine.destroy()
    engine = _engine(1, gradient_accumulation_steps=2)  # accelerate calls step() only at boundaries
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(torch.arange(3)))
    engine.save_checkpoint(tmp_path)
    assert "after step 0 and in the middle of the next one" in caplog.text


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
)
def test_checkpoint_of_deepspeed_itself_is_told_with_the_way_over(name, tmp_path):
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / name).write_bytes(b"")
    (tmp_path / "latest").write_text("global_step3")
    engine = _engine(2)
    match = f"written by DeepSpeed itself .it holds {name}.*zero-engine import.*from_deepspeed"
    for tag in (None, "global_step3"):
        with pytest.raises(CheckpointError, match=match):
            engine.load_checkpoint(tmp_path, tag)
        with pytest.raises(CheckpointError, match=match):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag)


def _saved(folder: Path, **options: Any) -> dict[str, Tensor]:
    engine = _engine(3)
    _train(engine, range(3))
    engine.save_checkpoint(folder, **options)
    values = engine.core.full_state_dict()
    engine.destroy()
    return values


@pytest.mark.parametrize(
    ("option", "steps", "rate", "epoch"),
    [
        ({"load_module_only": True}, 1, 1e-2, 1),
        ({"load_optimizer_states": False}, 3, 5e-3, 3),
        ({"load_lr_scheduler_states": False}, 3, 5e-3, 1),
    ],
    ids=str,
)
def test_part_that_is_left_out_stays_as_it_was(option, steps, rate, epoch, tmp_path):
    expected = _saved(tmp_path)
    engine = _engine(3, seed=1)
    _train(engine, range(1))
    weight = engine.module.embed.weight
    moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    drawn = torch.random.get_rng_state()
    engine.load_checkpoint(tmp_path, **option)
    assert torch.equal(torch.random.get_rng_state(), drawn)  # never loaded, as by DeepSpeed
    assert_same(engine.core.full_state_dict(), expected)
    found = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert torch.equal(found, moment) == ("load_lr_scheduler_states" not in option)
    assert (engine.global_steps, engine.get_lr()) == (steps, [rate])
    assert engine.lr_scheduler.last_epoch == epoch


@pytest.mark.parametrize("kind", ["WarmupLR", "StepLR"])
def test_schedule_that_does_not_fit_is_refused_with_deepspeeds_advice(kind, tmp_path):
    first = _engine(0)
    first.core.lr_scheduler = _Average()
    first.save_checkpoint(tmp_path)
    first.destroy()
    params = {"step_size": 2} if kind == "StepLR" else {"warmup_num_steps": 10}
    engine = _engine(0, scheduler={"type": kind, "params": params})
    _train(engine, range(1))
    with pytest.raises(CheckpointError, match=f"{kind} needs.*load load_lr_scheduler_states=False"):
        engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.global_steps == 0
    engine.destroy()
    other = _engine(0, optimizer={"type": "Lion", "params": {"lr": 1e-2}})
    with pytest.raises(CheckpointError, match="load load_module_only=True for the weights alone"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_module_only=True)
    other.destroy()


def _without_an_optimizer(rank: int, world_size: int, folder: str) -> None:
    """Check that a checkpoint of an engine without an optimizer contains the engine's weights."""
    for stage in (0, 3):
        settings = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
        teacher, other = (make(_Model(seed), config=settings) for seed in (0, 1))
        tag = f"teacher{stage}"
        assert teacher.save_checkpoint(folder, tag, {"epoch": 3})
        student = _engine(stage, seed=2)
        for engine, options in ((other, {}), (student, {"load_module_only": True})):
            found = engine.load_checkpoint(folder, **options)
            assert found == (str(Path(folder, tag)), {"epoch": 3})
            assert_same(engine.core.full_state_dict(), dict(_Model(0).state_dict()))
            engine.destroy()
        teacher.destroy()


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    expected = _saved(tmp_path, exclude_frozen_parameters=True)
    assert not list((tmp_path / "global_step3").glob("value-*"))
    engine = _engine(2, seed=1)
    own = engine.module.frozen.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"values of frozen .*load_module_strict=False"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_module_strict=False)[0] is not None
    found = engine.core.full_state_dict()
    assert torch.equal(found["frozen.weight"], own)
    assert torch.equal(found["embed.weight"], expected["embed.weight"])
    assert "frozen.weight" not in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def _consolidate(rank: int, world_size: int, folder: str) -> None:
    for stage, is_excluded in ((1, False), (3, True)):
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        engine = _engine(stage, bf16={"enabled": True}, zero_optimization=zero)
        _train(engine, range(1))
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=is_excluded)
        assert (state is None) == (rank != 0)
        with engine.core.gathered():
            expected = {k: v.clone() for k, v in engine.module.state_dict().items()}
        if is_excluded:
            del expected["frozen.weight"], expected["frozen.bias"]
        name = "weights.safetensors" if is_excluded else "pytorch_model.bin"
        assert engine.save_16bit_model(folder, name, exclude_frozen_parameters=is_excluded)
        if state is not None:
            assert state.keys() == expected.keys()
            assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
            path = Path(folder, name)
            saved = load_file(path) if is_excluded else torch.load(path, weights_only=True)
            for key, value in expected.items():
                assert torch.equal(state[key], value), key
                assert key in ("embed.weight", "head.weight") or torch.equal(saved[key], value)
        engine.destroy()


def _from_a_state_dict(rank: int, world_size: int, folder: str) -> None:
    engine, other = _engine(3, seed=rank), _Model(7)
    engine.load_module_state_dict({"module": other.state_dict()})
    assert_same(engine.core.full_state_dict(), dict(other.state_dict()))
    engine.destroy()


ON_TWO_RANKS = [_save_within_a_step, _without_an_optimizer, _consolidate, _from_a_state_dict]


@pytest.mark.parametrize(("world_size", "further"), [(1, []), (2, ON_TWO_RANKS)])
def test_training_goes_on_and_models_become_whole_at_any_stage(world_size, further, tmp_path):
    on_ranks(world_size, [_go_on, *further], str(tmp_path))


@pytest.mark.slow
def test_fp32_program_writes_files_of_the_size_asked_for(tmp_path: Path) -> None:
    expected = _saved(tmp_path / "saved")
    folders = [str(tmp_path / "saved"), str(tmp_path / "out")]
    program = [sys.executable, "zero_to_fp32.py", ".", folders[1], "--safe_serialization"]
    subprocess.run(program, check=True, timeout=600, cwd=folders[0])
    whole = load_file(tmp_path / "out" / "model.safetensors")
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        *folders, max_shard_size=80, safe_serialization=True, dtype="bfloat16"
    )
    parts = [load_file(p) for p in (tmp_path / "out").glob("model-*.safetensors")]
    merged = {name: value for part in parts for name, value in part.items()}
    assert len(parts) > 1
    for name, value in whole.items():
        assert torch.equal(value, expected[name])
        is_float = value.is_floating_point()
        assert torch.equal(merged[name], value.bfloat16() if is_float else value)


def test_clones_do_not_share_their_buffer() -> None:
    flat = torch.arange(100.0)
    found = clone_tensors_for_torch_save({"a": [flat[:2]], "b": (flat[2:4], "text")})
    assert found["a"][0].untyped_storage().nbytes() == 8
    assert found["b"][1] == "text"
    assert torch.equal(found["b"][0], flat[2:4])


@contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield told
    logging.getLogger(name).removeHandler(handler)


def _read_whole(rank: int, world_size: int, folder: str) -> None:
    for stage in (2, 3):
        engine = _engine(stage, zero_optimization={"stage": stage, **NO_PERSISTENCE})
        expected, module = engine.core.full_state_dict(), engine.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            assert_same(dict(module.state_dict()), expected)
            assert module.frozen.state_dict(prefix="frozen.").keys() <= expected.keys()
        with _logged("zero_core") as told:
            found = module.state_dict()
        if stage < 3 or world_size == 1:
            assert_same(dict(found), expected)
        else:  # as in DeepSpeed, tensors are empty. OpenRLHF reads their names on rank 0.
            assert {name: v.numel() for name, v in found.items() if name != "seen"} == {
                name: 0 for name in expected if name != "seen"
            }
            assert len(told) == (rank == 0)
            for line in told:
                assert "embed.weight" in line
                assert "state_dict=accelerator.get_state_dict(model)" in line
        engine.destroy()


def _load_whole(rank: int, world_size: int, folder: str) -> None:
    for stage in (1, 3):
        place = Path(folder, f"checkpoint-{stage}")
        engine = _engine(stage, zero_optimization={"stage": stage, **NO_PERSISTENCE})
        _train(engine, range(1))
        expected, model = engine.core.full_state_dict(), engine.module
        engine.save_checkpoint(place)
        zeros = [f"zero_pp_rank_{r}_mp_rank_00_" for r in range(world_size)]
        names = {f"{zero}optim_states.pt" for zero in zeros}
        names |= {f"{zero}model_states.pt" for zero in (zeros if stage == 3 else ["mp_rank_00_"])}
        files = list((place / "global_step1").glob("*.pt"))
        assert {path.name for path in files} == names
        assert {json.loads(path.read_text())["values"] for path in files} == {"manifest.json"}
        if stage == 3:
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                load_state_dict_from_zero_checkpoint(model, place)
                assert_same(dict(model.state_dict()), expected)
            _train(engine, range(1, 2))
        assert load_state_dict_from_zero_checkpoint(model, place) is model
        assert_same(dict(model.state_dict()), expected)
        with pytest.raises(RuntimeError, match="engine that was ended"):
            engine.step()
        assert {p.grad is None for p in model.parameters()} == {True}
        model(torch.arange(3)).backward()
        assert model.embed.weight.grad is not None
    with pytest.raises(CheckpointError, match="give the model whose engine saved it"):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), place)
    model.extra = torch.nn.Linear(2, 2)
    with _logged("zero_engine") as told:
        load_state_dict_from_zero_checkpoint(model, place)
    assert ["extra.weight, extra.bias" in line for line in told] == [True]
    with deepspeed.zero.Init():
        other = _Model(3)
    load_state_dict_from_zero_checkpoint(other, place)
    assert_same(dict(other.state_dict()), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_scripts_read_whole_models_and_load_them_without_the_engine(world_size, tmp_path):
    on_ranks(world_size, [_read_whole, _load_whole], str(tmp_path))
