"""Model with mixtures of experts, whose ranks may call different experts or none."""

import torch
from torch import nn

from zero_core.testing.models import seeded

MIXTURE_WIDTH, NUM_EXPERTS = 6, 8


class Mixture(nn.Module):
    """Mixture of experts that calls only used experts, ordered by their first token."""

    def __init__(self):
        super().__init__()
        width = MIXTURE_WIDTH
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width, bias=False))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x, allowed):
        weights = self.router(x)[:, allowed].softmax(dim=-1)
        best, chosen = weights.topk(1, dim=-1)
        out = torch.zeros_like(x)
        for place in dict.fromkeys(chosen[:, 0].tolist()):
            tokens = torch.where(chosen[:, 0] == place)[0]
            out = out.index_add(0, tokens, self.experts[allowed[place]](x[tokens]) * best[tokens])
        return out


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(MIXTURE_WIDTH, MIXTURE_WIDTH)
        self.mixture = Mixture()
        self.after = nn.LayerNorm(MIXTURE_WIDTH)

    def forward(self, x, allowed):
        x = x + torch.tanh(self.before(x))
        # Without allowed experts, this rank skips the mixture.
        return self.after(x + self.mixture(x, allowed) if allowed else x)


class MixtureModel(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded(3):
            self.first = nn.Linear(MIXTURE_WIDTH, MIXTURE_WIDTH)
            self.blocks = nn.ModuleList(_Block() for _ in range(3))
            self.head = nn.Linear(MIXTURE_WIDTH, 1)

    def forward(self, x, allowed):
        x = self.first(x)
        for block, own in zip(self.blocks, allowed, strict=True):
            x = block(x, own)
        return self.head(x).square().mean()


def routed_batch(number, rank, counts=(8, 1, 2)):
    """Draw 1 to 4 tokens, and for each block of `MixtureModel` one of ``counts`` experts."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    num_tokens = int(torch.randint(1, 5, (), generator=generator))
    orders = [torch.randperm(NUM_EXPERTS, generator=generator) for _ in range(3)]
    allowed = [order[: counts[number % len(counts)]].tolist() for order in orders]
    return torch.randn(num_tokens, MIXTURE_WIDTH, generator=generator), allowed
