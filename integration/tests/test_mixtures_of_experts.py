"""Mixtures of experts of transformers, unmodified, and experts that are modules, against DDP."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing import SimulatedDDP, SimulatedRanks, simulate, spawn
from zero_core.testing.models import MixtureModel, routed_batch

ADAMW = {"lr": 1e-2, "weight_decay": 0.01}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"stage": 1},
    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    {"stage": 3},
    {"stage": 3, **OFFLOAD},
)
VOCAB, STEPS = 41, 2
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1}


def _models() -> Iterator[tuple[str, nn.Module]]:
    import transformers as hf

    made = {
        "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
        "qwen2_moe": hf.Qwen2MoeConfig(
            **SIZES, **EXPERTS, num_experts=6, shared_expert_intermediate_size=12
        ),
        "qwen3_moe": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=6, head_dim=8),
        "deepseek_v2": hf.DeepseekV2Config(**SIZES, **EXPERTS, **LATENT, topk_method="greedy"),
        "deepseek_v3": hf.DeepseekV3Config(**SIZES, **EXPERTS, **LATENT, n_group=2, topk_group=1),
    }
    for name, config in made.items():
        torch.manual_seed(0)
        yield name, hf.AutoModelForCausalLM.from_config(config)


def _inputs(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Three tokens: of six experts, each rank uses some others."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCAB, (1, 3), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _config(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


def _train(engine: zero_core.Engine, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for step in range(STEPS):
        loss = engine(**_inputs(step, rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    values = engine.full_state_dict()
    engine.close()
    return losses, values


def _compare(
    rank: int,
    name: str,
    initial: nn.Module,
    ddp: Any,
    settings: tuple[dict[str, Any], ...],
    group: SimulatedRanks | None = None,
) -> None:
    """Train ``ddp``, which holds a copy of ``initial``, and engines of other copies."""
    model = ddp.module
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp(**_inputs(step, rank)).loss
        loss.backward()
        if isinstance(ddp, SimulatedDDP):
            ddp.average_gradients()
        optimizer.step()
        losses.append(loss.item())
    expected = {key: value.detach() for key, value in model.named_parameters()}
    for zero in settings:
        engine = zero_core.build(copy.deepcopy(initial), _config(zero), process_group=group)
        found_losses, found = _train(engine, rank)
        # The host's Adam rounds in another order.
        atol = 1e-6 if "offload_optimizer" in zero else 0.0
        assert found_losses == pytest.approx(losses, rel=0.0, abs=atol), (name, zero)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=atol)


def _on_processes(rank: int, world_size: int) -> None:
    for name, model in _models():
        ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
        _compare(rank, name, model, ddp, SETTINGS)
    _follow_stage_2(rank)


@pytest.mark.slow
def test_mixtures_of_transformers_follow_ddp_on_two_ranks():
    spawn(_on_processes, 2)


def _simulated(ranks: SimulatedRanks, models: list[tuple[str, nn.Module]]) -> None:
    for name, model in models:
        ddp = SimulatedDDP(copy.deepcopy(model), ranks)
        _compare(ranks.rank, name, model, ddp, SETTINGS[2:3], ranks)


def test_mixtures_of_transformers_follow_ddp_on_three_ranks():
    simulate(_simulated, 3, list(_models()))


def _follow_stage_2(rank: int) -> None:
    """Experts that are modules, at stage 3 and offloaded."""
    on_host = {"offload_optimizer": {"device": "cpu"}}
    for further, offload in (({}, {}), (on_host, OFFLOAD)):
        results = []
        for zero in ({"stage": 2, **further}, {"stage": 3, **offload}):
            engine = zero_core.build(MixtureModel(), _config(zero))
            for step in range(5):
                engine.backward(engine(*routed_batch(step, rank, 1)))
                engine.step()
            results.append(engine.full_state_dict())
            engine.close()
        torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=0.0)
