"""Plug-ins: collectives, state tier and parameter tier, chosen by the caller or the configuration.

An argument of ``build`` overrides an entry point that the configuration asks for. Without either,
the engine uses its own collectives and state tier, and no parameter tier.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_core.blueprint import Blueprint
from zero_core.comm.control import ControlGroup
from zero_core.comm.meter import Meter
from zero_core.config import Config, load_config
from zero_core.errors import ConfigError
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.optim.device_tier import DeviceTier
from zero_core.optim.factory import (
    advise_fused,
    check_whole_update,
    has_kernel_rule,
    make_optimizer,
    warn_of_unknown,
)
from zero_core.optim.muon import tag_matrices
from zero_core.optim.whole_tier import WholeTier
from zero_core.parts import has_part, install_command, load_part, missing_part
from zero_core.protocols import (
    Collectives,
    CollectivesFactory,
    ParamTier,
    ParamTierFactory,
    StateTier,
    StateTierFactory,
    TransportCollectives,
)
from zero_core.schedules import make_scheduler
from zero_core.sharded.memory import Memory
from zero_core.sharded.param_offload import offloaded_segments

_log = logging.getLogger(__name__)

COLLECTIVES = "zero_core.collectives"
TIERS = "zero_core.state_tiers"
PARAM_TIERS = "zero_core.param_tiers"
KERNELS = "zero_core.adam_kernels"
UPLOAD_CODECS = "zero_core.upload_codecs"
FOOTPRINTS = "zero_core.footprints"


def check_config(source: Mapping[str, Any] | str | Path, *, world_size: int) -> Config:
    """Check a configuration without a model and without ranks.

    In addition to `load_config`, it makes the optimizer and the schedule over two elements, and
    checks that required packages are installed and that ``nvme_path`` is a writable folder.

    Args:
        source: the configuration as a mapping, or the path of its JSON file.
        world_size: number of data-parallel ranks.

    Raises:
        ConfigError: a setting is wrong. The message names the key, what was found and what to do.
        MissingPartError: a package is not installed.
    """
    config = load_config(source, world_size=world_size)
    zero = config.zero_optimization
    # Adagrad allocates state at construction, so use one element each. Muon needs a matrix.
    tried = [nn.Parameter(torch.empty(1, 1)), nn.Parameter(torch.empty(1))]
    tag_matrices([("weight", tried[0]), ("bias", tried[1])])
    if config.optimizer is not None:
        optimizer = make_optimizer(config.optimizer, tried)
        if config.scheduler is not None:
            make_scheduler(optimizer, config.scheduler.type, config.scheduler.params)

    def need(group: str, name: str, asked_by: str, distribution: str) -> None:
        if not has_part(group, name):
            raise missing_part(asked_by, distribution)

    if zero.quantized_key is not None:
        need(COLLECTIVES, "quantized", zero.quantized_key, "zero-comm")
    for block, group in (("offload_optimizer", TIERS), ("offload_param", PARAM_TIERS)):
        offload, where = getattr(zero, block), f"zero_optimization.{block}"
        if offload.device == "none":
            continue
        asked = f"{where}.device = {offload.device!r}"
        need(group, "host", asked, "zero-offload")
        if offload.device == "nvme":
            said = f"{where}.nvme_path = {offload.nvme_path!r}"
            if not os.path.isdir(offload.nvme_path):
                raise ConfigError(f"{said}: there is no such folder; create it first")
            if not os.access(offload.nvme_path, os.W_OK | os.X_OK):
                raise ConfigError(f"{said} is not writable for this user: change its mode")
        if group is TIERS and has_kernel_rule(config, None):
            need(KERNELS, "cpu", asked, "cpu-adam")
        if group is TIERS and zero.offload_optimizer.lossless_upload:
            need(UPLOAD_CODECS, "lossless", f"{where}.lossless_upload", "zero-comm")
    return config


def call_factory(make: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a plug-in's factory and turn its ValueError into a ConfigError."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_collectives(
    given: Collectives | CollectivesFactory | None,
    transport: TransportCollectives,
    config: Config,
    layout: Layout,
    per_node: int,
) -> Collectives:
    """Return ``given`` (called, if a factory), or else what the configuration asks for."""
    if isinstance(given, Collectives):
        return given
    zero = config.zero_optimization
    if given is None:
        if (asked := zero.quantized_key) is None:
            return transport
        if transport.world_size == 1:
            _log.warning("%s has no effect with one rank: nothing is sent", asked)
        given = load_part(COLLECTIVES, "quantized", asked_by=asked, distribution="zero-comm")
    made: Collectives = call_factory(
        given,
        transport,
        rank=transport.rank,
        world_size=transport.world_size,
        config=zero.model_dump(mode="json"),
        ranks_per_node=per_node,
        frozen=frozenset(s.index for s in layout.segments if not s.is_trainable),
    )
    return made


def make_state_tier(
    factory: StateTierFactory | None,
    memory: Memory,
    drawn: Blueprint,
    config: Config,
    control: ControlGroup,
    meter: Meter,
) -> StateTier:
    """Make the state tier over ``memory``, by ``factory`` or as the configuration asks."""
    zero, offload = config.zero_optimization, config.zero_optimization.offload_optimizer
    layout, is_sharded = drawn.layout, memory.has_sharded_state
    if not drawn.updates_slices:
        check_whole_update(config, drawn.optimizer, has_factory=factory is not None)
        if is_sharded and control.world_size > 1 and control.rank == 0:
            warn_of_unknown(drawn.optimizer, zero.stage)
        return WholeTier(
            layout=layout,
            control=control,
            meter=meter,
            is_sharded=is_sharded,
            params=memory.update_targets,
            device=torch.device("cpu") if offload.device == "cpu" else memory.device,
            param_store=memory.store,
            optimizer=drawn.optimizer,
            model_params=drawn.found.params,
            sliced=drawn.sliced_params,
            own_masters=config.own_masters,
        )
    placed = layout.pieces(control.rank, is_sharded=is_sharded)
    own: dict[str, Any] = {
        "numel": layout.local_numel(is_sharded=is_sharded),
        "pieces": [(p.start, p.stop, drawn.group_of[p.param]) for p in placed],
        "params": memory.update_targets,
        "device": memory.device,
        "optimizer_class": type(drawn.optimizer),
        "groups": drawn.groups,
        "param_store": memory.store,
    }
    if factory is None and offload.device == "none":
        make: Any = DeviceTier
        if memory.device.type not in ("cpu", "meta") and control.rank == 0:
            advise_fused(drawn.optimizer)
        own["own_masters"] = config.own_masters
    else:
        key = f"zero_optimization.offload_optimizer.device = {offload.device!r}"
        make = factory or load_part(TIERS, "host", asked_by=key, distribution="zero-offload")
        own |= {
            "config": zero.model_dump(mode="json"),
            "adam_kernel": None if factory else _load_kernel(config, drawn.given, key),
            "device_tier": DeviceTier,
            "names": [layout.params[p.param].name for p in placed],
        }
        asked = "zero_optimization.offload_optimizer.lossless_upload"
        if offload.lossless_upload and memory.device.type == "cpu":
            text = "%s has no effect: the model is computed on the CPU, nothing is sent"
            _log.warning(text, asked)
            own["upload_codec"] = None
        elif offload.lossless_upload:
            codec = load_part(UPLOAD_CODECS, "lossless", asked_by=asked, distribution="zero-comm")
            own["upload_codec"] = codec()
    tier: StateTier = call_factory(make, **own)
    members = [name for name in vars(StateTier) if not name.startswith("_")]
    missing = [name for name in members if not hasattr(tier, name)]
    if missing:
        raise ConfigError(
            f"the state tier {type(tier).__name__} lacks members of zero_core.protocols.StateTier: "
            + ", ".join(missing)
        )
    return tier


def _load_kernel(config: Config, given: torch.optim.Optimizer | None, key: str) -> Any:
    """Return the host kernel for the optimizer, or None if torch's own update should run."""
    if not has_kernel_rule(config, given):
        return None
    named = f"an object of {type(given).__name__}"
    if given is None and config.optimizer is not None:
        named = f"optimizer.type = {config.optimizer.type!r}"
    if given is not None and not has_part(KERNELS, "cpu"):
        text = "torch's own update runs on the host; for a faster one"
        _log.info("%s with %s: %s: %s", key, named, text, install_command("cpu-adam"))
        return None
    return load_part(KERNELS, "cpu", asked_by=f"{key} with {named}", distribution="cpu-adam")


def make_param_tier(
    factory: ParamTierFactory | None, layout: Layout, config: Config, device: torch.device
) -> tuple[tuple[Segment, ...], ParamTier | None]:
    """Return the segments whose shards are offloaded, and make their tier if there are any."""
    zero, kind = config.zero_optimization, config.zero_optimization.offload_param.device
    if factory is None and kind == "none":
        return (), None
    if zero.stage < 3:
        raise ConfigError(f"param_tier needs zero_optimization.stage 3, found {zero.stage}")
    is_apart = factory is not None or kind == "nvme" or device.type != "cpu"
    if not is_apart:
        _log.info(
            "zero_optimization.offload_param.device = 'cpu': the model is computed on the CPU, so "
            "its shards are in host memory already and are used there"
        )
    segments = offloaded_segments(layout, config, is_apart=is_apart)
    if not segments:
        return (), None
    if factory is None:
        asked = f"zero_optimization.offload_param.device = {kind!r}"
        factory = load_part(PARAM_TIERS, "host", asked_by=asked, distribution="zero-offload")
    tier: ParamTier = call_factory(
        factory,
        shards=[(s.index, s.shard_numel, s.dtype) for s in segments],
        device=device,
        config=zero.model_dump(mode="json"),
    )
    return segments, tier
