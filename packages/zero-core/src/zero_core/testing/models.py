"""Toy models shared by tests. `Hard` combines much of what makes partitioning difficult."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_GENERATOR = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator, and make calls on other threads (simulated ranks) wait."""
    with _GENERATOR:
        torch.manual_seed(seed)
        yield


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.side = nn.Linear(width, width)

    def forward(self, x: Tensor, *, use_side: bool) -> Tensor:
        y = self.norm(x)
        y = self.down(torch.nn.functional.gelu(self.up(y)))
        if use_side:
            y = y + self.side(x)
        total: Tensor = x + y
        return total


class Hard(nn.Module):
    """Language model that is hard to partition.

    It has tied weights, a frozen block, a block called twice, branches that differ between ranks
    and steps, odd sizes, and a parameter with a single element.
    """

    def __init__(self, width: int = 11, vocab: int = 37, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.frozen = nn.ModuleList([_Block(width)])
        self.sometimes = nn.Parameter(torch.full((width,), 0.1))
        self.never = nn.Parameter(torch.full((5,), 0.5))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, *, use_sometimes: bool, use_side: bool) -> dict[str, Tensor]:
        """Return the next-token loss of ``ids`` (int64 [batch, length])."""
        ids = ids.to(self.gain.device)
        x = self.embed(ids[:, :-1]) * self.gain
        for block in (*self.blocks, *self.frozen, self.blocks[0]):
            x = block(x, use_side=use_side)
        if use_sometimes:
            x = x + self.sometimes
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def make_model(width: int = 11) -> Hard:
    with seeded(0):
        return Hard(width)


def batch(step: int, micro: int, rank: int) -> dict[str, Any]:
    """Return the inputs of `Hard` for one micro-step of one rank, seeded by the arguments."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return {
        "ids": torch.randint(0, 37, (2, 9), generator=generator),
        "use_sometimes": step % 3 == 1,
        "use_side": (step + rank) % 2 == 0 if step != 4 else rank == 0,
    }


class _WideBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.mix(x)[..., : x.shape[-1]]))
        return y


def wide_blocks(depth: int, width: int) -> nn.Sequential:
    """Return ``depth`` blocks of ``12 * width**2`` parameters each, on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*[_WideBlock(width) for _ in range(depth)])


class RootAndBlocks(nn.Module):
    """Blocks of equal size, and a root module of about ``root`` times a block's size."""

    def __init__(self, width: int, num_blocks: int, root: float) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Linear(width, int(root * width), bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)[:, : self.width]
        for block in self.blocks:
            x = block(x).relu()
        return x.float().sum()


class Tower(nn.Module):
    """Residual blocks of odd sizes between a first layer and a head.

    ``forward(x, used)`` runs only the blocks ``used``, in that order, and a block may occur twice.
    ``recompute``: how `torch.utils.checkpoint` is used. "pairs" checkpoints two blocks together.
    """

    def __init__(
        self,
        depth: int = 4,
        width: int = 7,
        *,
        recompute: Literal["none", "blocks", "reentrant", "pairs"] = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width + 2),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(width + 2, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, used: Sequence[int] | None = None) -> Tensor:
        """Return the mean square of the head's output for ``x`` [batch, width]."""
        x = self.first(x)
        order = range(len(self.blocks)) if used is None else used
        size = 2 if self.recompute == "pairs" else 1
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            if self.recompute == "none":
                x = self._run(x, chosen)
            else:
                is_reentrant = self.recompute == "reentrant"
                x = checkpoint(self._run, x, chosen, use_reentrant=is_reentrant)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def _run(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        for index in chosen:
            x = x + self.blocks[index](x)
        return x


def make_tower(depth: int = 4, width: int = 7, **settings: Any) -> Tower:
    with seeded(1):
        return Tower(depth, width, **settings)


def rows(number: int, rank: int, width: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, width, generator=generator)
