"""Hugging Face models in the engine: text generation at stage 3, and LoRA by peft."""

from __future__ import annotations

import importlib
from typing import Any

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


def _generate(model: Any) -> list[Tensor]:
    """Twelve greedy and twelve sampled tokens."""
    model.eval()
    prompt = _ids(7, 0)
    with torch.no_grad():
        found = []
        for is_sampled in (False, True):
            torch.manual_seed(3)
            found.append(
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=12,
                    min_new_tokens=12,
                    do_sample=is_sampled,
                )
            )
    model.train()
    return found


def _generates(rank: int, world_size: int) -> None:
    made: list[_Counting] = []

    def factory(native: Any, **kwargs: Any) -> _Counting:
        made.append(_Counting(native))
        return made[-1]

    engine = zero_core.build(_gpt2(), Case(stage=3).config(), collectives=factory)
    for step in range(3):
        with engine.gathered() as module:
            # The root and three blocks, once each (after the first step: whatever is gathered
            # already is not gathered again).
            assert made[-1].num_calls == 4
            tokens = _generate(module)
            assert made[-1].num_calls == 4  # none per token
        plain = _gpt2()
        plain.load_state_dict(engine.full_state_dict())
        for found, expected in zip(tokens, _generate(plain), strict=True):
            assert found.shape == (2, 9 + 12)
            assert torch.equal(found, expected)
        ids = _ids(step, rank)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        made[-1].num_calls = 0
    assert engine.skipped_steps == 0


def test_generated_tokens_are_the_plain_models_without_a_gather_per_token() -> None:
    spawn(_generates, 2)


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
