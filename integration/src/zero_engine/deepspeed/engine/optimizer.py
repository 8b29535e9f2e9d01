"""Optimizer that `initialize` returns: a view of the optimizer that the engine steps."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core import Engine
from zero_core.adapters import ObjectMethods
from zero_engine.deepspeed.engine.facts import value_of
from zero_engine.deepspeed.zero.partition_parameters import AtEnd


class ParameterOffload:
    """Holder of stage 3's hooks, which TRL's ``unwrap_model_for_generation`` removes and restores.

    The engine's own hooks ignore gathered parameters, so ``forward_hooks`` holds one handle without
    effect.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []
        self.register(module)

    def register(self, module: nn.Module, count: Any = None) -> None:
        """Restore the handle. Programs call this method by DeepSpeed's name."""
        self.forward_hooks = [RemovableHandle(OrderedDict())]

    _register_deepspeed_module = register


class LossScaler:
    """View of an engine's loss scale, under the names of DeepSpeed's ``loss_scaler``."""

    scale_factor = 2.0

    def __init__(self, core: Engine) -> None:
        self._core = core

    cur_scale = loss_scale = property(value_of("_core.loss_scaler.scale"))  # 1 without fp16
    dynamic = dynamic_loss_scale = property(value_of("_core.loss_scaler.is_dynamic"))
    use_grad_scaling = property(value_of("_core.config.fp16.enabled"))
    scale_window = property(value_of("_core.loss_scaler.config.loss_scale_window"))
    min_scale = min_loss_scale = property(value_of("_core.loss_scaler.config.min_loss_scale"))
    # Overflows until the scale is halved: `delayed_shift` initially, `cur_hysteresis` at present.
    delayed_shift = property(value_of("_core.loss_scaler.config.hysteresis"))
    cur_hysteresis = property(value_of("_core.loss_scaler.hysteresis_left"))
    # Whether every step without overflow resets `cur_hysteresis`.
    consecutive_hysteresis = property(value_of("_core.loss_scaler.config.consecutive_hysteresis"))
    cur_iter = property(value_of("_core.global_steps"))

    @property
    def last_overflow_iter(self) -> int | None:
        """Number of steps before the last overflow: -1 without one, None if the scale is fixed."""
        scaler = self._core.loss_scaler
        last = self._core.global_steps - scaler.steps_since_overflow - 1
        return last if scaler.is_dynamic else None

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self._core.scale(loss, over=1)


class OptimizerState(Mapping[nn.Parameter, dict[str, Any]]):
    """This rank's optimizer state by parameter, copied to the CPU when it is read.

    A value is {} before the first step, or if this rank updates no element of the parameter.
    Otherwise the value has ``step``, the optimizer's other scalars, and the states. At stage 0
    states have the parameter's shape. At other stages they are this rank's part, 1-D. If one rank
    updates a whole parameter, that rank has the optimizer's own state. Reading is not collective.
    """

    def __init__(self, core: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
        self._core = core
        self._groups = groups

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        name = self._core.owns(param)
        if name is None or not self._has_state(param, name):
            return {}  # as torch's optimizers do before their first step
        states = self._core.states.of(name)
        if self._core.states.is_whole(name):
            return states
        scalars = dict(self._core.states.scalars(name))
        step = torch.tensor(float(scalars.pop("num_steps")))
        if self._core.config.zero_optimization.stage == 0:
            # Elements are in memory order, which the parameter's strides describe.
            like = param.shape, param.stride()
            states = {what: part.as_strided(*like) for what, part in states.items()}
        return {**scalars, "step": step, **states}

    def __contains__(self, param: object) -> bool:
        return any(param is found for found in self)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "optimizer.state is a copy of this rank's part, which is read only: set a parameter's "
            "state by safe_set_full_optimizer_state or safe_set_local_optimizer_state"
        )

    __setitem__ = __delitem__ = clear = _refuse

    def __iter__(self) -> Iterator[nn.Parameter]:
        for group in self._groups:
            for param in group["params"]:
                name = self._core.owns(param)
                if name is not None and self._has_state(param, name):
                    yield param

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _has_state(self, param: nn.Parameter, name: str) -> bool:
        if self._core.states.is_whole(name) and not self._core.optimizer.given.state.get(param):
            return False  # another rank updates the whole parameter
        return self._core.states.scalars(name)["num_steps"] > 0


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """View of the optimizer that the engine steps. Schedulers accept it.

    At stage 0 in fp32 DeepSpeed returns the optimizer itself. In that case the view compares equal
    to the optimizer and is an instance of its class.

    Attributes:
        optimizer: the optimizer that was given, or made from the configuration.
        state: this rank's optimizer state, by parameter; see `OptimizerState`.
        loss_scale_config: the same as ``loss_scaler``, at stage 0 in 16 bits only, as in DeepSpeed.
        parameter_offload: see `ParameterOffload`; at stage 3 only, as in DeepSpeed.
    """

    _is_bare = False  # whether DeepSpeed would return the optimizer itself

    def __init__(self, core: Engine, engine: Any) -> None:
        given = core.optimizer.given
        super().__init__(given.param_groups, given.defaults)
        self.param_groups = given.param_groups
        self.optimizer = given
        self._core = core
        self._engine = weakref.ref(engine)
        self.state: Any = OptimizerState(core, self.param_groups)
        trained = (core.owns(p) for group in self.param_groups for p in group["params"])
        names = [name for name in trained if name is not None]
        if not any(map(core.states.is_whole, names)):  # ``given`` holds no state: show the engine's
            own, vars(given)["state"] = given.state, self.state
            core.remove_at_end([AtEnd(lambda: vars(given).update(state=own))])
        self.loss_scaler = LossScaler(core)
        if not core.config.zero_optimization.stage and core.config.compute_dtype:
            self.loss_scale_config = self.loss_scaler
        if core.config.zero_optimization.stage == 3:
            self.parameter_offload = ParameterOffload(core.module)
            none = [(core.module, lambda: iter(()))]  # no external parameters
            core.remove_at_end([ObjectMethods("ds_external_parameters", none)])
        # Set last, because torch's constructor needs `__class__` to be this class.
        self._is_bare = not core.config.zero_optimization.stage and not core.config.compute_dtype

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class that ``isinstance`` finds besides ``type(self)``."""
        return type(self.optimizer) if self._is_bare else type(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (self._is_bare and self.optimizer is other)

    def __hash__(self) -> int:
        return hash(self.optimizer) if self._is_bare else object.__hash__(self)

    overflow = property(value_of("_core.optimizer.overflow"))  # whether the last step overflowed
    loss_scale = cur_scale = property(value_of("_core.loss_scale"))
    dynamic_loss_scale = property(value_of("_core.loss_scaler.is_dynamic"))
    needs_scaler = value_of("_core.loss_scaler.is_dynamic")

    is_gradient_accumulation_boundary = property(
        lambda self: self._core.is_gradient_accumulation_boundary()
    )
    _global_grad_norm = property(lambda self: self._core.get_global_grad_norm())

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's master weights at stages 1 and 2: a copy per group, fp32, 1-D, on the CPU."""
        return self._masters("single_partition_of_fp32_groups", stages=(1, 2))

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's master weights at stage 3: a copy per group, fp32, 1-D, on the CPU."""
        return self._masters("fp32_partitioned_groups_flat", stages=(3,))

    def _masters(self, name: str, stages: Sequence[int]) -> list[Tensor]:
        stage = self._core.config.zero_optimization.stage
        if stage not in stages:
            raise AttributeError(f"at stage {stage} the optimizer has no {name!r}, as in DeepSpeed")
        groups = []
        for group in self.param_groups:
            owned = [self._core.owns(p) for p in group["params"] if p.requires_grad]
            parts = [self._core.states.get_local(n) for n in owned if n is not None]
            groups.append(torch.cat([torch.empty(0), *parts]))
        return groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the engine's ``step``, for Lightning's Fabric. Every rank must call it.

        Raises ValueError for a ``closure``, and RuntimeError between accumulation boundaries, if no
        rank has a gradient, or if the engine is gone.
        """
        if closure is not None:
            raise ValueError("step(closure) cannot call the model again: run it before, and step()")
        self._live_engine("step").optimizer_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._live_engine("zero_grad").zero_grad(set_to_none)

    def _live_engine(self, what: str) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                f"optimizer.{what}() of an engine that is gone: keep what initialize() returned, "
                "as the engine steps its optimizer"
            )
        return engine

    def get_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return groups and this rank's part of the state, in the form of torch's optimizers.

        States are as in `OptimizerState`. ``scalars`` has each parameter's numbers, such as steps.
        """
        names = [self._core.owns(p) for group in self.param_groups for p in group["params"]]
        scalars = {
            number: dict(self._core.states.scalars(name))
            for number, name in enumerate(names)
            if name is not None
        }
        return {**super().state_dict(), "scalars": scalars}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank, at the same stage and world size.

        Master weights are not included. Ranks do not communicate, so one rank may raise alone.
        Raises ValueError if groups, lengths or shapes differ, and KeyError if the optimizer has no
        such state. After an error nothing has been restored.
        """
        groups, saved = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
            raise ValueError(
                f"the optimizer has groups of {[len(g['params']) for g in groups]} parameters, "
                f"found {[len(g['params']) for g in saved]}: load what state_dict() returned"
            )
        params = [param for group in groups for param in group["params"]]
        found = {}
        for number, param in enumerate(params):
            name = self._core.owns(param)
            if name is None:
                continue
            if number not in state_dict.get("scalars", {}):
                raise ValueError(
                    f"found no 'scalars' of {name}, which are its number of steps: load what "
                    "state_dict() of this engine's optimizer returned"
                )
            scalars, own = state_dict["scalars"][number], state_dict["state"].get(number, {})
            if not self._core.states.is_whole(name):
                own = {what: v for what, v in own.items() if what not in {"step", *scalars}}
            found[name] = scalars, own
        self._core.states.load_own(found)
        for group, kept in zip(groups, saved, strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})

    def stepped(self) -> None:
        """Mark the optimizer as stepped, because torch's schedulers warn otherwise."""
        self._opt_called = True
