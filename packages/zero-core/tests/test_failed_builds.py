"""A failed build() leaves model and optimizer unchanged, and build() can be called again."""

from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support.tiers import MadeTier
from torch import nn

import zero_core
from zero_core import building
from zero_core.errors import CollectiveError, ConfigError
from zero_core.init.values import put_in_slices
from zero_core.testing.failing import Failure, described, failing
from zero_core.testing.models import batch, make_model, seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import spawn
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, train_steps

GIVING_UP = ("FormerModel.give_up", "release_free_pages")
"""The last calls of a build. If they fail, parameters have other addresses than before."""
KINDS = ("ordinary", "deferred", "pretrained", "evaluation", "sliced")


def _model():
    model = make_model()
    model.register_buffer("seen", torch.arange(3.0))
    return model


def _make(ranks, kind):
    if kind == "deferred":
        # seeded() locks out other threads, whose modules deferred_init() would record.
        with seeded(0), zero_core.deferred_init():
            model = _model()
    elif kind == "pretrained":
        with torch.device("meta"):
            model = _model()
    else:
        model = _model()
        model(**batch(3, 0, 0))["loss"].backward()
    model.register_forward_hook(lambda module, args, output: None)
    if kind == "sliced":
        put_in_slices(list(model.parameters()), ranks.connect())
    params = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(params, lr=1e-2)


def _options(kind, folder, optimizer):
    if kind == "evaluation":
        return {"is_training": False}
    options = {"optimizer": optimizer, "lr_scheduler": _schedule}
    return options | ({"pretrained": folder} if kind == "pretrained" else {})


def _schedule(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)


def _result(engine):
    if isinstance(engine, zero_core.Engine):
        train_steps(engine, 0, 2)
    found = engine.full_state_dict()
    engine.close()
    return found


def _build(ranks, stage, kind, folder, *made):
    model, optimizer = made or _make(ranks, kind)
    options = _options(kind, folder, optimizer)
    return Case(stage).build(ranks, model, **options)


def _calls(ranks, *case):
    with failing(None, "call", building.__file__) as calls:
        _build(ranks, *case)
    return calls


def _each_call(ranks, calls, event, *case):
    stage, kind, _ = case
    expected = _result(_build(ranks, *case))
    made = _make(ranks, kind)
    kept = []  # tracebacks, as in a notebook, keep the failed engine alive
    for call in calls:
        has_places = stage < 3 and call[0] not in GIVING_UP
        before = described(*made, has_places=has_places)
        with pytest.raises(Failure) as caught, failing(call, event, building.__file__):
            _build(ranks, *case, *made)
        kept.append(caught.value)
        assert described(*made, has_places=has_places) == before, call
    assert_same(_result(_build(ranks, *case, *made)), expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", ["call", "return"])
def test_a_build_that_any_of_its_calls_ends_changes_nothing(tmp_path, stage, kind, event):
    values = _model().state_dict()
    del values["head.weight"]  # tied to embed.weight
    save_file(values, tmp_path / "model.safetensors")
    case = stage, kind, str(tmp_path)
    first, second = simulate(_calls, 2, *case)
    calls = [call for call in first if call in second]  # calls that both ranks make
    assert len(calls) > 40
    simulate(_each_call, 2, calls[5 * stage % 8 :: 8], event, *case)


def _no_optimizer():
    return torch.optim.SGD([{"params": []}], lr=0.0)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_values_that_one_rank_cannot_write_stay_in_the_models_of_all(ranks, stage):
    num_writes = 0

    class Broken(MadeTier):
        def write_state(self, *args):
            nonlocal num_writes
            num_writes += 1
            if num_writes == 3 and ranks.rank == 1:
                raise OSError("disk full")
            super().write_state(*args)

    config = Case(stage).config()
    model, _ = _make(ranks, "ordinary")
    before = described(model, _no_optimizer(), has_places=stage < 3)
    kind, text = (OSError, "disk full") if ranks.rank == 1 else (RuntimeError, "rank 1: disk full")
    with pytest.raises(kind, match=text):
        zero_core.build(model, config, process_group=ranks, state_tier=Broken.made)
    assert num_writes == 3
    assert described(model, _no_optimizer(), has_places=stage < 3) == before
    found = _result(zero_core.build(model, config, process_group=ranks))
    made, _ = _make(ranks, "ordinary")
    expected = _result(zero_core.build(made, config, process_group=ranks))
    assert_same(found, expected)


def _lost(ranks, kind):
    model, optimizer = _make(ranks, kind)
    with pytest.raises(CollectiveError) as caught:
        Case(3).build(ranks, model, optimizer=optimizer)
    assert "their values are gone" in caught.value.__notes__[0]
    return model


def _replaced(ranks, models):
    model = models[ranks.rank]
    with pytest.raises(RuntimeError, match="gain was read after its engine was closed"):
        model.gain.sum()
    with pytest.raises(ConfigError, match="holds no value"):
        Case(3).build(ranks, model)
    values = _model().state_dict()
    for name, param in model.named_parameters():
        param.data = values[name].clone()
    found = _result(Case(3).build(ranks, model))
    assert_same(found, _result(Case(3).build(ranks, _model())))


@pytest.mark.parametrize("kind", ["ordinary", "sliced"])
def test_values_that_are_lost_with_a_peer_are_refused_until_they_are_replaced(kind):
    error = CollectiveError("rank 1 is gone")
    with mock.patch.object(building, "release_free_pages", side_effect=error):
        models = simulate(_lost, 2, kind)
    simulate(_replaced, 2, models)


def _build_on_small_devices(rank, world_size, stage, small):
    torch.accelerator.set_device_index(rank)
    torch.cuda.set_per_process_memory_fraction(2**-7 if rank in small else 1.0)  # 64 MiB
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters())
    expected = described(model, optimizer, has_places=False)
    with pytest.raises((torch.OutOfMemoryError, CollectiveError)) as caught:
        zero_core.build(model, Case(stage).config(), optimizer=optimizer)
    if rank in small:
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert "zero_core.plan" in caught.value.__notes__[0]
    assert described(model, optimizer, has_places=False) == expected
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine = zero_core.build(model, Case(stage).config(), optimizer=optimizer)
    engine.backward(engine(torch.ones(2, 1024, device=engine.device)).sum())
    engine.step()
    engine.close()


@pytest.mark.cuda
@pytest.mark.parametrize(("stage", "small"), [(0, (1,)), (3, (0, 1))])
def test_device_without_memory_is_named_and_the_model_can_be_built_again(stage, small):
    spawn(_build_on_small_devices, 2, stage, small, backend="nccl")
