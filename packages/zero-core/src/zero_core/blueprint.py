"""Description of a model before anything is allocated: its units, optimizer and layout."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_core.comm.control import ControlGroup
from zero_core.config import Config
from zero_core.errors import ConfigError, RankMismatchError
from zero_core.layout.arithmetic import Layout, ParamSpec, dim_order
from zero_core.layout.discovery import Discovered, compute_dtype, discover, plain_name
from zero_core.optim.factory import check_served, elementwise_groups, is_elementwise, make_optimizer
from zero_core.optim.muon import tag_matrices
from zero_core.optim.progress import is_finite_setting
from zero_core.optim.train_state import describe_groups
from zero_core.sharded.sharded_state import CommonBuffers
from zero_core.tiled import check_names


@dataclass(frozen=True)
class Blueprint:
    """Units, optimizer and layout of one model for one world size."""

    module: nn.Module
    found: Discovered
    layout: Layout
    optimizer: torch.optim.Optimizer  # ``given``, or made by `draw`
    group_of: dict[int, int]  # index of each trainable parameter's group, by parameter number
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
        """Describe ``model``. If not ``is_training``, no parameter counts as trainable."""
        for part in model.modules() if is_training else ():
            is_wrapper = isinstance(part, DataParallel | DDP)
            if is_wrapper and any(param.requires_grad for param in part.parameters()):
                raise ConfigError(
                    f"build(): the model is or contains a {type(part).__name__}, which would "
                    "reduce gradients a second time: give the module inside it (its attribute "
                    "module)"
                )
        found, given = discover(model, config.zero_optimization.leaf_module), optimizer
        for param, names in zip(found.params, found.names, strict=True):
            if param.is_complex():
                raise ConfigError(
                    f"parameter {names[0]} is complex ({param.dtype}), which is not served: keep "
                    "its real and imaginary parts in one real parameter, and use "
                    "torch.view_as_complex() in forward"
                )
        if not is_training:
            optimizer = torch.optim.SGD([{"params": []}], lr=0.0)
        else:
            _check_max_norm(model, config, world_size)
            optimizer = _optimizer_of(config, found) if optimizer is None else optimizer
        group_of = _groups_of(found, optimizer)
        specs: list[ParamSpec] = []
        for number, (param, names) in enumerate(zip(found.params, found.names, strict=True)):
            if is_training and param.requires_grad and number not in group_of:
                raise ConfigError(
                    f"parameter {names[0]} requires a gradient but is in no optimizer group: add "
                    "it, or freeze it with requires_grad_(False)"
                )
            order, is_opaque = dim_order(param), number in found.opaque
            has_usual_order = order == tuple(range(len(order))) and not is_opaque
            spec = ParamSpec(
                name=names[0],
                shape=tuple(param.shape),
                dtype=param.dtype if is_opaque else compute_dtype(param, config.compute_dtype),
                # Frozen parameters in optimizer groups are trainable: they may be unfrozen later.
                is_trainable=number in group_of and param.is_floating_point(),
                aliases=names[1:],
                is_opaque=is_opaque,
                order=() if has_usual_order else order,
                twin=found.twins.get(number),
            )
            specs.append(spec)
        group_of = {n: g for n, g in group_of.items() if specs[n].is_trainable}
        units = [(name, members) for name, _, members in found.units]
        if config.tiled_compute is not None:
            check_names(model, config.tiled_compute)
        in_chunks, has_tail = config.world_size_invariant, found.has_tail
        layout = Layout.build(specs, units, world_size, is_in_chunks=in_chunks, has_tail=has_tail)
        # A state tier sees only its rank's parameters, so it cannot detect unmatched patterns.
        trained = [param.name for param in layout.params if param.is_trainable]
        patterns = config.zero_optimization.offload_optimizer.parameters if is_training else None
        for pattern in patterns or ():
            if not any(fnmatchcase(name, pattern) for name in trained):
                near = difflib.get_close_matches(pattern, trained, n=3, cutoff=0.4) or trained[:3]
                raise ConfigError(
                    f"zero_optimization.offload_optimizer.parameters: {pattern!r} matches no "
                    f"trainable parameter; near it are {near}"
                )
        return cls(model, found, layout, optimizer, group_of, given)

    def check_ranks_agree(
        self, control: ControlGroup, config: Config, extensions: Sequence[str] = ()
    ) -> None:
        """Raise RankMismatchError if models, settings or extensions differ. All ranks call it."""
        model = {f"parameter {p.name}": f"{p}" for p in self.layout.params}
        model["order of parameters"] = _digest(repr([p.name for p in self.layout.params]))
        model["layout"] = _digest(repr(self.layout))
        if config.broadcast_buffers:
            model |= CommonBuffers(self.module).describe()
        # These paths may differ between hosts.
        paths = {"memory_checkpoint": {"path"}, "step_records": {"folder"}}
        settings = config.model_dump(mode="json", exclude=paths)
        settings["vertical"] = config.is_vertical  # depends on a package that one host may lack
        for what, facts in (
            ("model", model),
            ("configuration", dict(_flat(settings))),
            ("optimizer", describe_groups(self.groups)),
            ("list of extensions", {"extensions": ", ".join(extensions)}),
        ):
            if len(set(control.gather_bytes(_digest(json.dumps(facts)).encode()))) > 1:
                raise RankMismatchError(
                    f"rank {control.rank}: ranks were built with a different {what}: "
                    f"{control.differences(facts)}. Every rank must pass the same to build()"
                )

    @property
    def updates_slices(self) -> bool:
        """Whether the optimizer may update slices of parameters instead of whole ones."""
        return is_elementwise(type(self.optimizer))

    @property
    def sliced_params(self) -> frozenset[int]:
        """Numbers of trainable parameters whose group the optimizer declares elementwise."""
        groups = elementwise_groups(self.optimizer)
        return frozenset(number for number, group in self.group_of.items() if group in groups)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's parameter groups."""
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        # torch's Adagrad uses the default and ignores this setting of groups
        if isinstance(self.optimizer, torch.optim.Adagrad):
            initial = "initial_accumulator_value"
            groups = [{**g, initial: self.optimizer.defaults[initial]} for g in groups]
        return groups


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _flat(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", repr(value)


def _check_max_norm(model: nn.Module, config: Config, world_size: int) -> None:
    """Raise ConfigError if sharding would lose changes made in place by an embedding's max_norm."""
    zero = config.zero_optimization
    is_sharded = zero.stage >= 1 and (world_size > 1 or zero.offload_param.device != "none")
    for name, module in model.named_modules():
        has_max_norm = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm
        if is_sharded and has_max_norm and module.weight.requires_grad:
            raise ConfigError(
                f"{plain_name(name) or 'the model'} is an embedding with max_norm = "
                f"{module.max_norm}: its forward changes weights in place, each rank other rows, "
                f"which is lost at zero_optimization.stage {zero.stage}. Set max_norm = None and "
                "scale the rows that are looked up, or clamp the weights between steps within "
                "engine.gathered(modifier_rank=0); or use stage 0, where it acts as in DDP"
            )


def _optimizer_of(config: Config, found: Discovered) -> torch.optim.Optimizer:
    if config.optimizer is None:
        raise ConfigError(
            "no optimizer: give one in the configuration ('optimizer': {'type': 'AdamW', "
            "'params': {'lr': ...}}) or pass optimizer=... to build()"
        )
    named = zip((names[0] for names in found.names), found.params, strict=True)
    params = [(name, param) for name, param in named if isinstance(param, nn.Parameter)]
    trainable = [param for _, param in params if param.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient")
    if config.optimizer.type.lower() == "muon":
        tag_matrices(params)
    return make_optimizer(config.optimizer, trainable)


def _groups_of(found: Discovered, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Check ``optimizer``. Return the index of each parameter's group, by parameter number."""
    if not isinstance(cast(object, optimizer), torch.optim.Optimizer):
        raise ConfigError(
            f"build(optimizer=...) is {optimizer!r:.100}: expected an optimizer over "
            "model.parameters(), as torch.optim.AdamW(model.parameters())"
        )
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            # torch accepts some non-finite settings
            if key != "params" and not is_finite_setting(key, value):
                raise ConfigError(
                    f"param_groups[{number}]['{key}'] of {type(optimizer).__name__} is {value!r}: "
                    "give finite numbers"
                )
    # Adagrad has a state from its construction on, with a step count of 0.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has already stepped: build the engine first, or load its state from "
            "a checkpoint of the engine"
        )
    check_served(type(optimizer))
    number_of = {id(p): n for n, p in enumerate(found.params)}
    quantized = {id(q.param) for q in found.quantized}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in quantized:
                continue  # a quantized parameter is never trained
            if id(param) not in number_of:
                raise ConfigError(
                    f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} "
                    "that is not in the model: make the optimizer from model.parameters()"
                )
            group_of[number_of[id(param)]] = index
    return group_of
