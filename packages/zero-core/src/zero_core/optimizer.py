"""The optimizer that the user sees: real ``param_groups`` over the model's own parameters.

The update itself is made by the state tier on flat slices. `EngineOptimizer` keeps the groups of
the optimizer that was given (the same dicts, so that schedulers attached to it work), and its
``step`` hands their hyperparameters to the tier.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_core.adam import Adam
from zero_core.config import Config, OptimizerConfig
from zero_core.errors import ConfigError
from zero_core.lion import Lion
from zero_core.muon import Muon, split_groups

__all__ = ["EngineOptimizer", "check_elementwise", "has_kernel_rule", "make_optimizer"]

_BY_NAME: Mapping[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lion": Lion,
}

_KERNEL_TYPES = frozenset({"adam", "adamw", "adagrad", "sgd", "lion"})
"""Names, in lower case, of those that a host kernel computes where the state is offloaded."""

_KERNEL_CLASSES = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.SGD,
    Lion,
)
"""Classes of the same. A subclass is none: it may update otherwise."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Their fused kernels run on CPUs and accelerators alike, and give a slice that begins and ends at
multiples of `zero_core.layout.ALIGNMENT` the bits that it gets within the whole."""
_OWN_KERNEL = {"fused", "foreach", "capturable", "differentiable"}


def check_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer whose update of an element depends on others: slices would change it.

    Known are torch's elementwise optimizers; a class of your own says ``is_elementwise = True``.

    Raises:
        ConfigError: it is neither.
    """
    known = (*_BY_NAME.values(), torch.optim.ASGD, torch.optim.Rprop)
    if issubclass(optimizer_class, Muon):
        return  # zero_core.matrices gives it whole ones
    if optimizer_class not in known and not getattr(optimizer_class, "is_elementwise", False):
        raise ConfigError(
            f"optimizer {optimizer_class.__name__}: its update may depend on whole tensors, and "
            "this engine updates slices; if it is elementwise, set is_elementwise = True on the "
            f"class; known: {sorted(c.__name__ for c in known)}"
        )


def has_kernel_rule(config: Config, given: torch.optim.Optimizer | None) -> bool:
    """Whether a host kernel may compute the update, where the state is offloaded.

    Args:
        config: names the optimizer, if none was given.
        given: the optimizer object. Torch's Adam, AdamW, Adagrad and SGD and `zero_core.Lion` are
            computed by a kernel just as torch does it, fused or not; another class says that one
            computes it by ``has_host_kernel = True``, and which one by ``update_rule``.
    """
    if given is not None:
        kind = type(given)
        return kind in _KERNEL_CLASSES or bool(getattr(kind, "has_host_kernel", False))
    if config.optimizer is None or config.optimizer.params.get("torch_adam"):
        return False
    return config.optimizer.type.lower() in _KERNEL_TYPES


def make_optimizer(
    config: OptimizerConfig, params: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the torch optimizer that the configuration names, over ``params``.

    As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false, and ``weight_decay`` is 0
    unless it is given. The kernel is torch's fused one where every device has it, unless
    ``fused``, ``foreach`` or the like is given: one pass over memory where the loop makes ten.

    Raises:
        ConfigError: an unknown type, or parameters that the optimizer does not take.
    """
    kind = config.type.lower()
    if kind == "muon":
        return _make_muon(config.params, params)
    options = dict(config.params)
    options.pop("set_grad_none", None)  # gradients never stay on the parameters
    if not options.pop("fp32_optimizer_states", True):
        raise ConfigError(
            "optimizer.params.fp32_optimizer_states = false is not served: states are fp32 as the "
            "master weights are; with offload_optimizer, state_dtype = 'bfloat16' or 'int8' makes "
            "those of Adam smaller"
        )
    if kind == "lamb":
        raise ConfigError(
            "optimizer.type = 'Lamb' is not served: its step depends on the norm of whole "
            "parameters, and the engine updates slices; use AdamW, Lion or Muon"
        )
    optimizer_class = _BY_NAME.get(kind)
    if kind in ("adam", "adamw"):
        is_adamw = options.pop("adam_w_mode", True) or kind == "adamw"
        options.pop("torch_adam", None)  # see zero_core.build: it keeps the host kernel out
        optimizer_class = _BY_NAME["adamw" if is_adamw else "adam"]
        options.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has 0.01
        if options.get("bias_correction") is False:
            optimizer_class = Adam
            options["decoupled_weight_decay"] = is_adamw
            if options.pop("amsgrad", False):
                raise ConfigError(
                    "optimizer.params.bias_correction = false with amsgrad = true is not served: "
                    "leave one of them out"
                )
        else:
            options.pop("bias_correction", None)
    if optimizer_class is None:
        raise ConfigError(
            f"optimizer.type = {config.type!r} is not served; known: {sorted(_BY_NAME)}; "
            "any elementwise torch optimizer can be passed to build() as an object"
        )
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    known = [p for p in inspect.signature(optimizer_class).parameters if p != "params"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"optimizer.params.{unknown[0]}: unknown key; {optimizer_class.__name__} takes {known}"
        )
    try:
        optimizer = optimizer_class(params, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error
    if optimizer_class in _FUSED and not _OWN_KERNEL & options.keys():
        # Not an argument: torch refuses it for parameters on the meta device.
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def _make_muon(options: Mapping[str, Any], params: Sequence[Any]) -> torch.optim.Optimizer:
    options = dict(options)
    for key, served, reason in (
        ("ns_method", "standard", "the iteration is torch.optim.Muon's"),
        ("per_head_muon", False, "a matrix is made orthogonal as a whole"),
        ("adam_w_mode", True, "weight decay is decoupled"),
    ):
        found = options.pop(key, served)
        if found != served:
            raise ConfigError(
                f"optimizer.params.{key} = {found!r} is not served, only {served!r}: {reason}"
            )
    known = ("lr", "muon_lr", "adam_lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")
    unknown = sorted(set(options) - {*known, "betas", "eps"})
    if unknown:
        raise ConfigError(
            f"optimizer.params.{unknown[0]}: unknown key; Muon takes {[*known, 'betas', 'eps']}"
        )
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    try:
        return Muon(split_groups(params, options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error


class EngineOptimizer(torch.optim.Optimizer):
    """Shares ``param_groups`` with the optimizer that was given; stepped by the engine alone.

    Attributes:
        given: that optimizer.
        overflow: whether the last step was skipped, as its gradient was not finite.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        *,
        update: Callable[[Sequence[Mapping[str, Any]]], None],
        discard_grads: Callable[[], None],
    ) -> None:
        """Drive ``update`` with the `hyperparameters` of ``given``, which is not stepped itself."""
        super().__init__(given.param_groups, given.defaults)
        self.param_groups = given.param_groups
        self.given = given
        self.overflow = False
        self._update = update
        self._discard_grads = discard_grads
        self._may_step = False
        self._guard = given.register_step_pre_hook(_refuse_step)

    def release(self) -> None:
        """Let the optimizer that was given be stepped by others again."""
        self._guard.remove()

    def engine_step(self) -> None:
        """Called by `Engine.step`: run ``step`` with all its hooks."""
        self._may_step = True
        try:
            self.step()
        finally:
            self._may_step = False
        # Schedulers made over the given optimizer look there for a sign that it has stepped.
        self.given._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused outside the engine: gradients are in the engine, not on the parameters."""
        if not self._may_step or closure is not None:
            raise RuntimeError("call engine.step(): the engine drives its optimizer")
        self._update(self.hyperparameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated since the last step, not the count of micro-steps."""
        self._discard_grads()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state is sharded."""
        raise RuntimeError(
            "the optimizer state is sharded over ranks: use engine.save_checkpoint(), which "
            "stores it for any stage and world size"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused: the state is sharded."""
        raise RuntimeError("the optimizer state is sharded: use engine.load_checkpoint()")

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Every group without its parameters, as a checkpoint keeps it."""
        return [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]

    def load_hyperparameters(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore `hyperparameters`; sequences keep the kind that they have now."""
        for group, values in zip(self.param_groups, saved, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), tuple) and isinstance(value, list):
                    value = tuple(value)
                group[key] = value


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        "this optimizer was given to zero_core.build(): call engine.step() instead of "
        f"{type(optimizer).__name__}.step()"
    )
