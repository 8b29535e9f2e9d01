"""`initialize`, which turns a model into an engine, and prints the configuration in effect."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from zero_core import ShardedModel, build, engine_of
from zero_core.adapters import Cures, check_served, find_ranks, make_optimizer, tag_matrices
from zero_core.config import Config, OptimizerConfig, find_unneeded, load_config
from zero_core.errors import ConfigError
from zero_engine.deepspeed.comm import choose_device, init_distributed
from zero_engine.deepspeed.config import reader
from zero_engine.deepspeed.config.reader import PATHS, Settings, Source, read
from zero_engine.deepspeed.dataloader import DeepSpeedDataLoader
from zero_engine.deepspeed.engine.engine import DeepSpeedEngine
from zero_engine.deepspeed.engine.optimizer import DeepSpeedOptimizer
from zero_engine.deepspeed.errors import ModelMissingError, NotServedError, UntestedOptimizerError
from zero_engine.deepspeed.ops.optimizers import CLASSES, DeepSpeedCPUAdam, made_as
from zero_engine.deepspeed.served import VERSION
from zero_engine.deepspeed.utils.logging import log_dist, speak
from zero_engine.deepspeed.utils.z3_leaf_module import mark_configured
from zero_engine.deepspeed.zero.partition_parameters import describe_engine, suspended_init
from zero_engine.deepspeed.zero.partitioned import leave_partitioned
from zero_engine.terminal import count

DeepSpeedConfigError = ConfigError
TESTED = (
    *("Adam", "AdamW", "Adagrad", "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad"),
    *("DeepSpeedCPULion", "FusedLion", "MuonWithAuxAdam"),
)
EMPTY_ENTRIES = (
    "parameters are sharded at stage 3, and a file of these entries would be empty. To save, use "
    "save_pretrained(..., state_dict=accelerator.get_state_dict(model)), "
    "engine.save_16bit_model(), or "
    "state_dict() within deepspeed.zero.GatheredParameters(list(model.parameters()))"
)
"""Advice on saving the weights, which ``module.state_dict()`` lacks at stage 3."""
CURES = Cures(
    read="deepspeed.zero.GatheredParameters([param])",
    write="deepspeed.zero.GatheredParameters([param], modifier_rank=...)",
    declare="call deepspeed.zero.register_external_parameter(module, param) before initialize()",
)
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NO_KEYS = ("raw", "core", "notes", "steps_per_print")
"""Fields of `Settings` that are no keys, or are described with zero-core's configuration."""
_DEFAULTS = Settings(raw={}, core={})
_LOGGERS = ("DeepSpeed", "zero_core", "zero_comm", "zero_engine", "zero_offload")
_log = logging.getLogger(__name__)

OptimizerOrFactory = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]
_Made = tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DeepSpeedDataLoader | None, Any]


@suspended_init()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerOrFactory | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> _Made:
    """Make an engine out of a model, as ``deepspeed.initialize`` does.

    Every rank must call it, with the same model and configuration. The parameters move to the
    engine's memory; see `zero_core.build`. An earlier engine of the model is ended as by its
    ``destroy()``: values are kept, and gradients that wait for a step are dropped. A wrong
    configuration or optimizer is refused while the earlier engine still works. After a later
    failure the model is as before, or as the earlier engine left it. Within `zero.Init`, the
    parameters made so far are partitioned first.

    Args:
        args: the parsed command line. Its ``deepspeed_config`` is used if no configuration is
            passed, its ``local_rank`` is set, and its ``device_rank`` is the accelerator's index.
        optimizer: a torch optimizer, or a function that makes one out of ``model_parameters``. It
            replaces the configuration's.
        model_parameters: parameters or groups to train. Default: all that require a gradient.
            Frozen ones among them can be unfrozen later.
        training_data, collate_fn: dataset and argument of the loader that is returned.
        lr_scheduler: a scheduler, or a function that makes one out of the optimizer. It replaces
            the configuration's.
        distributed_port: port of rank 0, if the environment has none.
        mpu: Megatron's parallel state, with one model-parallel rank.
        dist_init_required: False does not start torch.distributed.
        config, config_params: the configuration; see `zero_engine.deepspeed.config.read`.

    Returns:
        The engine, its optimizer, the loader and the scheduler. The last three may be None. Without
        an optimizer the engine only evaluates.

    Raises:
        ConfigError: the configuration is wrong or does not fit the model.
        ValueError: no model (ModelMissingError), no configuration or two configurations were given.
        NotServedError: model parallelism or ``mesh_param`` is requested.
    """
    if model is None:
        raise ModelMissingError("initialize() needs a model, found None: pass model=...")
    if mesh_param is not None:
        raise NotServedError("initialize(mesh_param=...), sequence parallelism,")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    info = f"DeepSpeed info: version={VERSION}, git-hash=zero-engine, git-branch=zero-engine"
    log_dist(info, ranks=[0])
    choose_device(_option(args, "device_rank"))
    source = config if config is not None else config_params
    from_args = _option(args, "deepspeed_config") or _option(args, "deepscale_config")
    if from_args is not None and source is not None:
        raise ValueError(
            "a configuration was given to initialize() and another one as args.deepspeed_config "
            f"({from_args!r}): give one"
        )
    found = source if source is not None else from_args
    if found is None:
        raise ValueError("no configuration: pass config=... or --deepspeed_config FILE")
    settings = read(found)
    apply(settings)
    if _option(args, "local_rank") is not None:
        args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    given = _make_optimizer(settings, model, optimizer, model_parameters)
    # If the key is missing, DeepSpeed refuses an untested optimizer, and this engine allows it.
    is_checked = settings.allows_untested_optimizer is False and (
        int(settings.core.get("zero_optimization", {}).get("stage", 0)) > 0
    )
    if is_checked and given is not None and type(given).__name__ not in TESTED:
        raise UntestedOptimizerError(
            f"zero_allow_untested_optimizer is false, and {type(given).__name__} is none of those "
            f"that DeepSpeed has tested ({', '.join(TESTED)}): set it to true, or leave it out"
        )
    if isinstance(given, DeepSpeedCPUAdam) and not given.fp32_optimizer_states:
        reader.keep_bf16_moments(settings.core)
    is_training = given is not None or "optimizer" in settings.core
    left_out = {"optimizer"} if optimizer is not None else set()
    if lr_scheduler is not None or not is_training:
        left_out.add("scheduler")
    of_core = {k: v for k, v in settings.core.items() if k not in left_out}
    group = _data_parallel_group(mpu)
    engines = {id(one): one for one in map(engine_of, model.parameters()) if one is not None}
    if engines:
        _check(of_core, given, world_size=find_ranks(group, None).size)
    for one in engines.values():
        _log.info("initialize() of a model that has an engine: that one is ended, as by destroy()")
        leave_partitioned(one)
    made: list[_Made] = []

    def attach(core: ShardedModel) -> None:
        core.name_cures(CURES)
        mark_configured(model, core.config.zero_optimization.leaf_module)
        if core.config.zero_optimization.stage == 3:
            core.stay_with_model()  # shards live as long as the model, as in DeepSpeed
            core.keep_small_params()
            describe_engine(core)
            # OpenRLHF reads the names of the state dict on rank 0. At stage 3 its values are empty.
            core.allow_empty_entries(EMPTY_ENTRIES)
        if core.rank == 0:
            print(describe(settings, core.config, core.world_size), file=sys.stderr, flush=True)
        engine = DeepSpeedEngine(
            core,
            settings,
            client_optimizer=optimizer,
            client_lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
        )
        if given is None and engine.optimizer is not None:
            _name_optimizer(engine)
        made.append((engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler))

    untrained = [] if given is None else _find_untrained(model, given)
    try:
        for param in untrained:
            param.requires_grad_(False)
        build(
            model,
            of_core,
            optimizer=given,
            lr_scheduler=lr_scheduler if is_training else None,
            process_group=group,
            attach=attach,
            is_training=is_training,
        )
    except BaseException:
        for param in untrained:
            param.requires_grad_(True)
        raise
    return made[0]


def _name_optimizer(engine: DeepSpeedEngine) -> None:
    """Make ``isinstance`` find DeepSpeed's class for the configuration's optimizer.

    At stage 0 in fp32 it also finds that class for the returned view.
    """
    named, config = engine.core.config.optimizer, engine.core.config
    zero, view = config.zero_optimization, engine.optimizer
    if named is None or view is None:
        return
    on_device, on_host = CLASSES.get(named.type.lower(), (None, None))
    chosen = on_device if zero.offload_optimizer.device == "none" else on_host
    if chosen is None or named.params.get("torch_adam"):  # torch_adam asks for torch's own class
        return
    is_bare = zero.stage == 0 and config.compute_dtype is None
    for optimizer in (view.optimizer, view) if is_bare else (view.optimizer,):
        made_as[optimizer] = chosen


def _option(args: Any, name: str) -> Any:
    # foreign: the script's parsed command line may be of any class.
    return getattr(args, name, None)


def _check(config: dict[str, Any], given: torch.optim.Optimizer | None, *, world_size: int) -> None:
    resolved = load_config(config, world_size=world_size)
    if given is not None:
        check_served(type(given))
    elif resolved.optimizer is not None:
        tried = nn.Parameter(torch.empty(1, 1))  # small, because Adagrad makes its state here
        tag_matrices([("weight", tried)])
        make_optimizer(resolved.optimizer, [tried])


def _make_optimizer(
    settings: Settings,
    model: nn.Module,
    given: OptimizerOrFactory | None,
    model_parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    """Return the optimizer for `build`. None lets `build` make the configured one, if any."""
    groups = None if model_parameters is None else list(model_parameters)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(groups if groups is not None else trainable)
    if groups is None or "optimizer" not in settings.core:
        return None
    if {id(p) for p in groups} == {id(p) for p in trainable}:
        return None
    named = reader.parse_block(OptimizerConfig, settings.core, "optimizer")
    if named.type.lower() == "muon":
        tag_matrices(model.named_parameters())
    return make_optimizer(named, groups)


def _find_untrained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return trainable parameters in no group of ``optimizer``. Logs a warning about them."""
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered}
    if left:
        _log.warning(
            "%d parameters are in no optimizer group and will not be trained: %s",
            len(left),
            ", ".join(list(left)[:5]),
        )
    return list(left.values())


def _data_parallel_group(mpu: Any) -> Any:
    if mpu is None:
        return None
    for kind in ("model", "tensor_model", "pipeline_model"):
        ask = getattr(mpu, f"get_{kind}_parallel_world_size", None)
        if ask is not None and ask() > 1:
            raise NotServedError(f"an mpu of {ask()} {kind.replace('_', ' ')} parallel ranks")
    return mpu.get_data_parallel_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, and their old names. Returns ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(
            f"--{name}",
            default=False,
            action="store_true",
            help="for the script's own use; the engine does not read it",
        )
        group.add_argument(
            f"--{name}_config", default=None, type=str, help="path of the JSON configuration"
        )
    return parser


def apply(settings: Settings) -> None:
    if settings.steps_per_print is not None:
        speak("zero_core.optim.train_state", logging.INFO)
    if settings.log_level is not None:
        for name in _LOGGERS:
            speak(name, settings.log_level.upper())
    if settings.disable_python_gc:
        gc.collect()
        gc.disable()
    zero = settings.core.get("zero_optimization", {})
    for block in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        is_file = isinstance(block, Mapping) and block.get("device") == "nvme"
        if is_file and isinstance(block.get("nvme_path"), str):
            Path(block["nvme_path"]).mkdir(parents=True, exist_ok=True)  # as DeepSpeed does


def describe(settings: Settings, config: Config, world_size: int) -> str:
    total, micro, steps = (getattr(config, key) for key in _BATCH)
    # The fields of `Settings` that hold keys, by path in a configuration.
    own = {PATHS.get(f.name, f.name): f.name for f in fields(Settings) if f.name not in _NO_KEYS}
    unneeded = list(find_unneeded(settings.core, config))
    if config.zero_optimization.stage == 3:  # `keep_small_params` uses them without offload_param
        unneeded = [row for row in unneeded if not row[0].endswith("_persistence_threshold")]
    skipped = {*_BATCH, *own, *(path for path, _, _ in unneeded)}
    different = [row for row in _leaves("", config, None) if row[0] not in skipped]
    for path, name in own.items():
        leaves = _leaves(path, getattr(settings, name), getattr(_DEFAULTS, name))
        different += [row for row in leaves if not row[0].endswith("api_key")]
    lines = [
        "zero-engine: configuration in effect; every other key has its default",
        f"  batch: {total} samples a step = {micro} a rank and micro-step * "
        f"{count(steps, 'micro-step')} * {count(world_size, 'rank')}",
        *(f"  {path} = {json.dumps(value)}" for path, value in different),
    ]
    without_effect = [*settings.notes, *(row for row in unneeded if row[0] not in own)]
    if without_effect:
        lines.append("  keys without effect, or with another name:")
    for path, value, text in without_effect:
        shown = json.dumps(value, default=str)
        lines.append(f"    {path} = {shown if len(shown) <= 60 else f'{shown[:57]}...'}: {text}")
    if settings.dump_state:
        lines += ["  all of it:", config.model_dump_json(indent=2)]
    return "\n".join(lines)


def _leaves(path: str, value: Any, default: Any) -> Iterator[tuple[str, object]]:
    if value == default:
        return
    if not isinstance(value, BaseModel):
        yield path, value
        return
    for name, field in type(value).model_fields.items():
        below = f"{path}.{name}" if path else name
        its_default = field.get_default(call_default_factory=True)
        yield from _leaves(below, getattr(value, name), its_default)
