"""Quantized models are sharded at stage 3 while ``from_pretrained`` loads them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_core.testing import OwnPeakMemory, seeded, spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

WIDTH, DEPTH, VOCAB = 512, 32, 1024
BLOCK_NUMEL = 4 * WIDTH**2 + 3 * WIDTH * 1408
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
IDS = torch.arange(12)[None]
# Allows for other allocations: the file's index, imported modules, heap fragmentation.
SLACK_BYTES = 10 * 2**20


def _loaded(folder: str, kind: str) -> Any:
    """Load the model in ``folder``, quantized by ``BASES[kind]``."""
    # Imported here, because `_serve_deepspeed` must run before transformers is imported.
    from test_quantized_bases import BASES
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BASES[kind](), dtype=torch.bfloat16
    )


def _save(folder: Path, width: int, depth: int, **changes: Any) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": depth}
    with seeded(0):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def _serve_deepspeed() -> Any:
    """Serve zero-engine as deepspeed in this process. transformers must not be imported yet."""
    from zero_engine.script import hook

    assert "transformers.core_model_loading" not in sys.modules
    hook.install()
    import deepspeed

    return deepspeed


def _measure(rank: int, world_size: int, folder: str) -> None:
    _serve_deepspeed()
    import bitsandbytes as bnb
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(CONFIG)
    _loaded(f"{folder}/tiny", "nf4")  # imports everything before memory is measured
    with OwnPeakMemory() as kernel:  # a CPU's kernel uses memory for 16 numbers per weight
        bnb.nn.Params4bit(torch.ones(1408, WIDTH, dtype=torch.bfloat16), quant_type="nf4").to("cpu")
    with OwnPeakMemory() as peak:
        model = _loaded(folder, "nf4")
    # 4 bits per weight, and an fp32 scale for each 64 weights.
    whole = DEPTH * BLOCK_NUMEL * 9 // 16 + 2 * 2 * VOCAB * WIDTH
    unit = BLOCK_NUMEL * 2 + BLOCK_NUMEL * 9 // 16
    bound = whole // world_size + unit + kernel.nbytes + SLACK_BYTES
    found = (rank, peak.nbytes, kernel.nbytes, bound)
    assert whole // world_size * 0.9 < peak.nbytes < bound, found
    del model, config


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_holds_its_shards_and_one_unit_while_it_loads(tmp_path, world_size):
    _save(tmp_path / "tiny", 64, 1)
    spawn(_measure, world_size, _save(tmp_path, WIDTH, DEPTH))


def _adapt(model: Any, *, use_dora: bool) -> Any:
    import peft

    targets = ["q_proj", "down_proj"]
    with seeded(1):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=targets, use_dora=use_dora)
        )


def _use(rank: int, world_size: int, folder: str) -> None:
    deepspeed = _serve_deepspeed()
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for kind in ("nf4", "nf4, nested, stored as bf16", "LLM.int8", "torchao int8"):
        is_grown = kind == "nf4"
        use_dora = "nf4" in kind
        losses = []
        for is_sharded in (False, True):
            config = HfDeepSpeedConfig(CONFIG) if is_sharded else None
            model = _loaded(folder, kind)
            if is_grown:
                with seeded(2):
                    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
                    # Called directly too, because Gemma 4 resizes its other embeddings by this
                    # method.
                    first = model.get_input_embeddings()
                    model._get_resized_embeddings(first, VOCAB + 8, mean_resizing=False)
            model = _adapt(model, use_dora=use_dora).train()  # evaluation would use other kernels
            if is_sharded:
                trained = [p for p in model.parameters() if p.requires_grad]
                model, *_ = deepspeed.initialize(
                    model=model, config=CONFIG, model_parameters=trained
                )
            losses.append(model(input_ids=IDS, labels=IDS).loss.item())
            unset_hf_deepspeed_config()
            del config, model
            gc.collect()
        assert losses[0] == losses[1], (kind, losses)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_sharded_while_it_loads_computes_the_same(tmp_path: Path, is_tied: bool) -> None:
    spawn(_use, 2, _save(tmp_path, 64, 2, tie_word_embeddings=is_tied))
