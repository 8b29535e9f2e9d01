"""The vertical schedule with models of transformers and with offload: the horizontal one's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    on_ranks,
    run_on_processes,
    seeded,
)
from zero_offload import create_param_tier

VOCAB, WIDTH = 64, 16
LLAMA = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    # With dropout, as they have by default.
    "gpt2": {"n_positions": 32, "n_embd": WIDTH, "n_layer": 3, "n_head": 2},
    # Two stacks of blocks, tied embeddings and a bias made by the first blocks.
    "t5": {
        **dict.fromkeys(("num_layers", "num_heads"), 2),
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 2 * WIDTH,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "llama": LLAMA,
    # The loss has the routers' part, which each block returns beside its output.
    "mixtral": {**LLAMA, "num_local_experts": 4, "output_router_logits": True},
}


def _model(name: str) -> nn.Module:
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    with seeded(0):
        config = AutoConfig.for_model(name, vocab_size=VOCAB, **MODELS[name])
        model: nn.Module = auto.from_config(config)
    return model.train()


def _batches(step: int, rank: int, number: int) -> list[dict[str, Any]]:
    """Return micro-batches of other sizes each, with padding on the left, without a cache."""
    found = []
    for micro in range(number):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        size = (2 + (step + micro) % 2, 6 + micro)
        ids = torch.randint(2, VOCAB, size, generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : 1 + micro] = 0
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append({**inputs, "use_cache": False})
    return found


def _config(
    stage: int,
    micro_steps: int = 3,
    dtype: str = "fp32",
    clipping: float = 1.0,
    zero: Any = None,
    **top: Any,
) -> dict[str, Any]:
    top = {"activation_checkpointing": {}, **top}
    return Case(stage, dtype, micro_steps, clipping, zero=zero or {}, top=top).config()


def _same_bits(
    ranks: SimulatedRanks, make: Callable[[], nn.Module], configs: list[Any], **parts: Any
) -> None:
    for config, schedule in itertools.product(configs, ("horizontal", "vertical")):
        config = config | {"accumulation_schedule": schedule}
        engine = zero_core.build(make(), config, process_group=ranks, **parts)
        number = engine.gradient_accumulation_steps
        found = [engine.train_batch(_batches(n, ranks.rank, number)).item() for n in range(3)]
        values = engine.full_state_dict(dtype=torch.float32)
        engine.close()
        if schedule == "horizontal":
            expected = found, values
    torch.testing.assert_close((found, values), expected, rtol=0.0, atol=0.0)


def _checkpointed() -> nn.Module:
    model: Any = _model("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


THREE = [_config(2), _config(3), _config(3, dtype="bf16")]


@pytest.mark.parametrize(
    ("world_size", "make", "configs"),
    [
        (2, partial(_model, "gpt2"), THREE),
        (1, _checkpointed, [_config(3, activation_checkpointing=None)]),
        *(
            pytest.param(world_size, partial(_model, name), THREE, marks=pytest.mark.slow)
            for world_size, name in itertools.product((1, 2), MODELS)
            if (world_size, name) != (2, "gpt2")
        ),
    ],
)
def test_bits_are_those_of_the_horizontal_schedule(world_size, make, configs):
    run_on_processes(_same_bits, world_size, make, configs)


OFFLOADS: dict[str, dict[str, Any]] = {
    "in backward": {"device": "cpu", "update_in_backward": True},
    "none": {"device": "none"},
    "host": {"device": "cpu"},
    "ratio 0.4": {"device": "cpu", "ratio": 0.4},
    "files": {"device": "nvme"},
}


@pytest.mark.parametrize(
    "name",
    ["in backward", *(pytest.param(n, marks=pytest.mark.slow) for n in list(OFFLOADS)[1:])],
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
@on_ranks()
def test_bits_are_the_same_with_offloaded_parameters_and_states(ranks, name, tmp_path):
    folder = str(tmp_path)
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0},
        "offload_optimizer": {**OFFLOADS[name], "nvme_path": folder},
        "stage3_param_persistence_threshold": 0,
    }
    configs = [
        _config(3, zero=zero),
        # Gradients of so many micro-steps are folded while they come.
        _config(3, 6, "bf16", zero=zero),
        # Units are updated in backward.
        _config(3, clipping=0.0, zero=zero, check_grad_overflow=False),
    ]
    _same_bits(ranks, partial(_model, "llama"), configs, param_tier=create_param_tier)
