"""Extensions passed to build(), with `WeightAverage` as the example."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_core
from zero_core import CheckpointError, ConfigError, RankMismatchError, extensions
from zero_core.core.extension import Extension
from zero_core.extensions.weight_average import AVERAGE, WeightAverage
from zero_core.testing.models import batch, make_model
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import adamw, assert_same, step_ddp, train_steps

DECAY = 0.9
NAMES = ("embed.weight", "gain", "blocks.0.up.weight", "blocks.1.side.bias", "sometimes", "never")


def _build(ranks, **case):
    average = WeightAverage(DECAY)
    return Case(**case).build(ranks, extensions=[average])


def _averages(engine):
    return {name: engine.states.get_full(name, AVERAGE) for name in NAMES}


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_average_is_that_of_torch_beside_ddp_at_every_stage(ranks):
    model = make_model()
    ddp = SimulatedDDP(model, ranks)
    optimizer = adamw(model)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    reference.update_parameters(model)
    for step in range(3):
        step_ddp(ddp, optimizer, batch(step, 0, ranks.rank))
        reference.update_parameters(model)
    params = dict(reference.module.named_parameters())
    for stage in range(4):
        engine = _build(ranks, stage=stage)
        train_steps(engine, 0, 3)
        for name, found in _averages(engine).items():
            # DDP sums three ranks' gradients in another order
            rtol, atol = (0.0, 0.0) if ranks.size == 2 else (1e-4, 1e-6)
            torch.testing.assert_close(found, params[name].detach(), rtol=rtol, atol=atol)


def test_average_of_master_weights_ignores_a_step_that_is_skipped():
    engine = _build(None, dtype="bf16", stage=2)
    train_steps(engine, 0, 1)
    before = _averages(engine)
    engine.backward(engine(**batch(1, 0, 0))["loss"] * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert_same(_averages(engine), before)


def test_checkpoint_of_other_extensions_is_refused_and_may_be_loaded_without(tmp_path):
    plain = Case().build()
    train_steps(plain, 0, 1)
    plain.save_checkpoint(tmp_path, "plain")
    averaged = _build(None)
    with pytest.raises(CheckpointError, match=r"lacks extension\.average.*without=\('exte"):
        averaged.load_checkpoint(tmp_path, "plain")
    averaged.load_checkpoint(tmp_path, "plain", without=(AVERAGE,))
    loaded = {name: plain.states.get_full(name) for name in NAMES}
    assert_same(_averages(averaged), loaded)  # the average restarts from the loaded values
    train_steps(averaged, 1, 2)
    averaged.save_checkpoint(tmp_path, "averaged")
    assert zero_core.verify_checkpoint(tmp_path, "averaged") > 0
    with pytest.raises(CheckpointError, match=r"has extension\.average"):
        plain.load_checkpoint(tmp_path, "averaged")
    plain.load_checkpoint(tmp_path, "averaged", without=(AVERAGE,))
    averaged.load_checkpoint(tmp_path, "plain", without=("optimizer", "progress"))
    assert_same(_averages(averaged), loaded)


def test_memory_checkpoint_has_the_average_of_its_step(tmp_path):
    memory = {"memory_checkpoint": {"every": 1, "path": str(tmp_path / "memory")}}
    engine = _build(None, top=memory)
    engine.resume(tmp_path)
    train_steps(engine, 0, 2)
    expected = _averages(engine)
    engine.close()
    engine = _build(None, top=memory)
    assert engine.resume(tmp_path) is not None
    assert engine.global_steps == 2
    assert_same(_averages(engine), expected)


class _Faulty(Extension):
    """An extension that raises in the method ``where`` and counts calls of `remove`."""

    def __init__(self, where="", **states):
        self.where, self.own, self.num_ends = where, states, 0

    def attach(self, state):
        if self.where == "attach":
            raise OSError("disk full")

    def states(self):
        return self.own

    def remove(self):
        self.num_ends += 1
        if self.where == "remove":
            raise OSError("disk full")


def test_extensions_end_with_a_build_that_fails_and_one_that_raises_hinders_nobody():
    model, first = make_model(), _Faulty()
    with pytest.raises(OSError, match="disk full"):
        Case().build(model=model, extensions=[first, _Faulty("attach")])
    assert first.num_ends == 1
    engine = Case().build(model=model, extensions=[_Faulty("remove"), first])
    with pytest.raises(OSError, match="disk full"):
        engine.close()
    assert first.num_ends == 2
    Case().build(model=model)


def test_wrong_extensions_are_refused():
    with pytest.raises(ValueError, match="decay = 1"):
        WeightAverage(1.0)
    average = WeightAverage()
    for wrong, why in (
        ([WeightAverage(), WeightAverage()], "no other extension has"),
        ([average, average], "make another one"),
        ([_Faulty(**{"a/b": torch.zeros(1)})], "expected an identifier"),
        ([_Faulty(short=torch.zeros(3))], r"shape \(3,\)"),
    ):
        with pytest.raises(ConfigError, match=why):
            Case().build(extensions=wrong)
    with pytest.raises(ConfigError, match="no extensions"):
        Case().build(extensions=[average], is_training=False)

    def differ(ranks):
        own = [WeightAverage(0.5 + ranks.rank / 4)]
        with pytest.raises(RankMismatchError, match="a different list of extensions"):
            Case().build(ranks, extensions=own)

    simulate(differ, 2)


ASKING = {
    "check_replicas_every": {"check_replicas_every": 1},
    "zero_optimization.ignore_unused_parameters": {
        "zero_optimization": {"stage": 1, "ignore_unused_parameters": False}
    },
    "world_size_invariant": {"world_size_invariant": True},
    "memory_checkpoint": {"memory_checkpoint": {"every": 1}},
    "tiled_compute": {"tiled_compute": {"logits": {"names": ["head"]}}},
    "activation_checkpointing": {"activation_checkpointing": {"enabled": True}},
}


def test_keys_without_their_extension_are_refused_and_named(monkeypatch):
    assert {*extensions.FIRST, *extensions.LAST, *extensions.WRAPPERS} == ASKING.keys()
    for table in ("FIRST", "LAST", "WRAPPERS"):
        monkeypatch.setattr(extensions, table, {})
    for key, top in ASKING.items():
        with pytest.raises(ConfigError, match=f"^{key}: no table of zero_core.extensions has"):
            Case(top=top).build()
