"""The vertical schedule with models of transformers and with offload: the horizontal one's bits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import zero_core
from tests.support.host_optimizers import OPTIMIZERS
from zero_core.protocols import ParamTier, Work
from zero_core.testing import (
    Case,
    SimulatedRanks,
    make_tower,
    rows,
    run_on_processes,
    seeded,
    simulate,
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


@pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "gpt2")],
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bits_are_those_of_the_horizontal_schedule(world_size, name):
    configs = [_config(2), _config(3), _config(3, dtype="bf16")]
    run_on_processes(_same_bits, world_size, partial(_model, name), configs)


def _checkpointed() -> nn.Module:
    model: Any = _model("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_bits_are_the_same_with_the_models_own_checkpointing():
    configs = [_config(3, activation_checkpointing=None)]
    run_on_processes(_same_bits, 1, _checkpointed, configs)


OFFLOADS: dict[str, dict[str, Any]] = {
    "in backward": {"device": "cpu", "update_in_backward": True},
    "none": {"device": "none"},
    "host": {"device": "cpu"},
    "ratio 0.4": {"device": "cpu", "ratio": 0.4},
    "files": {"device": "nvme"},
}


def _resting(folder: str) -> dict[str, Any]:
    params = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return {"offload_param": params, "stage3_param_persistence_threshold": 0}


def _offloads(ranks: SimulatedRanks, name: str, folder: str) -> None:
    zero = {**_resting(folder), "offload_optimizer": {**OFFLOADS[name], "nvme_path": folder}}
    configs = [
        _config(3, zero=zero),
        # Gradients of so many micro-steps are folded while they come.
        _config(3, 6, "bf16", zero=zero),
        # Units are updated in backward.
        _config(3, clipping=0.0, zero=zero, check_grad_overflow=False),
    ]
    _same_bits(ranks, partial(_model, "llama"), configs, param_tier=create_param_tier)


@pytest.mark.parametrize(
    "name",
    ["in backward", *(pytest.param(n, marks=pytest.mark.slow) for n in list(OFFLOADS)[1:])],
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
def test_bits_are_the_same_with_offloaded_parameters_and_states(world_size, name, tmp_path):
    simulate(_offloads, world_size, name, str(tmp_path))


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

    for schedule in ("horizontal", "vertical"):
        config = _config(3, micro_steps, zero=_resting(folder), accumulation_schedule=schedule)
        engine = zero_core.build(_model("llama"), config, process_group=ranks, param_tier=create)
        for step in range(3):
            fetches.clear()
            engine.train_batch(_batches(step, ranks.rank, micro_steps))
        passes = 1 if schedule == "vertical" else micro_steps
        last = engine.layout.last_block
        assert fetches == {
            s.index: passes * (1 if s.unit == 0 or s.unit >= last else 2)
            for s in engine.layout.segments
        }
        engine.close()


@pytest.mark.parametrize(("world_size", "micro_steps"), [(1, 2), (2, 5)])
def test_shards_are_fetched_in_two_passes_per_step(world_size, micro_steps, tmp_path):
    simulate(_fetches, world_size, micro_steps, str(tmp_path))


STEPS, SAVED = 100, 60


def _go_long(ranks: SimulatedRanks, config: dict[str, Any], folder: Path) -> list[float]:
    """Load what the horizontal schedule saved into both. Return norms and the skipped steps."""
    facts = []
    for schedule in ("horizontal", "vertical"):
        keys = config | {"accumulation_schedule": schedule}
        engine = zero_core.build(make_tower(3), keys, process_group=ranks)
        losses, norms = [], []
        for step in range(STEPS):
            inputs = [rows(3 * step + n, ranks.rank)[: 1 + (step + n) % 3] for n in range(3)]
            losses.append(engine.train_batch(inputs).item())
            norms.append(engine.get_global_grad_norm() or 0.0)
            if step == SAVED:
                engine.save_checkpoint(folder / schedule)
                engine.load_checkpoint(folder / "horizontal")
        values = engine.full_state_dict(dtype=torch.float32)
        facts.append((losses, norms, engine.skipped_steps, values))
        engine.close()
    torch.testing.assert_close(facts[1], facts[0], rtol=0.0, atol=0.0, equal_nan=True)
    return [*norms, float(engine.skipped_steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stage", "name"),
    [
        (*sizes, name)
        for sizes, name in zip(
            itertools.product([1, 2, 3], repeat=2), itertools.cycle(OPTIMIZERS), strict=False
        )
    ],
)
def test_100_steps_have_the_bits_of_the_horizontal_schedule(world_size, stage, name, tmp_path):
    top: dict[str, Any] = {"optimizer": {"type": name, "params": OPTIMIZERS[name]}}
    clipping = 0.0
    for share in ("none", "some", "all"):
        config = _config(stage, clipping=clipping, **top)
        *norms, _ = simulate(_go_long, world_size, config, tmp_path / share)[0]
        num_clipped = sum(norm > clipping > 0.0 for norm in norms)
        least, most = {"none": (0, 0), "some": (1, STEPS // 2)}.get(share, (STEPS, STEPS))
        assert least <= num_clipped <= most
        clipping = sorted(norms)[int(0.9 * STEPS)] if share == "none" else 1e-9
    # The scale doubles until a step overflows.
    scale = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 20, "hysteresis": 1}
    config = _config(stage, clipping=0.0, fp16=scale, **top)
    *_, num_skipped = simulate(_go_long, world_size, config, tmp_path / "fp16")[0]
    assert 0 < num_skipped < STEPS
