"""What every contender computes, and over which links: plain data that ranks are started with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from zero_engine.bench.comm.link import NODES
from zero_engine.bench.gpt import Gpt, GptShape

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A model, the ranks that train it, and the rates of the link between their nodes."""

    shape: GptShape
    micro_batch: int
    """Samples per rank and step, the same ones in every step, so that the loss has to fall."""
    ranks_per_node: int
    rates: tuple[int, ...]
    """In Mbit/s; each is measured in turn by the same processes."""
    steps: int
    """Timed, per round and rate."""
    warmup: int
    """Untimed, before them at every rate."""

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` gave."""
        values = json.loads(text)
        shape, rates = GptShape(**values["shape"]), tuple(values["rates"])
        return cls(**{**values, "shape": shape, "rates": rates})

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @property
    def world_size(self) -> int:
        """Ranks of both nodes."""
        return len(NODES) * self.ranks_per_node

    @property
    def title(self) -> str:
        """In words."""
        ranks = "1 rank" if self.ranks_per_node == 1 else f"{self.ranks_per_node} ranks"
        return f"{self.shape.numel / 1e6:.0f} M parameters, 2 nodes of {ranks}"

    def model(self) -> Gpt:
        """The model, fp32 on the CPU, with the same weights on every rank."""
        torch.manual_seed(0)
        return Gpt(self.shape)

    def batch(self, rank: int) -> Tensor:
        """The rank's own token ids: int64, ``[micro_batch, context]``."""
        generator = torch.Generator().manual_seed(1 + rank)
        size = (self.micro_batch, self.shape.context)
        return torch.randint(self.shape.vocab, size, generator=generator)
