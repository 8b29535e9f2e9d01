"""The vertical schedule with models of transformers and with offload: the horizontal one's bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import zero_core
from zero_core.protocols import ParamTier, Work
from zero_core.testing import SimulatedRanks, run_on_processes, simulate
from zero_offload import create_param_tier

VOCAB, WIDTH, DEPTH = 64, 16, 3


def _gpt2() -> nn.Module:
    """With dropout, as it is by default."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=WIDTH, n_layer=DEPTH, n_head=2)
    )


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _mixtral() -> nn.Module:
    """The loss has the routers' part, which each block returns beside its output."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
        )
    )


def _t5() -> nn.Module:
    """With dropout, two stacks of blocks, tied embeddings and a bias made by the first blocks."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


MODELS = {"gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "t5": _t5}


def _batches(step: int, rank: int, number: int) -> list[dict[str, Any]]:
    """Micro-batches of other sizes each, with padding on the left."""
    found = []
    for micro in range(number):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        size = (2 + (step + micro) % 2, 6 + micro)
        ids = torch.randint(2, VOCAB, size, generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : 1 + micro] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def _without_cache(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which recomputation would fill twice."""
    return [{**batch, "use_cache": False} for batch in batches]


def _config(stage: int, micro_steps: int = 3, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
        **further,
    }


def _train(
    ranks: SimulatedRanks | None,
    model: nn.Module,
    config: dict[str, Any],
    steps: int = 3,
    **parts: Any,
) -> tuple[list[float], Mapping[str, Tensor]]:
    engine = zero_core.build(model, config, process_group=ranks, **parts)
    rank = 0 if ranks is None else ranks.rank
    losses = [
        engine.train_batch(
            _without_cache(_batches(step, rank, engine.gradient_accumulation_steps))
        ).item()
        for step in range(steps)
    ]
    state = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return losses, state


def _same_bits(
    ranks: SimulatedRanks | None, name: str, configs: Sequence[dict[str, Any]], **parts: Any
) -> None:
    for config in configs:
        torch.manual_seed(0)
        models = MODELS[name](), MODELS[name]()
        models[1].load_state_dict(models[0].state_dict())
        expected = _train(ranks, models[0].train(), config, **parts)
        config = config | {"accumulation_schedule": "vertical"}
        found = _train(ranks, models[1].train(), config, **parts)
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "gpt2")],
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bits_are_those_of_the_horizontal_schedule(world_size, name):
    configs = [_config(2), _config(3), _config(3, bf16={"enabled": True})]
    run_on_processes(_same_bits, world_size, name, configs)


def _with_own_checkpointing(ranks: SimulatedRanks) -> None:
    torch.manual_seed(0)
    models = _gpt2(), _gpt2()
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, schedule in zip(models, ("horizontal", "vertical"), strict=True):
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        config = _config(3, activation_checkpointing=None, accumulation_schedule=schedule)
        found.append(_train(ranks, model, config))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.0, atol=0.0)


def test_bits_are_the_same_with_the_models_own_checkpointing():
    run_on_processes(_with_own_checkpointing, 2)


EARLY = {"offload_optimizer": {"device": "cpu", "ratio": 1.0, "update_in_backward": True}}
OFFLOADS: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": {"device": "cpu", "ratio": 1.0}},
    {"offload_optimizer": {"device": "cpu", "ratio": 0.4}},
    {"offload_optimizer": {"device": "nvme", "ratio": 1.0}},
]


def _offloads(ranks: SimulatedRanks, offload: dict[str, Any], folder: str) -> None:
    params = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    if "offload_optimizer" in offload:
        offload = {"offload_optimizer": {**offload["offload_optimizer"], "nvme_path": folder}}
    zero = {
        "stage": 3,
        "offload_param": params,
        "stage3_param_persistence_threshold": 0,
        **offload,
    }
    configs = [
        _config(3, zero_optimization=zero),
        # Gradients of so many micro-steps are folded while they come.
        _config(3, 6, zero_optimization=zero, bf16={"enabled": True}),
        # Units are updated in backward.
        _config(3, zero_optimization=zero, gradient_clipping=0.0, check_grad_overflow=False),
    ]
    _same_bits(ranks, "llama", configs, param_tier=create_param_tier)


@pytest.mark.parametrize(
    "offload",
    [EARLY, *(pytest.param(o, marks=pytest.mark.slow) for o in OFFLOADS)],
    ids=lambda o: "-".join(map(str, _flat(o))) or "none",
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bits_are_the_same_with_offloaded_parameters_and_states(world_size, offload, tmp_path):
    run_on_processes(_offloads, world_size, offload, str(tmp_path))


def _flat(offload: dict[str, Any]) -> list[Any]:
    return [value for block in offload.values() for value in block.values()]


class _Counting:
    """A parameter tier that counts its fetches by segment."""

    def __init__(self, tier: ParamTier, fetches: Counter[int]) -> None:
        self._tier = tier
        self._fetches = fetches

    def fetch(self, segment: int, out: Tensor) -> Work:
        self._fetches[segment] += 1
        return self._tier.fetch(segment, out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


def _fetches(ranks: SimulatedRanks, micro_steps: int, folder: str) -> None:
    fetches: Counter[int] = Counter()

    def create(**given: Any) -> Any:
        return _Counting(create_param_tier(**given), fetches)

    params = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    zero = {"stage": 3, "offload_param": params, "stage3_param_persistence_threshold": 0}
    for schedule in ("horizontal", "vertical"):
        config = _config(3, micro_steps, zero_optimization=zero, accumulation_schedule=schedule)
        engine = zero_core.build(_llama(), config, process_group=ranks, param_tier=create)
        for step in range(3):
            fetches.clear()
            engine.train_batch(_without_cache(_batches(step, ranks.rank, micro_steps)))
        passes = 1 if schedule == "vertical" else micro_steps
        last = engine.layout.last_block
        assert fetches == {
            s.index: passes * (1 if s.unit == 0 or s.unit >= last else 2)
            for s in engine.layout.segments
        }
        engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_steps", [2, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_are_fetched_in_two_passes_per_step(world_size, micro_steps, tmp_path):
    simulate(_fetches, world_size, micro_steps, str(tmp_path))
