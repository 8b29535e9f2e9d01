"""An Adam kernel's own optimizer class, as CPUAdam, in place of a torch class."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam
from support.tiers import RATIOS
from torch import Tensor, nn, optim

from zero_offload import OffloadedOptimizer


class _Front(optim.Optimizer):
    """An optimizer over a kernel, with CPUAdam's settings."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        state_dtype: str = "float32",
        master_dtype: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        modes = {"bias_correction": bias_correction, "adamw_mode": adamw_mode}
        dtypes = {"state_dtype": state_dtype, "master_dtype": master_dtype}
        super().__init__(params, {**settings, **modes, **dtypes})


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ReferenceAdam:
    """The kernel that the class declares."""
    kernel = ReferenceAdam()
    monkeypatch.setattr(_Front, "host_kernel", kernel, raising=False)
    return kernel


@pytest.fixture
def cpu_adam() -> Any:
    if importlib.util.find_spec("cpu_adam") is None:
        pytest.skip("the optional cpu-adam is not installed")
    return importlib.import_module("cpu_adam")


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(dtype)


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: range = range(4)) -> Tensor:
    for step in steps:
        data = torch.randn(11, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "weight_decay": 0.1}, {"params": rest, "adamw_mode": False}]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [{}, {"adamw_mode": False, "weight_decay": 0.1}, {"bias_correction": False}]
)
def test_cpu_adam_class_offloaded_equals_itself_bit_for_bit(
    cpu_adam: Any, dtype: torch.dtype, settings: dict[str, Any], ratio: float
) -> None:
    plain, ours = _model(dtype), _model(dtype)
    expected = _train(plain, cpu_adam.CPUAdam(_groups(plain), lr=1e-2, **settings))
    optimizer = OffloadedOptimizer(
        cpu_adam.CPUAdam, _groups(ours), lr=1e-2, ratio=ratio, **settings
    )
    assert torch.equal(_train(ours, optimizer), expected)


def test_its_state_dict_crosses_to_the_class_offloaded(cpu_adam: Any) -> None:
    plain, ours = _model(torch.bfloat16), _model(torch.bfloat16)
    source = cpu_adam.CPUAdam(_groups(plain), lr=1e-2)
    _train(plain, source, range(2))
    target = OffloadedOptimizer(cpu_adam.CPUAdam, _groups(ours), lr=1e-3, ratio=0.4)
    target.load_state_dict(source.state_dict())
    assert torch.equal(_train(ours, target, range(2, 4)), _train(plain, source, range(2, 4)))


@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_its_states_of_other_widths_are_not_misread(cpu_adam: Any, moments: str) -> None:
    plain, ours = _model(torch.bfloat16), _model(torch.bfloat16)
    source = cpu_adam.CPUAdam(plain.parameters(), lr=1e-2, state_dtype=moments)
    _train(plain, source, range(2))
    target = OffloadedOptimizer(cpu_adam.CPUAdam, ours.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"no (state|scalars).*(scale|remainder)"):
        target.load_state_dict(source.state_dict())


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_packages_own_kernel_does_the_update(package: ReferenceAdam, ratio: float) -> None:
    plain, ours = _model(), _model()
    expected = _train(
        plain, OffloadedOptimizer(optim.AdamW, plain.parameters(), adam_kernel=ReferenceAdam())
    )
    # torch's AdamW has another default weight decay
    optimizer = OffloadedOptimizer(_Front, ours.parameters(), weight_decay=1e-2, ratio=ratio)
    assert torch.equal(_train(ours, optimizer), expected)
    assert package.calls
    assert set(optimizer.param_groups[0]) >= {"adamw_mode", "bias_correction", "state_dtype"}


def test_a_kernel_that_is_passed_wins(package: ReferenceAdam) -> None:
    model, other = _model(), ReferenceAdam()
    _train(model, OffloadedOptimizer(_Front, model.parameters(), adam_kernel=other))
    assert other.calls
    assert not package.calls


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"state_dtype": "int8"}, "state_dtype = 'int8'"),
        ({"master_dtype": "split"}, "master_dtype = 'split'"),
        ({"num_threads": 3}, "num_threads = 3"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(
    package: ReferenceAdam, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        OffloadedOptimizer(_Front, _model().parameters(), **settings)


def test_what_only_the_host_computes_is_refused_on_an_accelerator(package: ReferenceAdam) -> None:
    params = [nn.Parameter(torch.ones(4, device="meta"))]
    with pytest.raises(ValueError, match="bias_correction = False"):
        OffloadedOptimizer(_Front, params, ratio=0.5, bias_correction=False)


def test_parameters_that_the_kernel_has_no_update_for_are_refused(package: ReferenceAdam) -> None:
    with pytest.raises(ValueError, match="not float64"):
        OffloadedOptimizer(_Front, _model(torch.float64).parameters())


def test_a_class_that_declares_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="_Front cannot be offloaded"):
        OffloadedOptimizer(_Front, _model().parameters())
