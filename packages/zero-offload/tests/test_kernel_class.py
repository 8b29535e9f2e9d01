"""Optimizer classes with their own Adam kernel, such as CPUAdam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam, cpu_adam
from support.models import loop, make_model, weights
from support.tiers import BF16, FP32
from torch import nn, optim

from zero_offload import OffloadedOptimizer


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "weight_decay": 0.1}, {"params": rest, "adamw_mode": False}]


@pytest.mark.parametrize(("ratio", "dtype"), [(0.0, BF16), (0.3, FP32), (0.3, BF16), (1.0, BF16)])
@pytest.mark.parametrize(
    "settings", [{}, {"adamw_mode": False, "weight_decay": 0.1}, {"bias_correction": False}]
)
def test_cpu_adam_class_offloaded_equals_itself_bit_for_bit(
    dtype: torch.dtype, settings: dict[str, Any], ratio: float
) -> None:
    """A second offloaded optimizer loads the plain optimizer's state after two steps."""
    cls, plain, ours, late = cpu_adam().CPUAdam, *(make_model(dtype) for _ in range(3))
    source = cls(_groups(plain), lr=1e-2, **settings)
    optimizer = OffloadedOptimizer(cls, _groups(ours), lr=1e-2, ratio=ratio, **settings)
    target = OffloadedOptimizer(cls, _groups(late), lr=1e-3, ratio=ratio, **settings)
    first = range(2)
    assert loop(ours, optimizer, steps=first) == loop(plain, source, steps=first)
    late.load_state_dict(plain.state_dict())
    target.load_state_dict(source.state_dict())
    expected = loop(plain, source, steps=range(2, 4))
    for model, each in ((ours, optimizer), (late, target)):
        assert loop(model, each, steps=range(2, 4)) == expected
        assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_its_states_of_other_widths_are_not_misread(moments: str) -> None:
    cls, plain, ours = cpu_adam().CPUAdam, make_model(BF16), make_model(BF16)
    source = cls(plain.parameters(), lr=1e-2, state_dtype=moments)
    loop(plain, source, steps=range(2))
    target = OffloadedOptimizer(cls, ours.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"no (state|scalars).*(scale|remainder)"):
        target.load_state_dict(source.state_dict())


def test_a_kernel_that_is_passed_wins() -> None:
    model, other = make_model(), ReferenceAdam()
    loop(model, OffloadedOptimizer(cpu_adam().CPUAdam, model.parameters(), adam_kernel=other))
    assert other.calls


@pytest.mark.parametrize(
    ("settings", "place", "match"),
    [
        ({"group": {"state_dtype": "int8"}}, {}, "state_dtype = 'int8'"),
        ({"master_dtype": "split"}, {}, "master_dtype = 'split'"),
        ({"num_threads": 3}, {}, "num_threads = 3"),
        ({"bias_correction": False, "ratio": 0.5}, {"device": "meta"}, "bias_correction = False"),
        ({}, {"dtype": torch.float64}, "not float64"),
    ],
)
def test_what_the_class_cannot_do_here_is_refused_by_name(
    settings: dict[str, Any], place: dict[str, Any], match: str
) -> None:
    group = {"params": [nn.Parameter(torch.ones(4, **place))], **settings.get("group", {})}
    settings = {name: value for name, value in settings.items() if name != "group"}
    with pytest.raises(ValueError, match=match):
        OffloadedOptimizer(cpu_adam().CPUAdam, [group], **settings)


def test_a_class_that_declares_no_kernel_is_refused() -> None:
    class Other(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    with pytest.raises(ValueError, match="Other cannot be offloaded"):
        OffloadedOptimizer(Other, make_model().parameters())
