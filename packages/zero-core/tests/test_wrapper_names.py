"""Names are those of the unwrapped model, under checkpoint wrappers and `torch.compile`."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zero_core
from zero_core.testing import Case, assert_same, make_tower, on_processes, rows, train


def _net(how="plain"):
    model = make_tower(3)
    model.head.requires_grad_(False)
    blocks = list(model.blocks)
    for block in blocks:
        block.register_buffer("shift", torch.full((6,), 0.5))
    if how in ("compile", "both"):
        blocks = [torch.compile(block, backend="eager") for block in blocks]
    if how in ("checkpoint", "both"):
        blocks = [checkpoint_wrapper(block) for block in blocks]
    model.blocks = nn.ModuleList(blocks)
    if how == "parts":
        model.first = checkpoint_wrapper(model.first)
        model.head = torch.compile(model.head, backend="eager")
    return model


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("checkpoint", marks=pytest.mark.slow),
        pytest.param("compile", marks=pytest.mark.slow),
        "both",
        pytest.param("parts", marks=pytest.mark.slow),
    ],
)
@on_processes(2)
def test_wrapped_models_have_the_names_of_the_model(ranks, how, tmp_path):
    for stage in (0, 3):
        config = Case(stage).config()
        engine, plain = (zero_core.build(_net(h), config) for h in (how, "plain"))
        for each in (engine, plain):
            train(each, [rows(step, ranks.rank) for step in range(2)])
        state = engine.full_state_dict()
        _net().load_state_dict(state)
        plain.save_checkpoint(f"{tmp_path}/{how}/plain-{stage}")
        engine.load_checkpoint(f"{tmp_path}/{how}/plain-{stage}")
        assert_same(state, plain.full_state_dict())
        assert list(state) == list(plain.full_state_dict())
        engine.save_checkpoint(f"{tmp_path}/{how}/{stage}")
        engine.export_safetensors(f"{tmp_path}/{how}/export-{stage}")
        assert (
            load_file(f"{tmp_path}/{how}/export-{stage}/model.safetensors").keys() == state.keys()
        )
        other = zero_core.build(_net(), config)
        other.load_checkpoint(f"{tmp_path}/{how}/{stage}")
        assert_same(other.full_state_dict(), engine.full_state_dict())
        fresh = zero_core.build(_net(how), config, pretrained=f"{tmp_path}/{how}/export-{stage}")
        assert_same(fresh.full_state_dict(), engine.full_state_dict())
        for name, param in engine.module.named_parameters():  # wrappers' names are known, too
            own = zero_core.engine_of(param).owns(param)
            assert torch.equal(engine.states.get_full(name), state[own])
