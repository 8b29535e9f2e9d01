"""Hugging Face models in the engine: deferred, loaded, generating, adapted, mixtures of experts."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import zero_core
from tests.support.lm_models import CLASSES, lm_config, make_lm
from zero_core.testing import Case, check_like_ddp, seeded, simulate, spawn, train

HOST = {"offload_optimizer": {"device": "cpu"}}


def _ids(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(1, 61, (2, 9), generator=generator)


def _inputs(step: int, rank: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step, rank), "labels": _ids(step, rank)}


def _starts(rank: int, world_size: int, folder: Path) -> None:
    batches = [_inputs(step, rank) for step in range(2)]
    for case, kind in (
        (Case(0), "gpt2"),
        (Case(2, "bf16", zero=HOST), "llama"),
        (Case(3, "bf16"), "gpt2"),
    ):
        ordinary = CLASSES[kind].from_pretrained(folder / kind)
        with zero_core.deferred_init():
            drawn, loaded = make_lm(kind), CLASSES[kind](lm_config(kind))
        assert all(p.is_meta for p in drawn.parameters())
        found = []
        for model in (ordinary, drawn, loaded):
            engine = zero_core.build(model, case.config())
            if model is loaded:
                assert zero_core.load_pretrained(engine, folder / kind) == zero_core.Loaded((), ())
            start = engine.full_state_dict(dtype=torch.float32), dict(engine.module.named_buffers())
            found.append((*start, train(engine, batches)))
            engine.close()
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0.0, atol=0.0)


def test_deferred_and_loaded_models_are_ordinary_ones(tmp_path: Path) -> None:
    for kind in ("gpt2", "llama"):
        make_lm(kind).save_pretrained(tmp_path / kind, max_shard_size="10KB")
        assert len(list((tmp_path / kind).glob("*.safetensors"))) > 1
    spawn(_starts, 2, tmp_path)


# greedy decoding, sampling, and beam search with four beams
WAYS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True}, {"num_beams": 4})


def _generate(model: Any, rank: int, **settings: Any) -> list[Tensor]:
    """Return the tokens of each of `WAYS`, with a different length on each rank."""
    model.eval()
    prompt, length = _ids(7, rank), 6 + 3 * rank
    settings |= {"max_new_tokens": length, "min_new_tokens": length}
    found = []
    for way in WAYS:
        torch.manual_seed(3)
        mask = torch.ones_like(prompt)
        found.append(model.generate(prompt, attention_mask=mask, **way, **settings))
    model.train()
    return found


def _generates(rank: int, world_size: int) -> None:
    made: list[Mock] = []

    def count(native: Any, **_: Any) -> Any:
        made.append(Mock(spec=native, wraps=native))
        return made[-1]

    model = {"n_layer": 3, "n_positions": 32}
    is_limited = world_size == 3
    limit = {"stage3_max_live_parameters": 12_000} if is_limited else {}
    engine = zero_core.build(
        make_lm("gpt2", **model), Case(3, zero=limit).config(), collectives=count
    )
    gather = made[-1].all_gather
    for step in range(2):
        plain = make_lm("gpt2", **model)
        plain.load_state_dict(engine.full_state_dict())
        expected = _generate(plain, rank)
        gather.reset_mock()
        if is_limited:
            # All but two blocks stay gathered. Each token of the longest text gathers these two.
            tokens = _generate(engine.module, rank, synced_gpus=True)
            per_token = gather.call_count / len(WAYS) / (6 + 3 * (world_size - 1))
            assert 2.0 < per_token < 2.5
        else:
            # Each call gathers the root and three blocks once. A token gathers nothing.
            tokens = _generate(engine.module, rank)
            assert gather.call_count == 4 * len(WAYS)
        with engine.gathered() as module:
            gather.reset_mock()
            gathered = _generate(module, rank)
            gather.assert_not_called()
        torch.testing.assert_close(tokens, expected)
        torch.testing.assert_close(gathered, expected)
        assert not any(map(engine.holds_value, engine.module.parameters()))
        train(engine, [_inputs(step, rank)])
    assert "generate" not in vars(copy.deepcopy(plain))
    engine.unwrap()
    assert "generate" not in vars(engine.module)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_generated_tokens_are_the_plain_models(world_size: int) -> None:
    spawn(_generates, world_size)


def _adapted() -> Any:
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    with seeded(2):
        model = peft.get_peft_model(make_lm("gpt2").to(torch.bfloat16), config)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {
        (torch.float32, True),
        (torch.bfloat16, False),
    }
    return model


@pytest.mark.parametrize("stage", range(4))
def test_pefts_fp32_adapters_on_a_bf16_model_train_as_in_ddp(stage: int) -> None:
    simulate(check_like_ddp, 2, _adapted, _inputs, Case(stage))


VOCAB = 41
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {**EXPERTS, "num_experts": 6, "head_dim": 8},
    "deepseek_v2": {**EXPERTS, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**EXPERTS, **LATENT, "n_group": 2, "topk_group": 1},
}


def _model(name: str) -> nn.Module:
    with seeded(0):
        config = hf.AutoConfig.for_model(name, **SIZES, **MODELS[name])
        model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return model


def _few_tokens(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a batch of three tokens, so few that ranks leave different experts unused."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCAB, (1, 3), generator=generator)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", MODELS)
def test_mixtures_of_transformers_follow_ddp(name: str) -> None:
    check = partial(check_like_ddp, steps=2)
    simulate(check, 3, partial(_model, name), _few_tokens, Case(3))
