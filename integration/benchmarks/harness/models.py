"""GPT-2 in plain torch with three memory footprints, and Hugging Face's GPT-2 and T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

INITIAL_STD = 0.02


@dataclass(frozen=True)
class GptShape:
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    """Maximum number of tokens per sample."""

    @property
    def numel(self) -> int:
        """Elements of all parameters, with tied parameters counted once."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocab + self.context + 2) * self.width


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


class Gpt(nn.Module):
    """A GPT with learned positions and tied embeddings. Its forward returns the loss."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        for table in (self.embed, self.positions):
            nn.init.normal_(table.weight, std=INITIAL_STD)
        self.blocks = nn.ModuleList(_Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean cross-entropy of next tokens of ``ids``: int64, [batch, length]."""
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.loss(self.norm(x), ids)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the fp32 loss from the final norm's output ``x``: [batch, length, width]."""
        logits = self.head(x[:, :-1]).flatten(0, 1).float()
        return functional.cross_entropy(logits, ids[:, 1:].flatten())


class GptWithSmallLogits(Gpt):
    """`Gpt` whose backward recomputes the logits sample by sample.

    The loss equals that of `Gpt` up to the order of a sum. Logits of 10 x 1024 tokens with a
    vocabulary of 50257, and their gradients, would take 8 GB.
    """

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        of_one = super().loss
        rows = zip(torch.split(x, 1), torch.split(ids, 1), strict=True)
        losses = [checkpoint(of_one, *row, use_reentrant=False) for row in rows]
        return torch.stack(losses).mean()


class GptWithCheckpoints(GptWithSmallLogits):
    """`GptWithSmallLogits` with torch's activation checkpointing of every block."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y


class Gpt2(nn.Module):
    """Hugging Face's GPT-2 without dropout. Its forward returns the loss."""

    def __init__(self, shape: GptShape) -> None:
        # Imported here because accelerator benchmarks run without transformers.
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes: dict[str, Any] = {"n_layer": shape.layers, "n_embd": shape.width}
        sizes |= {"n_head": shape.heads, "n_positions": shape.context, "vocab_size": shape.vocab}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.transformer.h

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


class T5(nn.Module):
    """Hugging Face's T5 in t5-large's proportions, without dropout. Its forward returns the loss.

    The encoder and the decoder each have ``shape.layers`` layers. ``ids`` are both source and
    target. The head is tied to the embedding.
    """

    def __init__(self, shape: GptShape) -> None:
        # Imported here because accelerator benchmarks run without transformers.
        from transformers.models.t5 import T5Config, T5ForConditionalGeneration

        super().__init__()
        sizes: dict[str, Any] = {"d_model": shape.width, "d_kv": shape.width // shape.heads}
        sizes |= {"d_ff": 4 * shape.width, "num_layers": shape.layers, "num_heads": shape.heads}
        sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        config = T5Config(**sizes, vocab_size=shape.vocab, dropout_rate=0.0, use_cache=False)
        self.model = T5ForConditionalGeneration(config)

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.model.encoder.block, *self.model.decoder.block]

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def generate(self, ids: Tensor, *, beams: int) -> Tensor:
        """Return the best beam's tokens: int64, the start token and as many tokens as the source.

        All samples get equally many tokens, so that all ranks run equally many forwards.
        """
        length = ids.shape[1]
        found: Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            min_new_tokens=length,
            max_new_tokens=length,
            do_sample=False,
            use_cache=True,
        )
        return found


MODELS: Mapping[str, Callable[[GptShape], Any]] = {
    "plain": Gpt,
    "small_logits": GptWithSmallLogits,
    "checkpointed": GptWithCheckpoints,
    "gpt2": Gpt2,
    "t5": T5,
}
"""Each model has ``blocks``, and its forward returns the loss."""


def find_device() -> torch.device:
    """Return the accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
