"""How zero-offload keeps optimizer state, as closed forms: where it cuts, and how many bytes.

See `zero_core.forecast`; the integration tests hold these forms against the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zero_core.blueprint import Blueprint
from zero_core.config import Config
from zero_core.optimizer import has_kernel_rule

__all__ = ["OffloadForm"]

_BLOCK_NUMEL = {"float32": 1, "int8": 128, "bfloat16": 1 << 20}
_FUSED_ALIGNMENT = 16


@dataclass(frozen=True)
class OffloadForm:
    """The form of the state on the host.

    Attributes:
        pieces: ``(start, stop, dtype)`` of each parameter's part of the local flat space, sorted.
        state_dtype: ``offload_optimizer.state_dtype``.
        alignment: at multiples of how many elements of a piece it may be cut.
    """

    pieces: Sequence[tuple[int, int, torch.dtype]]
    state_dtype: str
    alignment: int

    @classmethod
    def of(
        cls, drawn: Blueprint, config: Config, *, is_sharded: bool, is_accelerated: bool
    ) -> OffloadForm:
        """What a configuration asks for, on rank 0."""
        segments = drawn.layout.segments
        pieces = [
            (p.start, p.stop, segments[p.segment].dtype)
            for p in drawn.layout.pieces(0, is_sharded=is_sharded)
        ]
        state_dtype = config.zero_optimization.offload_optimizer.state_dtype
        alignment = 1 if is_accelerated else _BLOCK_NUMEL[state_dtype]
        is_known = has_kernel_rule(config, drawn.given)
        has_kernel = is_known and not any(g.get("amsgrad") for g in drawn.groups)
        is_fused = any(g.get("fused") for g in drawn.groups)
        if is_fused and not has_kernel and not is_accelerated:
            alignment = _FUSED_ALIGNMENT
        return cls(pieces, state_dtype, alignment)

    @property
    def is_compact(self) -> bool:
        """Whether moments are kept in fewer than 32 bits."""
        return self.state_dtype != "float32"

    def cut(self, ratio: float, numel: int) -> int:
        """The first element that the device keeps."""
        cut = round(ratio * numel)
        for start, stop, _ in self.pieces:
            if start <= cut < stop:
                return start + (cut - start) // self.alignment * self.alignment
        return cut

    def state_bytes(self, start: int, stop: int) -> int:
        """Compact moments of a range."""
        lengths = [b - a for a, b, _ in self._clipped(start, stop)]
        if self.state_dtype == "bfloat16":
            return 4 * sum(lengths)
        return sum(2 * n + 2 * 4 * -(-n // _BLOCK_NUMEL["int8"]) for n in lengths)

    def remainder_bytes(self, start: int, stop: int) -> int:
        """Lower halves of the master weights of bf16 parameters."""
        parts = self._clipped(start, stop)
        return sum(2 * (b - a) for a, b, dtype in parts if dtype == torch.bfloat16)

    def _clipped(self, start: int, stop: int) -> Iterator[tuple[int, int, torch.dtype]]:
        for low, high, dtype in self.pieces:
            if max(low, start) < min(high, stop):
                yield max(low, start), min(high, stop), dtype
