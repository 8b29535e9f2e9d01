"""Hugging Face models in the engine: text generation at stage 3, and LoRA by peft."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import zero_core
from zero_core.protocols import Work
from zero_core.testing import LR, WEIGHT_DECAY, Case, spawn

VOCAB = 61


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=24,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _ids(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(1, VOCAB, (2, 9), generator=generator)


class _Counting:
    """The engine's own collectives, and how many of them there were."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.num_calls = 0

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        self.num_calls += 1
        work: Work = self.native.all_gather(
            out, shard, unit=unit, version=version, backward=backward
        )
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        self.num_calls += 1
        work: Work = self.native.reduce_scatter(out, full, unit=unit)
        return work


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 4},
}


def _generate(model: Any, rank: int, **settings: Any) -> list[Tensor]:
    """Greedy tokens, sampled ones and those of four beams, of another length on each rank."""
    model.eval()
    found = []
    for way in WAYS.values():
        prompt = _ids(7, rank)
        length = 6 + 3 * rank
        torch.manual_seed(3)
        found.append(
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                min_new_tokens=length,
                **way,
                **settings,
            )
        )
    model.train()
    return found


def _generates(rank: int, world_size: int) -> None:
    made: list[_Counting] = []

    def factory(native: Any, **kwargs: Any) -> _Counting:
        made.append(_Counting(native))
        return made[-1]

    config = Case(stage=3).config()
    config["zero_optimization"]["stage3_max_live_parameters"] = limit = {2: 10**9, 3: 12_000}[
        world_size
    ]
    engine = zero_core.build(_gpt2(), config, collectives=factory)
    counting = made[-1]
    for step in range(2):
        plain = _gpt2()
        plain.load_state_dict(engine.full_state_dict())
        expected = _generate(plain, rank)
        counting.num_calls = 0
        if limit == 10**9:
            # The root and three blocks, once for each call; none per token.
            tokens = _generate(engine.module, rank)
            assert counting.num_calls == 4 * len(WAYS), counting.num_calls
        else:
            # All but two blocks stay. The others are gathered for each token of the longest.
            tokens = _generate(engine.module, rank, synced_gpus=True)
            per_token = counting.num_calls / len(WAYS) / (6 + 3 * (world_size - 1))
            assert 2.0 < per_token < 2.5
        with engine.gathered() as module:
            counting.num_calls = 0
            gathered = _generate(module, rank)
            assert counting.num_calls == 0
        for found in (tokens, gathered):
            assert all(map(torch.equal, found, expected))
        assert not any(map(engine.holds_value, engine.module.parameters()))
        ids = _ids(step, rank)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    copied = copy.deepcopy(plain)
    assert "generate" not in vars(copied)
    engine.unwrap()
    assert "generate" not in vars(engine.module)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_generated_tokens_are_the_plain_models(world_size: int) -> None:
    spawn(_generates, world_size)


def _lora() -> Any:
    """A frozen bf16 GPT-2 with adapters, which peft makes fp32."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
    )
    return peft.get_peft_model(_gpt2().to(torch.bfloat16), config)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _adapts(rank: int, world_size: int) -> None:
    model = _lora()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        _trained(model).values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True
    )
    for step in range(3):
        optimizer.zero_grad()
        ids = _ids(step, rank)
        ddp(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    expected = {name: p.detach().clone() for name, p in _trained(model).items()}
    for stage in (0, 1, 2, 3):
        engine = zero_core.build(_lora(), Case(stage).config())
        trained = _trained(engine.module)
        assert trained.keys() == expected.keys()
        assert {p.dtype for p in trained.values()} == {torch.float32}
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32, torch.bfloat16}
        for step in range(3):
            ids = _ids(step, rank)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        full = engine.full_state_dict()
        assert all(torch.equal(full[name], value) for name, value in expected.items())
        frozen = sum(s.shard_numel for s in engine.layout.segments if not s.is_trainable)
        shards = sum(s.shard_numel for s in engine.layout.segments if s.is_trainable)
        assert engine.memory_report()["gradient shards"] == 4 * shards < 4 * frozen


def test_pefts_fp32_adapters_on_a_bf16_model_train_as_in_ddp() -> None:
    spawn(_adapts, 2)
