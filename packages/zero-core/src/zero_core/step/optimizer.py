"""The optimizer that the user sees: real ``param_groups`` over the model's own parameters.

The state tier makes the update itself, on flat slices. `EngineOptimizer` keeps the groups of the
optimizer that was given to ``build``: the same dicts, so that schedulers attached to it work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero_core._torch import mark_stepped
from zero_core.comm.meter import Meter
from zero_core.core.passes import Passes
from zero_core.step.gradient import StepGradient


class EngineOptimizer(torch.optim.Optimizer):
    """Optimizer over the groups of the one that was ``given``, stepped by the engine alone."""

    _has_all_groups = False  # while torch adds the groups

    def __init__(
        self,
        given: torch.optim.Optimizer,
        gradient: StepGradient,
        passes: Passes,
        meter: Meter,
        names: Mapping[int, str],
    ) -> None:
        """Take the groups of ``given``. ``names``: of the model's parameters, by ``id``."""
        super().__init__(given.param_groups, given.defaults)
        self._has_all_groups = True
        self._names = names
        self._grouped = {id(p) for group in given.param_groups for p in group["params"]}
        self._num_params = [len(group["params"]) for group in given.param_groups]
        self.param_groups = given.param_groups
        self.given = given
        self.overflow = False  # whether the last step was skipped
        self._gradient = gradient
        self._passes = passes
        self._meter = meter
        self._may_step = False
        self.state = given.state
        self.guard = given.register_step_pre_hook(self._refuse_step)  # until it is removed

    def engine_step(self) -> None:
        """Run ``step`` with all its hooks, for `Engine.step`."""
        self._may_step = True
        try:
            self.step()
        finally:
            self._may_step = False
        # Schedulers made over the given optimizer look there for a sign that it has stepped.
        mark_stepped(self.given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after build: master weights and states are laid out for the groups of then."""
        if self._has_all_groups:
            params = param_group["params"]
            self._refuse_param(params if isinstance(params, Tensor) else next(iter(params), None))
        super().add_param_group(param_group)

    def check_groups(self) -> None:
        """Raise if the groups hold other parameters than at first."""
        if [len(group["params"]) for group in self.param_groups] != self._num_params:
            found = (p for group in self.param_groups for p in group["params"])
            self._refuse_param(next((p for p in found if id(p) not in self._grouped), None))

    def _refuse_param(self, param: Any) -> NoReturn:
        if isinstance(param, tuple):  # torch takes (name, parameter) too
            param = param[1]
        of_model = self._names.get(id(param))
        shape = tuple(param.shape) if isinstance(param, Tensor) else "none"
        what = of_model or f"of shape {shape}, which the model did not have at build()"
        raise RuntimeError(
            f"the optimizer's groups were changed after build() (parameter {what}): the engine "
            "has no gradient, master weight or state for it. Put every parameter that is ever to "
            "be trained into a group before build(), and freeze it by requires_grad_(False) until "
            "then"
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused outside the engine: gradients are in the engine, not on the parameters."""
        if not self._may_step or closure is not None:
            raise RuntimeError("call engine.step(): the engine drives its optimizer")
        self._gradient.apply()
        self._meter.end_step()  # what is published counts for the next step
        self._passes.units.values_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step, not the count of micro-steps."""
        self._gradient.policy.check_unused("dropping gradients")
        self._passes.backward.discard()

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            "the optimizer state is sharded over ranks: use engine.save_checkpoint(), which "
            "stores it for any stage and world size"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("the optimizer state is sharded: use engine.load_checkpoint()")

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._may_step:  # a tier of whole parameters steps the given optimizer itself
            raise RuntimeError(
                "this optimizer was given to zero_core.build(): call engine.step() instead of "
                f"{type(optimizer).__name__}.step()"
            )
