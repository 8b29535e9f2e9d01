"""Form of a parameter's entry in a torch optimizer's ``state``.

It is probed: the optimizer takes one step on a parameter of two elements. From the entry before and
after follow the names and forms of elementwise states and scalars, for any optimizer class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.protocols import OptimizerClass
from zero_offload.steppers.stepper import check_num_steps

_PROBE_NUMEL = 2


def make_optimizer(
    optimizer_class: OptimizerClass, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer over groups that carry every setting themselves.

    The constructor gets the first group's settings too: some count there alone, as Adagrad's
    ``initial_accumulator_value``.
    """
    names = list(inspect.signature(optimizer_class).parameters)[1:]
    settings = {name: param_groups[0][name] for name in names if name in param_groups[0]}
    return optimizer_class(param_groups, **settings)


@dataclass(frozen=True, slots=True)
class EntryTemplate:
    """A parameter's state entry: at construction (mostly empty), and after its first update."""

    initial: Mapping[str, Any]
    stepped: Mapping[str, Any]

    def elementwise(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the states with one number per element."""
        return {k: v.dtype for k, v in self.stepped.items() if is_elementwise(v, _PROBE_NUMEL)}

    def fresh(self, numel: int) -> dict[str, Any]:
        """An entry as the constructor makes it, for a piece of ``numel`` elements."""
        return {k: _resized(v, numel) for k, v in self.initial.items()}

    def restored(
        self, scalars: Mapping[str, float], elements: Callable[[str, torch.dtype], Tensor]
    ) -> dict[str, Any]:
        """An entry after ``num_steps`` updates: ``elements`` gives each state's memory.

        Raises:
            ValueError: a scalar that the optimizer needs is missing, or it has no such scalar.
        """
        count = check_num_steps(scalars)
        values = {"step": count, **scalars}
        own = {k for k, v in self.stepped.items() if not is_elementwise(v, _PROBE_NUMEL)}
        unknown = sorted(set(scalars) - own - {"num_steps", "step"})
        missing = sorted(k for k in own - set(values) if self.stepped[k] is not None)
        if unknown or missing:
            raise ValueError(
                f"the state is another optimizer's: scalars {unknown} are unknown to this one, "
                f"{missing} are missing"
            )
        return {
            k: elements(k, v.dtype) if k not in own else _with_value(v, values.get(k))
            for k, v in self.stepped.items()
        }


def is_elementwise(value: Any, numel: int) -> bool:
    """Whether a state entry has one number per element of a 1-D piece of ``numel`` elements.

    Raises:
        ValueError: it is a tensor of any other shape but a single number.
    """
    if not isinstance(value, Tensor):
        return False
    if value.shape == (numel,):
        return True
    if value.numel() != 1:
        raise ValueError(
            f"the optimizer keeps a state of shape {tuple(value.shape)} for {numel} elements: "
            f"its update is not elementwise and cannot be offloaded"
        )
    return False


def _resized(value: Any, numel: int) -> Any:
    if is_elementwise(value, _PROBE_NUMEL):
        return value.new_full((numel,), value[0].item())
    return value.clone() if isinstance(value, Tensor) else value


def _with_value(template: Any, value: float | None) -> Any:
    """``value`` in the form of the template: a tensor stays one, an int stays an int."""
    if value is None or template is None:
        return template
    if isinstance(template, Tensor):
        return torch.full_like(template, value)
    return type(template)(value)


def probe_entry(
    optimizer_class: OptimizerClass,
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> EntryTemplate:
    """Return the state entry of an optimizer before and after a step on two elements.

    Raises:
        ValueError: the state shows that the update is not elementwise.
    """
    ones = torch.ones(_PROBE_NUMEL, dtype=dtype, device=device)
    param = nn.Parameter(ones.clone())
    optimizer = make_optimizer(optimizer_class, [{**group, "params": [param]}])
    initial = {k: _copy(v) for k, v in optimizer.state.get(param, {}).items()}
    param.grad = ones
    optimizer.step()
    template = EntryTemplate(initial, dict(optimizer.state.get(param, {})))
    template.elementwise()
    return template


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
