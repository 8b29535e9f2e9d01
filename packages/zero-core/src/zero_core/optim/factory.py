"""Creation of the configured torch optimizer, and checks that an optimizer is supported."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_core.config import Config, OptimizerConfig
from zero_core.errors import ConfigError
from zero_core.optim.adam import Adam, Lion
from zero_core.optim.muon import Muon, split_groups

_log = logging.getLogger(__name__)

_BY_PARAMETER = ("torch.", "torchao.", "bitsandbytes.", "transformers.", "zero_core.")
"""Prefixes of Python modules whose optimizers are assumed to update parameters independently."""

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
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "muon": Muon,
}

_ELEMENTWISE = set(_BY_NAME.values()) - {torch.optim.Adafactor, Muon}

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with fused kernels for CPUs and accelerators. The update of a slice whose ends are
multiples of `zero_core.layout.arithmetic.ALIGNMENT` has the same bits as in the whole tensor."""
_OWN_KERNEL = {"fused", "foreach", "capturable", "differentiable"}

_KERNEL_CLASSES = (*_FUSED, torch.optim.Adagrad, Lion)
"""Optimizers whose update a host kernel can compute if the state is offloaded. Subclasses are not
included, because their update may differ."""


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether the update of an element depends on that element alone.

    Slices of a parameter can then be updated separately. A class that is not in `_ELEMENTWISE` must
    declare ``is_elementwise = True``. Otherwise `zero_core.optim.whole_tier` runs the optimizer.
    """
    # foreign: the user's class, which may lack the attribute
    declared = getattr(optimizer_class, "is_elementwise", False)
    return optimizer_class in _ELEMENTWISE or declared is True


def elementwise_groups(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return indices of the groups for which the method ``is_elementwise_group`` returns True."""
    # foreign: the user's object, which may lack the method
    declares = getattr(optimizer, "is_elementwise_group", lambda group: False)
    return frozenset(n for n, group in enumerate(optimizer.param_groups) if declares(group))


def check_served(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for `torch.optim.SparseAdam`, or if ``step`` requires a closure."""
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {name} is not served: its step() needs a closure that computes the loss "
            "again, and looks at all parameters at once. Use an optimizer that steps on gradients, "
            "as AdamW, Adafactor or Muon"
        )
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise ConfigError(
            f"optimizer {name} is not served: it takes sparse gradients, and the engine's are "
            "dense. Use Adam, and nn.Embedding(sparse=False)"
        )


def check_whole_update(
    config: Config, optimizer: torch.optim.Optimizer, *, has_factory: bool
) -> None:
    """Raise ConfigError for settings, or a state tier, that need an elementwise optimizer."""
    served: dict[str, tuple[Any, ...]] = {
        "device": ("none", "cpu"),
        "ratio": (1.0, None),
        "parameters": (None,),
        "device_budget": (None,),
        "state_dtype": ("float32",),
        "update_in_backward": (None, False),
        "undo_buffer_size": (None,),
        "lossless_upload": (False,),
    }
    found = config.zero_optimization.offload_optimizer.model_dump(include=set(served))
    given = {key: f"offload_optimizer.{key}" for key in served if found[key] not in served[key]}
    if config.bf16.bf16_optimizer_states and "state_dtype" in given:
        given["state_dtype"] = "bf16.bf16_optimizer_states with offload_optimizer.state_dtype"
    wrong = [f"{name} = {found[key]!r}" for key, name in given.items()]
    wrong += ["a state_tier"] * has_factory
    if wrong:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ConfigError(
            f"{wrong[0]} with {kind} is not served: it updates whole parameters, all on the "
            "device or all on the host (offload_optimizer.device = 'cpu'). Leave it out; or, if "
            "the update is elementwise, set is_elementwise = True on the class"
        )


def warn_of_unknown(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Warn if the optimizer is not known to update each parameter independently."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not kind.startswith(_BY_PARAMETER):
        _log.warning(
            "%s at zero_optimization.stage %d: ranks update different parameters, which is right "
            "only if no update depends on another parameter's gradient (no clipping of its own, no "
            "common step size). Else use stage 0",
            kind,
            stage,
        )


def advise_fused(optimizer: torch.optim.Optimizer) -> None:
    """Log advice to use the fused kernel, if torch would use foreach kernels by default."""
    groups = optimizer.param_groups
    if type(optimizer) in _FUSED and any(g["fused"] is g["foreach"] is None for g in groups):
        _log.warning(
            "%s without fused=True runs torch's foreach kernels on this device: more memory and "
            "more passes over it, and no update before the host has read the step's facts. Pass "
            "fused=True, whose last bits differ, here and in a DDP run to compare with",
            type(optimizer).__name__,
        )


def has_kernel_rule(config: Config, given: torch.optim.Optimizer | None) -> bool:
    """Return whether a host kernel can compute the update when the state is offloaded.

    ``given``: the optimizer passed to ``build``, or None for the configured one. Kernels compute
    torch's Adam, AdamW, Adagrad and SGD, and `zero_core.Lion`. Any other class must declare
    ``has_host_kernel = True`` and name its kernel by ``update_rule``. The configured option
    ``torch_adam`` selects torch's optimizer instead of a kernel.
    """
    if given is not None:
        # foreign: the user's class, which may lack the attribute
        declared = getattr(type(given), "has_host_kernel", False)
        return type(given) in _KERNEL_CLASSES or declared is True
    if config.optimizer is None or config.optimizer.params.get("torch_adam"):
        return False
    return _BY_NAME.get(config.optimizer.type.lower()) in _KERNEL_CLASSES


def make_optimizer(
    config: OptimizerConfig, params: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Create the configured torch optimizer over ``params``.

    As in DeepSpeed, "Adam" means AdamW unless ``adam_w_mode`` is false, and the ``weight_decay`` of
    both defaults to 0. Adam, AdamW and SGD use torch's fused kernel unless the configuration has an
    option of `_OWN_KERNEL`.
    """
    options = dict(config.params)
    optimizer_class = _choose(config.type, options)
    known = [p for p in inspect.signature(optimizer_class).parameters if p != "params"]
    if optimizer_class is Muon:
        keys = "lr muon_lr adam_lr weight_decay momentum nesterov adjust_lr_fn betas eps"
        known = keys.split()
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
        # Set after construction, because the constructor refuses ``fused`` for meta parameters.
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def _choose(name: str, options: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class. Changes ``options`` to arguments that the class takes."""
    kind = name.lower()
    if kind == "muon":
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
        return Muon
    options.pop("set_grad_none", None)  # no effect: the engine always clears gradients
    if not options.pop("fp32_optimizer_states", True):
        raise ConfigError(
            "optimizer.params.fp32_optimizer_states = false is not served: states are fp32 as the "
            "master weights are; with offload_optimizer, state_dtype = 'bfloat16' or 'int8' makes "
            "those of Adam smaller"
        )
    if kind not in _BY_NAME:
        plain = re.sub("^(deepspeed)?(fused|cpu)", "", kind)  # of the classes of DeepSpeed
        near = difflib.get_close_matches(plain, _BY_NAME, 1, 0.8)
        close = [f" did you mean {n!r}?" for n in near]
        raise ConfigError(
            f"optimizer.type = {name!r} is not served;{''.join(close)} known: "
            f"{sorted(_BY_NAME)}; pass build() an object of any other class"
        )
    if kind not in ("adam", "adamw"):
        return _BY_NAME[kind]
    is_adamw = options.pop("adam_w_mode", True) or kind == "adamw"
    options.pop("torch_adam", None)  # read by `has_kernel_rule`
    options.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has 0.01
    if options.get("bias_correction") is not False:
        options.pop("bias_correction", None)
        return _BY_NAME["adamw" if is_adamw else "adam"]
    options["decoupled_weight_decay"] = is_adamw
    if options.pop("amsgrad", False):
        raise ConfigError(
            "optimizer.params.bias_correction = false with amsgrad = true is not served: "
            "leave one of them out"
        )
    return Adam
