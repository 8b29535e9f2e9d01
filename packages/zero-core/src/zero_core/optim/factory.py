"""Torch optimizers by the names of the configuration, and which of them the engine can serve."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zero_core.config import Config, OptimizerConfig
from zero_core.errors import ConfigError
from zero_core.optim.adam import Adam
from zero_core.optim.lion import Lion
from zero_core.optim.muon import Muon, split_groups

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

_KERNEL_CLASSES = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.SGD,
    Lion,
)
"""Optimizers that a host kernel computes where the state is offloaded. A subclass may update
otherwise, and is none."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose fused kernels run on CPUs and accelerators alike. A slice that begins and ends
at multiples of `zero_core.layout.arithmetic.ALIGNMENT` gets the same bits as within the whole."""
_OWN_KERNEL = {"fused", "foreach", "capturable", "differentiable"}


@runtime_checkable
class _DeclaresElementwise(Protocol):
    """Optimizer class that declares whether its update is elementwise."""

    is_elementwise: bool


@runtime_checkable
class _DeclaresKernel(Protocol):
    """Optimizer class that declares whether a host kernel computes its update."""

    has_host_kernel: bool


def check_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer whose update is not elementwise, because slices would change it.

    Torch's elementwise optimizers are known. Any other class declares ``is_elementwise = True``.

    Raises:
        ConfigError: it is neither.
    """
    known = (*_BY_NAME.values(), torch.optim.ASGD, torch.optim.Rprop)
    if issubclass(optimizer_class, Muon):
        return  # zero_core.optim.muon_tier gathers whole matrices for it
    declared: object = optimizer_class
    is_declared = isinstance(declared, _DeclaresElementwise) and declared.is_elementwise is True
    if optimizer_class not in known and not is_declared:
        raise ConfigError(
            f"optimizer {optimizer_class.__name__}: its update may depend on whole tensors, and "
            "this engine updates slices; if it is elementwise, set is_elementwise = True on the "
            f"class; known: {sorted(c.__name__ for c in known)}"
        )


def has_kernel_rule(config: Config, given: torch.optim.Optimizer | None) -> bool:
    """Return whether a host kernel may compute the update, where the state is offloaded.

    A kernel computes torch's Adam, AdamW, Adagrad and SGD and `zero_core.Lion` as torch does, fused
    or not. The class of another ``given`` optimizer declares that a kernel computes it by
    ``has_host_kernel = True``, and which one by ``update_rule``.
    """
    if given is not None:
        declared: object = type(given)
        is_declared = isinstance(declared, _DeclaresKernel) and declared.has_host_kernel is True
        return declared in _KERNEL_CLASSES or is_declared
    if config.optimizer is None or config.optimizer.params.get("torch_adam"):
        return False
    return _BY_NAME.get(config.optimizer.type.lower()) in _KERNEL_CLASSES


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
    options = dict(config.params)
    if config.type.lower() == "muon":
        optimizer_class, known = _muon(options)
    else:
        optimizer_class, known = _elementwise(config.type, options)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"optimizer.params.{unknown[0]}: unknown key; {optimizer_class.__name__} takes {known}"
        )
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    try:
        if optimizer_class is Muon:
            return Muon(split_groups(params, options))
        optimizer = optimizer_class(params, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {error}") from error
    if optimizer_class in _FUSED and not _OWN_KERNEL & options.keys():
        # Not an argument: torch refuses it for parameters on the meta device.
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


_Choice = tuple[type[torch.optim.Optimizer], list[str]]
"""An optimizer and the keys of ``optimizer.params`` that it takes."""


def _elementwise(name: str, options: dict[str, Any]) -> _Choice:
    """Choose an elementwise optimizer, and replace DeepSpeed's further keys in ``options``."""
    kind = name.lower()
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
            f"optimizer.type = {name!r} is not served; known: {sorted(_BY_NAME)}; "
            "any elementwise torch optimizer can be passed to build() as an object"
        )
    return optimizer_class, [
        p for p in inspect.signature(optimizer_class).parameters if p != "params"
    ]


def _muon(options: dict[str, Any]) -> _Choice:
    """Choose Muon, and drop DeepSpeed's further keys from ``options`` at the values served."""
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
    keys = "lr muon_lr adam_lr weight_decay momentum nesterov adjust_lr_fn betas eps"
    return Muon, keys.split()
