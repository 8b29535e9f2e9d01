"""Tiny untrained language models, as folders to load them from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

__all__ = ["save_models"]

VOCABULARY, LENGTH = 64, 16


def save_models(root: Path) -> None:
    """Write ``root/gpt2`` and ``root/t5``, from seed 0 and without dropout."""
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=2 * LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).save_pretrained(root / "gpt2")
    T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
            dropout_rate=0.0,
        )
    ).save_pretrained(root / "t5")
