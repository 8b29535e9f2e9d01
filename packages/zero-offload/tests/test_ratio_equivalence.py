"""Equal bits at every ratio, with torch's own update and with kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support.kernels import Lion, NamedLion, ReferenceKernel, cpu_adam
from support.tiers import BF16, FP16, FP32, RATIOS, Space, assert_same, group_of, make_tier, trained
from torch import Tensor, nn, optim


class NamedAdamW(optim.AdamW):
    is_elementwise = True
    update_rule = "adam"


class NamedSGD(optim.SGD):
    is_elementwise = True
    update_rule = "sgd"


class NamedAdagrad(optim.Adagrad):
    is_elementwise = True
    update_rule = "adagrad"


SGD = {"lr": 0.1, "momentum": 0.9}
SGD_FULL = {**SGD, "dampening": 0.3, "weight_decay": 0.01}
ADAGRAD_FULL = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}
BY_TORCH: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, SGD_FULL),
    (optim.SGD, {**SGD, "nesterov": True}),
    (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(1e-2)}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adadelta, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 2}),
    (optim.Rprop, {}),
    (Lion, {"lr": 1e-2}),
    # Fused kernels round a tensor's last elements differently, so splits are multiples of 16.
    *[(cls, {"lr": 1e-2, "fused": True}) for cls in (optim.AdamW, optim.Adam, optim.Adagrad)],
    (optim.SGD, {**SGD, "fused": True}),
]
BY_KERNEL: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    (optim.SGD, SGD_FULL),
    (optim.SGD, {**SGD, "nesterov": True}),
    (optim.SGD, {**SGD, "maximize": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adagrad, {**ADAGRAD_FULL, "maximize": True}),
    (NamedAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (NamedSGD, SGD),
    (NamedAdagrad, {"lr": 0.1}),
    (NamedLion, {"lr": 1e-2, "weight_decay": 0.1}),
]
ENDS = ("last", "first")


def _by_torch(
    cls: Any, groups: Sequence[Mapping[str, Any]], steps: range, *, grad_scale: float = 1.0
) -> Tensor:
    """Return the fp32 weights after training by torch.optim with one tensor per piece.

    Padding keeps its initial values.
    """
    space = Space()
    weights = space.initial.clone()
    params = [nn.Parameter(weights[a:b].clone()) for a, b, _ in space.pieces]
    # Adagrad reads its initial sum only from a constructor argument.
    initial = "initial_accumulator_value"
    settings = {initial: groups[0][initial]} if initial in groups[0] else {}
    optimizer = cls([{**groups[0], "params": params}], **settings)
    for step in steps:
        grad = space.grad(step) * grad_scale
        for param, (a, b, _) in zip(params, space.pieces, strict=True):
            param.grad = grad[a:b].clone()
        optimizer.step()
    for param, (a, b, _) in zip(params, space.pieces, strict=True):
        weights[a:b] = param.detach()
    return weights


@pytest.mark.parametrize(("cls", "settings"), BY_TORCH)
def test_torch_route_equals_torch_bit_for_bit_at_every_ratio(
    cls: Any, settings: dict[str, Any]
) -> None:
    plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in settings.items()}
    expected = _by_torch(cls, [group_of(cls, **plain)], range(7))
    more = (0.1, 0.2, 0.25, 0.66, 0.7, 0.71) if settings.get("fused") else ()
    for ratio in (*RATIOS, *more):
        found = trained(cls, [group_of(cls, **settings)], steps=range(7), ratio=ratio)
        assert torch.equal(found["master_weight"], expected), ratio
        assert torch.equal(found["params"], expected), ratio


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("cls", "settings"), BY_KERNEL)
def test_kernel_gives_torchs_numbers_and_the_same_bits_at_every_ratio(
    kernel: Any, cls: Any, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    groups, steps = [group_of(cls, **settings)], range(4)
    results = []
    for ratio in RATIOS if dtype == BF16 else (0.0, 0.3, 1.0):
        space = Space(dtype)
        tier = make_tier(space, cls, groups, ratio=ratio, kernel=kernel)
        assert all(part.tier is not None and part.tier.has_kernel for part in tier.report())
        options: dict[str, Any] = {"ratio": ratio, "kernel": kernel, "grad_scale": 0.5}
        results.append(trained(cls, groups, space=space, steps=steps, **options))
    for result in results:
        assert_same(result, results[0])
        assert torch.equal(result["params"], result["master_weight"].to(dtype))
    if dtype == FP32:
        # Square roots of Adam and Adagrad differ by a few ulps. Other rules use torch's operations
        # in torch's order.
        exact = not issubclass(cls, optim.Adagrad | optim.Adam)
        tolerance = 0 if exact else 1e-6
        expected = _by_torch(cls, groups, steps, grad_scale=0.5)
        masters = results[0]["master_weight"]
        torch.testing.assert_close(masters, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_compact_states_give_the_same_bits_at_every_ratio(
    kernel: Any, state_dtype: str, dtype: torch.dtype
) -> None:
    """Pieces are split at block boundaries. Padding may lose the lower halves of split masters."""
    groups = [group_of(optim.AdamW, lr=1e-2, weight_decay=0.1)]
    block: dict[str, Any] = {"kernel": kernel, "state_dtype": state_dtype, "padding": False}
    expected = trained(groups=groups, space=Space(dtype), **block)
    for ratio in (0.0, 0.001, 0.3, 0.6, 0.7, 0.999):
        assert_same(trained(groups=groups, space=Space(dtype), ratio=ratio, **block), expected)
    if state_dtype == "int8":
        tier = make_tier(Space(dtype), ratio=0.7, kernel=kernel, state_dtype=state_dtype)
        # Ratio 0.7 splits at element 108, which is aligned down to the start of piece [42, 253).
        assert tier.host_numel == 360 - 42


def _large_space() -> Space:
    space = Space(BF16)
    space.numel = 100_003
    space.initial = torch.randn(space.numel, generator=torch.Generator().manual_seed(1))
    space.pieces = [(0, 99_991, 0), (99_991, space.numel, 0)]
    space.params = [(0, space.initial.bfloat16())]
    return space


@pytest.mark.num_threads(2)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.3, 0.5])
@pytest.mark.parametrize("route", ["reference", "cpu_adam", "fused"])
def test_large_odd_space_is_cut_at_an_element_without_a_trace(
    route: str, ratio: float, end: str
) -> None:
    """The 100,003 elements are more than one thread's share in torch and in the kernel."""
    kernel = {"reference": ReferenceKernel, "cpu_adam": cpu_adam, "fused": lambda: None}[route]()
    groups = [group_of(optim.AdamW, lr=1e-2, fused=route == "fused")]
    results = []
    for share in (1.0, ratio):
        space = _large_space()
        block: dict[str, Any] = {"ratio": share, "kernel": kernel, "host_share": end}
        tier = make_tier(space, groups=groups, **block)
        num_more = tier.host_numel - round(share * space.numel)
        # The split of a fused update is aligned down by less than 16 elements.
        assert 0 <= (num_more if end == "last" else -num_more) < (16 if route == "fused" else 1)
        results.append(trained(groups=groups, space=space, **block))
    assert_same(results[0], results[1])
