"""Optimizer that `initialize` returns: real groups, stepped by the engine alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_core import Engine


class ParameterOffload:
    """Holder of stage 3's hooks, which programs remove to generate with whole parameters.

    TRL's ``unwrap_model_for_generation`` does, within `GatheredParameters`. The engine needs no
    such care: its hooks leave gathered parameters alone. So there are none to take.

    Attributes:
        module: the model.
        forward_hooks: empty.
        backward_hooks: empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []
        vars(module)["ds_external_parameters"] = lambda: iter(())  # besides the module's own

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        pass


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """View of the optimizer that is driven, with its ``param_groups``. Schedulers accept it.

    Attributes:
        optimizer: the one that was given, or made as the configuration says.
        parameter_offload: see `ParameterOffload`; at stage 3 alone, as in DeepSpeed.
    """

    def __init__(self, core: Engine) -> None:
        given = core.optimizer.given
        super().__init__(given.param_groups, given.defaults)
        self.param_groups = given.param_groups
        self.optimizer = given
        self._core = core
        if core.config.zero_optimization.stage == 3:
            self.parameter_offload = ParameterOffload(core.module)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, as a gradient was not finite."""
        return self._core.optimizer.overflow

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, 1 without fp16."""
        return self._core.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        fp16 = self._core.config.fp16
        return fp16.enabled and fp16.loss_scale == 0.0

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        return self._core.is_gradient_accumulation_boundary()

    @property
    def _global_grad_norm(self) -> float | None:
        return self._core.get_global_grad_norm()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("call engine.step() instead of optimizer.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' ``grad``. The engine's own gradients stay."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def get_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    # The core's refuses both: the state is sharded.

    def state_dict(self) -> dict[str, Any]:
        return self._core.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._core.optimizer.load_state_dict(state_dict)

    def stepped(self) -> None:
        """Note that a step was taken, for schedulers that check it. Called by the engine."""
        self._opt_called = True
