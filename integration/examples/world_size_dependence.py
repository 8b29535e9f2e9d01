"""Find modules whose results depend on more than their micro-batch, with torch alone.

torchrun --nproc-per-node=2 integration/examples/world_size_dependence.py
"""

import torch
import torch.distributed as dist
from torch import nn


class Counting(nn.Module):
    """A module whose results depend on the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class BranchingByRank(nn.Module):
    def forward(self, x):
        return x + dist.get_rank()


def compute(model, batch):
    """Return the outputs of innermost modules and the parameters' gradients, by name."""
    found = {}
    torch.manual_seed(0)  # the engine also seeds before each micro-batch
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: found.update({name: out}))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    model(batch).square().sum().backward()
    for handle in handles:
        handle.remove()
    for name, param in model.named_parameters():
        found[f"the gradient of {name}"], param.grad = param.grad, None
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def first_difference(one, other):
    differs = (n for n in one if n not in other or not torch.equal(one[n], other[n]))
    return next(differs, None)


def find_dependence(model, first, second):
    """Return what differs if ``first`` is computed again, after ``second``, or on rank 0."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    once = compute(model, first)
    changed = [n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])]
    again = compute(model, first)
    compute(model, second)
    after = compute(model, first)
    of_rank_0 = {name: value.detach().clone() for name, value in once.items()}
    for value in of_rank_0.values():
        dist.broadcast(value, 0)
    return {
        "computed again": first_difference(once, again),
        "computed after another one": first_difference(again, after),
        "computed by rank 0": first_difference(once, of_rank_0),
        "a buffer that the forward changes": next(iter(changed), None),
    }


def main():
    dist.init_process_group("gloo")
    first, second = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    suspects = {
        "nothing": (nn.Dropout(), None),
        "a history": (Counting(), "computed again"),
        "a branch by rank": (BranchingByRank(), "computed by rank 0"),
        "running statistics": (nn.BatchNorm1d(4), "a buffer that the forward changes"),
    }
    for what, (module, expected) in suspects.items():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 1))
        found = find_dependence(model, first, second)
        print(f"rank {dist.get_rank()}, {what}: {found}", flush=True)
        is_first_rank = expected == "computed by rank 0" and dist.get_rank() == 0
        assert {k for k, name in found.items() if name} >= {expected} - {None} or is_first_rank
        assert expected or not any(found.values())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
