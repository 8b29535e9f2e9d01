"""What every contender computes: one GPT-2, random tokens, the same optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["ADAMW", "Workload"]

VOCAB = 8192
HEAD_WIDTH = 64
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Hyperparameters of everyone's AdamW."""


@dataclass(frozen=True)
class Workload:
    """Size of the model and of the measurement; fp32 throughout."""

    layers: int
    width: int
    context: int
    micro_batch: int
    ranks: int
    threads: int
    """Of each rank."""
    steps: int
    """Timed, per round."""
    warmup: int
    """Untimed, before them."""

    @property
    def title(self) -> str:
        """In words."""
        numel = 12 * self.layers * self.width**2 + (VOCAB + self.context) * self.width
        return f"{numel / 1e6:.0f} M parameters, {self.ranks} ranks"

    def model(self) -> GPT2LMHeadModel:
        """The model, with the same weights on every rank and in every process."""
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=self.context,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.width // HEAD_WIDTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)

    def batches(self, rank: int) -> Iterator[Tensor]:
        """Token ids for ever: int64, ``[micro_batch, context]``, different on every rank."""
        generator = torch.Generator().manual_seed(1 + rank)
        while True:
            yield torch.randint(VOCAB, (self.micro_batch, self.context), generator=generator)
