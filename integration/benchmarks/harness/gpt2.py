"""Hugging Face's GPT-2, apart from the others: programs for accelerators do without the library."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.harness.models import GptShape


class Gpt2(nn.Module):
    """Hugging Face's GPT-2 without dropout. Its forward gives the loss."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.transformer.h

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
