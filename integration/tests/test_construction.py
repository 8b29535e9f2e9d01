"""Hugging Face models that are made without memory or loaded in parts, with every state tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM

import zero_core
from zero_core.testing import spawn

GPT2 = GPT2Config(
    n_layer=3, n_embd=36, n_head=3, vocab_size=101, n_positions=17, bos_token_id=0, eos_token_id=0
)
LLAMA = LlamaConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=53,
    tie_word_embeddings=False,
)


def _config(stage: int, *, is_offloaded: bool = False, is_low: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": is_low},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }


CONFIGS = [
    *(_config(stage) for stage in range(4)),
    _config(3, is_low=True),
    _config(2, is_offloaded=True, is_low=True),
    _config(3, is_offloaded=True),
    _config(1) | {"fp16": {"enabled": True}},
]


CLASSES = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
# GPT-2, which ties weights, takes all configurations, the other model every second one.
JOBS = [
    (config, kind)
    for number, config in enumerate(CONFIGS)
    for kind in CLASSES
    if kind == "gpt2" or number % 2
]


def jobs_of(world_size: int) -> list[tuple[dict[str, Any], str]]:
    """With two ranks all of them; with one and three every third."""
    return JOBS if world_size == 2 else JOBS[::3]


def _make(kind: str) -> torch.nn.Module:
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2) if kind == "gpt2" else LlamaForCausalLM(LLAMA)


def _losses(engine: zero_core.Engine, rank: int) -> list[float]:
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 50, (2, 13), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def _compare(ordinary: zero_core.Engine, other: zero_core.Engine, rank: int) -> None:
    expected = ordinary.full_state_dict(dtype=torch.float32)
    found = other.full_state_dict(dtype=torch.float32)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    buffers = dict(other.module.named_buffers())
    for name, buffer in ordinary.module.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    ordinary.module.eval()  # no dropout: the generators need not be in the same state
    other.module.eval()
    assert _losses(other, rank) == _losses(ordinary, rank)
    ordinary.close()
    other.close()


def _defer(rank: int, world_size: int) -> None:
    for config, kind in jobs_of(world_size):
        ordinary = zero_core.build(_make(kind), config)
        with zero_core.deferred_init():
            model = _make(kind)
        assert all(p.is_meta for p in model.parameters())
        _compare(ordinary, zero_core.build(model, config), rank)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_deferred_model_is_an_ordinary_one(world_size: int) -> None:
    spawn(_defer, world_size)


def _load(rank: int, world_size: int, folder: str) -> None:
    for config, kind in jobs_of(world_size):
        place, cls = str(Path(folder) / kind), CLASSES[kind]
        ordinary = zero_core.build(cls.from_pretrained(place), config)
        with zero_core.deferred_init():
            model = cls(cls.config_class.from_pretrained(place))
        engine = zero_core.build(model, config)
        loaded = zero_core.load_pretrained(engine, place)
        assert loaded == zero_core.Loaded((), ())
        _compare(ordinary, engine, rank)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_loaded_model_is_that_of_from_pretrained(tmp_path: Path, world_size: int) -> None:
    for kind in ("gpt2", "llama"):
        _make(kind).save_pretrained(tmp_path / kind, max_shard_size="30KB")
        assert len(list((tmp_path / kind).glob("*.safetensors"))) > 1
    spawn(_load, world_size, str(tmp_path))


def test_a_folder_of_the_base_model_serves_the_model_with_a_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = GPT2Model(GPT2)
    base.save_pretrained(tmp_path)
    engine = zero_core.build(_make("gpt2"), _config(0))
    assert zero_core.load_pretrained(engine, tmp_path) == zero_core.Loaded((), ())
    expected = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_model_under_torchs_meta_device_is_built_from_its_folder(tmp_path: Path) -> None:
    _make("gpt2").save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2)
    engine = zero_core.build(model, _config(0), pretrained=tmp_path)
    expected = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name
