"""Tiny untrained language models without dropout, with odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from zero_core.testing import seeded

__all__ = ["CLASSES", "lm_config", "make_lm", "save_models", "token_rows"]

CLASSES: dict[str, Any] = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "t5": T5ForConditionalGeneration,
}
_CONFIGS: dict[str, Any] = {"gpt2": GPT2Config, "llama": LlamaConfig, "t5": T5Config}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": 16, "vocab_size": 61}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "llama": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "num_key_value_heads": 1}
    | {"vocab_size": 61, "tie_word_embeddings": False},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
    | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "dropout_rate": 0.0},
}


def lm_config(kind: str, **changes: Any) -> Any:
    return _CONFIGS[kind](**{**_SIZES[kind], **changes})


def make_lm(kind: str, seed: int = 0, **changes: Any) -> Any:
    with seeded(seed):
        return CLASSES[kind](lm_config(kind, **changes))


def token_rows(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    ids = torch.randint(2, 61, (count, 9), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def save_models(root: Path, *, layers: int = 2, width: int = 32) -> None:
    gpt2 = {"n_positions": 32, "n_embd": width, "n_layer": layers}
    t5 = {"d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": layers}
    for kind, sizes in {"gpt2": gpt2, "t5": t5}.items():
        make_lm(kind, vocab_size=64, **sizes).save_pretrained(root / kind)
