"""Two questions about autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["is_in_backward", "requires_grad"]


def requires_grad(output: object) -> bool:
    """Whether a tensor in ``output``, of any nesting, requires a gradient."""
    if isinstance(output, Tensor):
        return output.requires_grad
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(output))


def is_in_backward() -> bool:
    """Whether a backward is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
