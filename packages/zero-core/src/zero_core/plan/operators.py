"""Calls of torch operators, as a plan counts them.

[Note: amounts]
operations  of matrix products, convolutions and attention, as `torch.utils.flop_counter` counts
            them; where one curve stands for all products, their bytes count as well
bytes       of all other operators: of the tensors that they read and write. Rows that an embedding
            looks up count, its table does not. Views have none
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from zero_core._torch import pytree

_LOOKUPS = ("embedding", "index", "index_select", "gather")
"""Operators of whose first argument a part is read."""
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
ATTENTION, ATTENTION_BACKWARD = "attention", "attention_backward"


@cache
def _flop_counter() -> Any:
    """Return the module. It is imported late: with torch 2.15 it imports Triton."""
    return importlib.import_module("torch.utils.flop_counter")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator.

    Attributes:
        kind: its name without overload; that of attention is `ATTENTION` for all kernels.
        dtype: name of the dtype that it computes in.
        amount: see [Note: amounts].
        is_product: whether the amount are operations.
        nbytes: bytes that a product reads and writes.
    """

    kind: str
    dtype: str
    amount: int
    is_product: bool
    nbytes: int = 0

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Operator:
        """Describe a call of ``func`` that returned ``out``."""
        packet = func.overloadpacket
        kind = packet.__name__
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        dtype = _dtype(written) or _dtype(read) or "float32"
        if kind.startswith(_ATTENTION):
            is_backward = "backward" in kind
            query, key, value = (t.shape for t in read[is_backward : 3 + is_backward])
            # Of grouped heads as of so many heads each: torch 2.10 counts no groups.
            key, value = (query[:-2] + shape[-2:] for shape in (key, value))
            if is_backward:
                operations = _flop_counter().sdpa_backward_flop_count(
                    read[0].shape, query, key, value
                )
            else:
                operations = _flop_counter().sdpa_flop_count(query, key, value)
            name = ATTENTION_BACKWARD if is_backward else ATTENTION
            return cls(name, dtype, int(operations), True)
        counts = _flop_counter().flop_registry
        if packet in counts:
            operations = counts[packet](*args, **kwargs, out_val=out)
            return cls(kind, dtype, int(operations), True, _nbytes(read) + _nbytes(written))
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return cls("view", dtype, 0, False)
        if kind in _LOOKUPS:
            read = [*read[1:], *written]
        return cls(kind, dtype, _nbytes(read) + _nbytes(written), False)


def _dtype(tensors: Iterable[Tensor]) -> str | None:
    found = next((t.dtype for t in tensors if t.is_floating_point()), None)
    return None if found is None else str(found).removeprefix("torch.")


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of ``tensors``, those of expanded ones once."""
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)
