"""What `build` and `plan` work out before anything is allocated: units, optimizer, layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_core.config import Config
from zero_core.discovery import Discovered, LeafRule, compute_dtype, discover
from zero_core.errors import ConfigError
from zero_core.layout import Layout, ParamSpec
from zero_core.muon import tag_matrices
from zero_core.optimizer import check_elementwise, make_optimizer

__all__ = ["Blueprint"]


@dataclass(frozen=True)
class Blueprint:
    """A model, taken apart for one world size.

    Attributes:
        found: its parameters and units.
        layout: where every element lives.
        optimizer: the one that was given, or the configuration's, over the model's parameters.
        given: the one that was given, or None.
        group_of: the optimizer group of each trainable parameter, by the parameter's number.
    """

    found: Discovered
    layout: Layout
    optimizer: torch.optim.Optimizer
    group_of: dict[int, int]
    given: torch.optim.Optimizer | None

    @classmethod
    def draw(
        cls,
        model: nn.Module,
        config: Config,
        world_size: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        is_training: bool = True,
    ) -> Blueprint:
        """Take ``model`` apart; it may be on the meta device, and is not changed.

        Without ``is_training`` every parameter is frozen, and the optimizer has none.

        Raises:
            ConfigError: there is no optimizer, or it does not fit the model.
        """
        found = discover(model, LeafRule.of(config))
        given = optimizer
        if not is_training:
            optimizer = torch.optim.SGD([{"params": []}], lr=0.0)
        elif optimizer is None:
            optimizer = _optimizer_of(config, found)
        group_of = _groups_of(found, optimizer)
        if is_training:
            _check_all_grouped(found, group_of)
        specs = _describe(found, group_of, config)
        group_of = {n: g for n, g in group_of.items() if specs[n].is_trainable}
        units = [(name, members) for name, _, members in found.units]
        return cls(found, Layout.build(specs, units, world_size), optimizer, group_of, given)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups without their parameters."""
        return [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]


def _optimizer_of(config: Config, found: Discovered) -> torch.optim.Optimizer:
    if config.optimizer is None:
        raise ConfigError(
            "no optimizer: give one in the configuration ('optimizer': {'type': 'AdamW', "
            "'params': {'lr': ...}}) or pass optimizer=... to build()"
        )
    trainable = [p for p in found.params if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient")
    if config.optimizer.type.lower() == "muon":
        tag_matrices((names[0], p) for names, p in zip(found.names, found.params, strict=True))
    return make_optimizer(config.optimizer, trainable)


def _groups_of(found: Discovered, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The optimizer group of each parameter that is in one, by the parameter's number."""
    # Adagrad has state from the start; its count of steps tells.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has already stepped: build the engine first, or load its state from "
            "a checkpoint of the engine"
        )
    check_elementwise(type(optimizer))
    number_of = {id(p): n for n, p in enumerate(found.params)}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in number_of:
                raise ConfigError(
                    f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} "
                    "that is not in the model: make the optimizer from model.parameters()"
                )
            group_of[number_of[id(param)]] = index
    return group_of


def _check_all_grouped(found: Discovered, group_of: Mapping[int, int]) -> None:
    for number, (param, names) in enumerate(zip(found.params, found.names, strict=True)):
        if param.requires_grad and number not in group_of:
            raise ConfigError(
                f"parameter {names[0]} requires a gradient but is in no optimizer group: add it, "
                "or freeze it with requires_grad_(False)"
            )


def _describe(found: Discovered, group_of: Mapping[int, int], config: Config) -> list[ParamSpec]:
    """Every parameter's description. See zero_core.freezing for what is trainable."""
    return [
        ParamSpec(
            name=names[0],
            shape=tuple(param.shape),
            dtype=compute_dtype(param, config.compute_dtype),
            is_trainable=number in group_of and _can_have_gradient(param),
            aliases=names[1:],
        )
        for number, (param, names) in enumerate(zip(found.params, found.names, strict=True))
    ]


def _can_have_gradient(param: nn.Parameter) -> bool:
    return param.is_floating_point() or param.is_complex()  # quantized weights cannot
