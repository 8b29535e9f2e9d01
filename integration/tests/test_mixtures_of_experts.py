"""Mixtures of experts of transformers, unmodified, and experts that are modules, against DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, check_like_ddp, seeded, simulate, train
from zero_core.testing.models import MixtureModel, routed_batch

HOST = {"offload_optimizer": {"device": "cpu"}}
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


def _inputs(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return three tokens: of six experts, each rank uses some others."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCAB, (1, 3), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _follow(ranks: SimulatedRanks, name: str) -> None:
    check_like_ddp(ranks, partial(_model, name), _inputs, Case(3), steps=2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_mixtures_of_transformers_follow_ddp(world_size, name):
    simulate(_follow, world_size, name)


def _offload(ranks: SimulatedRanks, name: str | None) -> None:
    found = []
    for stage, zero in ((1, {}), (2, HOST), (3, {**HOST, "offload_param": {"device": "cpu"}})):
        model = MixtureModel() if name is None else _model(name)
        engine = zero_core.build(model, Case(stage, zero=zero).config(), process_group=ranks)
        inputs: Any = [
            routed_batch(step, ranks.rank, 1) if name is None else _inputs(step, ranks.rank)
            for step in range(3)
        ]
        found.append((train(engine, inputs), engine.full_state_dict()))
        engine.close()
    torch.testing.assert_close(found[2], found[1], rtol=0.0, atol=0.0)
    # The host's Adam rounds in another order.
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS)])
def test_mixtures_that_are_offloaded_follow_those_that_are_not(name):
    simulate(_offload, 2, name)
