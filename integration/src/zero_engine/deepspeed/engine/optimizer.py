"""Optimizer that `initialize` returns: real groups, stepped by the engine alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core import Engine
from zero_engine.deepspeed.engine.loss_scaler import LossScaler


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


class OptimizerState(Mapping[nn.Parameter, dict[str, Any]]):
    """This rank's optimizer state, by parameter, copied to the CPU when it is read.

    Parameters of which this rank updates no element, and those without a step, are left out. The
    others have ``step`` and their states: at stage 0 whole, in the parameter's shape, otherwise
    this rank's part, 1-D. Of an optimizer that updates whole parameters it is the optimizer's own
    state of those that this rank updates. Take no exchange.
    """

    def __init__(self, core: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
        self._core = core
        self._groups = groups

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        whole = self._core.optimizer.given.state.get(param)
        if whole:  # of an optimizer that updates whole parameters
            return dict(whole)
        name = self._core.owns(param)
        num_steps = 0 if name is None else self._num_steps(name)
        if name is None or not num_steps:
            raise KeyError(param)
        is_whole = self._core.config.zero_optimization.stage == 0
        states = self._core.states.of(name).items()
        parts = {n: v.view(param.shape) if is_whole else v for n, v in states}
        return {"step": torch.tensor(float(num_steps)), **parts}

    def __setitem__(self, param: nn.Parameter, value: Any) -> NoReturn:
        self._refuse()

    def __delitem__(self, param: nn.Parameter) -> NoReturn:
        self._refuse()

    def clear(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError(
            "optimizer.state is a copy of this rank's part, which is read only: set a parameter's "
            "state by safe_set_full_optimizer_state or safe_set_local_optimizer_state"
        )

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self._groups:
            for param in group["params"]:
                name = self._core.owns(param)
                if name is not None and self._num_steps(name):
                    yield param

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _num_steps(self, name: str) -> int:
        return self._core.states.num_steps(name)


class Stepping(Protocol):
    """Protocol of the engine that `DeepSpeedOptimizer` reads and steps."""

    def step(self) -> None:
        """End a micro-step."""


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """View of the optimizer that is driven, with its ``param_groups``. Schedulers accept it.

    Attributes:
        optimizer: the one that was given, or made as the configuration says.
        state: this rank's optimizer state, by parameter; see `OptimizerState`.
        loss_scaler: the loss scale, its settings and state.
        parameter_offload: see `ParameterOffload`; at stage 3 alone, as in DeepSpeed.
    """

    def __init__(self, core: Engine, engine: Stepping) -> None:
        """``engine`` is the one whose optimizer this is. It is held weakly."""
        given = core.optimizer.given
        super().__init__(given.param_groups, given.defaults)
        self.param_groups = given.param_groups
        self.optimizer = given
        self._core = core
        self._engine = weakref.ref(engine)
        self.state: Any = OptimizerState(core, self.param_groups)
        self.loss_scaler = LossScaler(core)
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
        return self._core.loss_scaler.is_dynamic

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        return self._core.is_gradient_accumulation_boundary()

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's master weights at stages 1 and 2: a copy for each group, fp32, 1-D, CPU."""
        return self._masters("single_partition_of_fp32_groups", stages=(1, 2))

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's master weights at stage 3: a copy for each group, fp32, 1-D, on the CPU."""
        return self._masters("fp32_partitioned_groups_flat", stages=(3,))

    def _masters(self, name: str, stages: Sequence[int]) -> list[Tensor]:
        """Return this rank's master weights by group, under a name that these ``stages`` have."""
        stage = self._core.config.zero_optimization.stage
        if stage not in stages:
            raise AttributeError(f"at stage {stage} the optimizer has no {name!r}, as in DeepSpeed")
        groups = []
        for group in self.param_groups:
            owned = [self._core.owns(p) for p in group["params"] if p.requires_grad]
            parts = [self._core.states.get_local(n) for n in owned if n is not None]
            groups.append(torch.cat([torch.empty(0), *parts]))
        return groups

    @property
    def _global_grad_norm(self) -> float | None:
        return self._core.get_global_grad_norm()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the engine's ``step``, at an accumulation boundary: Lightning's Fabric does.

        Every rank must call it.

        Raises:
            ValueError: there is a ``closure``.
            RuntimeError: further micro-steps are to come before the step.
        """
        if closure is not None:
            raise ValueError("step(closure) cannot call the model again: run it before, and step()")
        engine = self._engine()
        if engine is None or not self.is_gradient_accumulation_boundary:
            raise RuntimeError(
                "optimizer.step() between two steps, by gradient_accumulation_steps: call "
                "engine.step() after each micro-step instead"
            )
        engine.step()

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

    def state_dict(self) -> dict[str, Any]:
        """Return groups and this rank's part of the state, in the form of torch's optimizers.

        A parameter's states are 1-D parts, whole at stage 0: see `OptimizerState`. To keep a
        training, save a checkpoint, which holds every rank's part.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = {id(param): number for number, param in enumerate(params)}
        groups = [
            {**group, "params": [numbers[id(param)] for param in group["params"]]}
            for group in self.param_groups
        ]
        state = {numbers[id(param)]: dict(own) for param, own in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse, as the core: a part of the state fits one stage and number of ranks alone."""
        self._core.optimizer.load_state_dict(state_dict)

    def stepped(self) -> None:
        """Note that a step was taken, for schedulers that check it. Called by the engine."""
        self._opt_called = True
