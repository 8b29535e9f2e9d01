"""Whole models saved from sharded ones in DeepSpeed's ways, with torch's values."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.facade import NO_PERSISTENCE, config, make, on_ranks
from zero_core import CheckpointError
from zero_engine import deepspeed
from zero_engine.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

LR = 1e-2


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still))


def _ids(rank: int) -> Tensor:
    return torch.randint(0, 31, (1, 8), generator=torch.Generator().manual_seed(rank))


def _trained(world_size: int) -> dict[str, Tensor]:
    """Return the weights after one step of plain torch on all ranks' batches."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rank in range(world_size):
        (model(_ids(rank), labels=_ids(rank)).loss / world_size).backward()
    optimizer.step()
    return model.state_dict()


def _engine(stage: int, rank: int) -> Any:
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    settings = config(
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_optimization={"stage": stage, **gathers, **NO_PERSISTENCE},
    )
    engine = make(_model(), config=settings)
    engine.backward(engine(_ids(rank), labels=_ids(rank)).loss)
    engine.step()
    return engine


def _is_as(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    """Yield the warnings of a logger."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield told
    logging.getLogger(name).removeHandler(handler)


def _save(rank: int, world_size: int, folder: str) -> None:
    from accelerate import Accelerator

    expected = _trained(world_size)
    for stage in (2, 3):
        engine = _engine(stage, rank)
        # As in accelerate's documentation; Accelerator.get_state_dict() does this at stage 3.
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (rank != 0)
        place = Path(folder, f"saved-{stage}")
        saves = {"is_main_process": rank == 0, "save_function": Accelerator.save}
        engine.module.save_pretrained(place, **saves, state_dict=state)
        if rank == 0:
            _is_as(load_file(place / "model.safetensors"), expected)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            whole = engine.module.state_dict()
            assert whole.keys() == expected.keys()
            _is_as(whole, expected)
        with deepspeed.zero.GatheredParameters(engine.module.transformer.h[0].parameters()):
            block = engine.module.transformer.h[0].state_dict(prefix="transformer.h.0.")
            _is_as(block, expected)
        if stage < 3 or world_size == 1:
            _is_as(engine.module.state_dict(), expected)
        else:  # as DeepSpeed's, of no elements; OpenRLHF reads the names on rank 0
            with _logged("zero_core") as told:
                names = engine.module.state_dict()
                assert engine.module.state_dict().keys() == names.keys() == expected.keys()
            assert {v.numel() for v in names.values()} == {0}
            assert len(told) == (rank == 0)
            for line in told:
                assert "transformer.wte.weight" in line
                assert "state_dict=accelerator.get_state_dict(model)" in line
        engine.destroy()


def _load(rank: int, world_size: int, folder: str) -> None:
    expected = _trained(world_size)
    for stage in (1, 3):
        place = Path(folder, f"checkpoint-{stage}")
        engine = _engine(stage, rank)
        engine.save_checkpoint(place)
        zeros = [f"zero_pp_rank_{r}_mp_rank_00_" for r in range(world_size)]
        names = {f"{zero}optim_states.pt" for zero in zeros}
        names |= {f"{zero}model_states.pt" for zero in (zeros if stage == 3 else ["mp_rank_00_"])}
        files = list((place / "global_step1").glob("*.pt"))
        assert {path.name for path in files} == names
        assert {json.loads(path.read_text())["values"] for path in files} == {"manifest.json"}
        model = engine.module
        if stage == 3:
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                _is_as(load_state_dict_from_zero_checkpoint(model, place).state_dict(), expected)
            engine.backward(engine(_ids(rank), labels=_ids(rank)).loss)  # the engine stays
        assert load_state_dict_from_zero_checkpoint(model, place) is model
        _is_as(model.state_dict(), expected)
        with pytest.raises(RuntimeError, match="engine that was ended"):
            engine.step()
        assert {p.grad is None for p in model.parameters()} == {True}
        model(_ids(0), labels=_ids(0)).loss.backward()  # a plain model
        assert {p.grad is None for p in model.parameters()} == {False}
    with pytest.raises(CheckpointError, match="give the model whose engine saved it"):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), place)
    model.extra = torch.nn.Linear(2, 2)
    with _logged("zero_engine") as told:
        load_state_dict_from_zero_checkpoint(model, place)
    assert ["extra.weight, extra.bias" in line for line in told] == [True]
    with deepspeed.zero.Init():
        other = _model()
    _is_as(load_state_dict_from_zero_checkpoint(other, place).state_dict(), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_scripts_save_and_read_whole_models_and_load_them_without_the_engine(world_size, tmp_path):
    on_ranks(world_size, [_save, _load], str(tmp_path))
