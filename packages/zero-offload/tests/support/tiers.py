"""A small flat space, tiers for it, and a loop that trains them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from zero_offload.flat.geometry import Geometry
from zero_offload.memory.host_memory import HostMemory
from zero_offload.protocols import StateTier
from zero_offload.rules.resolve import resolve_rule
from zero_offload.settings import OffloadSettings
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.stepper import Stepper
from zero_offload.steppers.torch_stepper import TorchStepper
from zero_offload.tier import create_tier, make_device_tier
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.tiers.twin import TwinTier
from zero_offload.transfers.mover import HostMover

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RATIOS = (0.0, 0.001, 0.3, 0.5, 0.999, 1.0)

_PASSED = ("names", "param_store", "upload_codec")


class Space:
    """A flat space of two shards with several pieces, and gradients by step.

    The first shard has adjacent pieces, the second has gaps. Both end in padding.
    """

    numel = 360

    def __init__(self, dtype: torch.dtype = torch.float32, *, num_groups: int = 1) -> None:
        other = 1 % num_groups
        self.pieces = [(0, 37, 0), (37, 42, other), (42, 253, 0)]
        self.pieces += [(260, 261, 0), (272, 336, other)]
        generator = torch.Generator().manual_seed(7)
        self.initial = torch.randn(self.numel, generator=generator)
        self.dtype = dtype
        first, second = self.initial.to(dtype).split([256, 104])
        self.params = [(0, first.clone()), (256, second.clone())]

    @property
    def every(self) -> range:
        return range(len(self.pieces))

    def grad(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        return torch.randn(self.numel, generator=generator).to(self.dtype)

    def flat_params(self) -> Tensor:
        return torch.cat([t for _, t in self.params])

    def covered(self) -> Tensor:
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for start, stop, _ in self.pieces:
            mask[start:stop] = True
        return mask

    def geometry(self, **keys: Any) -> Geometry:
        return Geometry(self.numel, self.pieces, self.params, 1, **keys)


def group_of(cls: type[torch.optim.Optimizer], **settings: Any) -> dict[str, Any]:
    """Return the optimizer's settings with all defaults."""
    return dict(cls([nn.Parameter(torch.zeros(1))], **settings).defaults)


ADAM = [group_of(optim.AdamW, lr=1e-2)]
"""Parameter groups of tests that need no other settings."""


def make_tier(
    space: Space,
    cls: type[torch.optim.Optimizer] = optim.AdamW,
    groups: Sequence[Mapping[str, Any]] = ADAM,
    *,
    kernel: Any = None,
    on: torch.device = CPU,
    micro_steps: int = 0,
    **options: Any,
) -> TwinTier:
    """Create a tier with the space's initial values as master weights.

    ``options`` are arguments of `create_tier` named in `_PASSED`, or keys of ``offload_optimizer``.
    """
    passed = {name: options.pop(name) for name in _PASSED if name in options}
    tier = create_tier(
        numel=space.numel,
        pieces=space.pieces,
        params=space.params,
        device=on,
        optimizer_class=cls,
        groups=groups,
        config={"offload_optimizer": {"device": "cpu", **options}},
        adam_kernel=kernel,
        device_tier=make_device_tier,
        **passed,
    )
    if micro_steps:
        tier.expect_micro_steps(micro_steps)
    tier.write_state("master_weight", 0, space.initial)
    return tier


def offload_tiers(
    geometry: Geometry, kernel: Any, cls: Any = optim.AdamW, groups: Any = ADAM
) -> OffloadTiers:
    return OffloadTiers(
        geometry,
        OffloadSettings(),
        device=CPU,
        optimizer_class=cls,
        groups=groups,
        adam_kernel=kernel,
        device_tier=make_device_tier,
    )


def host_tier(
    space: Space,
    kernel: Any,
    cls: Any = optim.AdamW,
    groups: Any = ADAM,
    *,
    state_dtype: str = "float32",
    thread: Any = None,
    published_numel: int | None = None,
    torch_stepper: type[TorchStepper] = TorchStepper,
    mover_class: type[HostMover] = HostMover,
    device: torch.device = CPU,
    memory: HostMemory | None = None,
    **mover_keys: Any,
) -> tuple[HostTier, HostMover]:
    """Create a `HostTier` and its mover. Without a kernel torch computes the updates."""
    geometry = space.geometry(published_numel=published_numel)
    mover = mover_class(geometry, device, memory or HostMemory(should_pin=False), **mover_keys)
    is_in_place = not mover_keys.get("is_staged", False)
    stepper: Stepper
    if kernel is None:
        stepper = torch_stepper(geometry, CPU, cls, groups, is_in_place=False)
    else:
        rule = resolve_rule(kernel, cls, groups, state_dtype)
        assert rule is not None
        stepper = MemoryStepper(geometry, rule, groups, is_in_place=is_in_place, upper=mover.hold)
    tier = HostTier(geometry, stepper, mover, thread)
    tier.write_state("master_weight", 0, space.initial)
    return tier, mover


def offer(tier: StateTier, space: Space, step: int) -> None:
    """Offer a step's gradient in two ranges, the last first, as backward does."""
    grad = space.grad(step)
    for start, shard in reversed(space.params):
        release = tier.offer_grad(start, grad[start : start + shard.numel()].clone())
        if release is not None:
            release()


def train(
    tier: StateTier,
    space: Space,
    groups: Sequence[Mapping[str, Any]] = ADAM,
    steps: range = range(4),
    *,
    active: Sequence[int] | None = None,
    grad_scale: float = 1.0,
) -> None:
    for step in steps:
        offer(tier, space, step)
        tier.step(groups, space.every if active is None else active, grad_scale=grad_scale)
    tier.wait_params(0, space.numel)


def snapshot(tier: StateTier, space: Space, *, padding: bool = True) -> dict[str, Tensor]:
    """Return all states and scalars of the tier, and the parameters.

    ``padding=False`` excludes the padding.
    """
    found = {name: tier.read_state(name, 0, space.numel) for name in tier.state_names()}
    found["params"] = space.flat_params().clone()
    if not padding:
        found = {name: values[space.covered()] for name, values in found.items()}
    for i in space.every:
        scalars = tier.read_scalars(i)
        found[f"scalars{i}"] = torch.tensor([scalars[k] for k in sorted(scalars)])
    return found


def trained(
    cls: type[torch.optim.Optimizer] = optim.AdamW,
    groups: Sequence[Mapping[str, Any]] = ADAM,
    *,
    space: Space | None = None,
    steps: range = range(4),
    grad_scale: float = 1.0,
    padding: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    space = Space() if space is None else space
    tier = make_tier(space, cls, groups, **options)
    train(tier, space, groups, steps, grad_scale=grad_scale)
    return snapshot(tier, space, padding=padding)


def copy_state(
    source: StateTier,
    target: StateTier,
    space: Space,
    bounds: Sequence[int] = (),
    *,
    scalars_first: bool = True,
) -> None:
    """Copy all state to ``target``, in ranges that end at ``bounds``."""
    ends = [0, *bounds, space.numel]
    for is_scalars in (scalars_first, not scalars_first):
        if is_scalars:
            for i in space.every:
                target.write_scalars(i, source.read_scalars(i))
        else:
            for name in source.state_names():
                for start, stop in pairwise(ends):
                    target.write_state(name, start, source.read_state(name, start, stop))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def workers() -> set[threading.Thread]:
    """Return the running threads of host tiers."""
    return {t for t in threading.enumerate() if t.name.startswith("zero-offload")}


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)
