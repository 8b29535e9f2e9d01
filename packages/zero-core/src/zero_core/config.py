"""The configuration: DeepSpeed's JSON, typed, with every default spelled out.

`load_config` reads a dict or a file and returns a `Config` in which everything is resolved: the
batch triple multiplies out, defaults are filled in, and every key has been honoured, or accepted
because this engine does not need it (`UNNEEDED` says why), or refused with a `ConfigError`. No key
is accepted and ignored in silence.

Names and defaults follow DeepSpeed's documentation of its JSON configuration, except that
``gradient_clipping`` is off unless the key is there.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from zero_core.errors import ConfigError

__all__ = [
    "UNNEEDED",
    "ActivationCheckpointingConfig",
    "Bf16Config",
    "Config",
    "DataTypesConfig",
    "Fp16Config",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
]

_log = logging.getLogger(__name__)

UNNEEDED: Mapping[str, str] = {
    "zero_optimization.contiguous_gradients": "gradients always lie in flat buffers",
    "zero_optimization.reduce_scatter": "a reduction always delivers just the shard",
    "zero_optimization.reduce_bucket_size": "a unit is the bucket",
    "zero_optimization.allgather_partitions": "a unit is always gathered in one collective",
    "zero_optimization.allgather_bucket_size": "a unit is the bucket",
    "zero_optimization.overlap_comm": "communication always overlaps with compute",
    "zero_optimization.load_from_fp32_weights": "checkpoints always hold the fp32 master weights",
    "zero_optimization.elastic_checkpoint": "checkpoints always load at any world size",
    "zero_optimization.sub_group_size": "the host update runs unit by unit",
    "zero_optimization.stage3_prefetch_bucket_size": "the next unit is always prefetched",
    "zero_optimization.stage3_max_live_parameters": "at most two units and the root are gathered",
    "zero_optimization.stage3_max_reuse_distance": "units are released in the order of execution",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "full_state_dict and export_safetensors gather on request"
    ),
    "zero_optimization.ignore_unused_parameters": "unused parameters are always allowed",
    "zero_optimization.round_robin_gradients": "shards are slices of units, already balanced",
    "zero_optimization.memory_efficient_linear": "saved weights are always kept by reference",
    "zero_optimization.offload_optimizer.fast_init": (
        "states that start at zero are never written to NVMe before their first update"
    ),
    "zero_optimization.offload_optimizer.pipeline_read": (
        "reads from NVMe always overlap with the update"
    ),
    "zero_optimization.offload_optimizer.pipeline_write": (
        "writes to NVMe always overlap with the update"
    ),
    "activation_checkpointing.partition_activations": "there are no model-parallel ranks",
    "activation_checkpointing.contiguous_memory_optimization": "a block keeps its inputs alone",
    "activation_checkpointing.number_checkpoints": "every block is one",
}
"""Keys that are accepted, and why this engine does without them."""

_OF_PARAM_OFFLOAD = (
    "offload_param.pin_memory",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
)
_OF_PARAM_NVME = tuple(
    f"offload_param.{key}" for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
)
_OF_OPTIMIZER_NVME = ("offload_optimizer.nvme_path", "offload_optimizer.buffer_count")


_REFUSED_UNLESS: Mapping[str, Any] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "sparse_gradients": False,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "amp": {"enabled": False},
    "tensorboard": {"enabled": False},
    "csv_monitor": {"enabled": False},
    "wandb": {"enabled": False},
    "comet": {"enabled": False},
    "flops_profiler": {"enabled": False},
    "comms_logger": {"enabled": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": True,
}
"""DeepSpeed's further top-level keys and the value at which this engine does the same anyway."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)


class OffloadOptimizerConfig(_Block):
    """``zero_optimization.offload_optimizer``: where optimizer state lives and is updated."""

    device: Literal["none", "cpu", "nvme"] = "none"
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] | None = 1.0
    """Share of the elements that the host updates (Twin-Flow), exact to the element; "auto"
    measures which is the fastest that fits. None where one of the next two says it instead."""
    parameters: tuple[str, ...] | None = None
    """Patterns (`fnmatch`) of the names of the parameters that the host updates."""
    device_budget: NonNegativeInt | None = None
    """Bytes per rank that master weights, states and landed gradients may take on the device; the
    host updates the elements that do not fit."""
    pin_memory: bool = True
    pin_memory_bytes: NonNegativeInt | None = None
    """Most host bytes that a rank page-locks for transfers; None is no limit."""
    update_in_backward: bool | None = None
    """Update a unit as soon as its gradient is complete; None: if nothing can call a step off."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """What the host keeps Adam's moments in. Not in DeepSpeed's configuration."""
    numa: bool = True
    """Keep the host's thread and memory on the device's NUMA node, where it is known."""
    nvme_path: str | None = None
    """A folder on the NVMe disk, for device nvme; the ranks of a host may share it."""
    buffer_count: PositiveInt = 16
    """Blocks of 1 Mi elements of state in host memory at once, for device nvme: what is read before
    it is needed. DeepSpeed's 4 are of a whole parameter each."""
    fast_init: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _say_it_once(cls, block: Any) -> Any:
        """Without ``ratio`` beside ``parameters`` or ``device_budget`` there is none."""
        if isinstance(block, Mapping) and (block.keys() & {"parameters", "device_budget"}):
            others = (block.get("parameters"), block.get("device_budget"))
            if any(value is not None for value in others):
                return {"ratio": None, **block}
        return block

    @pydantic.field_validator("ratio", mode="before")
    @classmethod
    def _check_ratio(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value in (None, "auto") or (is_number and 0.0 <= value <= 1.0):
            return value
        raise ValueError('expected a number from 0 to 1, or "auto"')

    @pydantic.field_validator("parameters", mode="before")
    @classmethod
    def _check_patterns(cls, value: Any) -> Any:
        if value is None:
            return None
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or not all(isinstance(pattern, str) for pattern in value):
            raise ValueError("expected a list of patterns of parameter names")
        return tuple(value)


class OffloadParamConfig(_Block):
    """``zero_optimization.offload_param``: where parameter shards rest, at stage 3."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: PositiveInt = 5
    """Host buffers that shards are read into ahead of use, with device ``nvme``."""
    buffer_size: PositiveInt = 100_000_000
    """Elements of the largest shard that such a buffer may have to hold."""
    max_in_cpu: NonNegativeInt = 1_000_000_000
    """Elements that rest in host memory with device ``nvme``, the first ones in order of use."""
    pin_memory: bool = True


class ZeroConfig(_Block):
    """``zero_optimization``."""

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zero_hpz_partition_size: PositiveInt = 1
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = -1
    zenflow: dict[str, Any] | None = None
    leaf_module: dict[str, Any] | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: PositiveInt = 500_000_000
    allgather_partitions: bool = True
    allgather_bucket_size: PositiveInt = 500_000_000
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    sub_group_size: PositiveInt = 1_000_000_000
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_model_persistence_threshold: NonNegativeInt = 2**63 - 1
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    ignore_unused_parameters: bool = True
    round_robin_gradients: bool = False
    memory_efficient_linear: bool = True


class Fp16Config(_Block):
    """``fp16``: half precision with a loss scale (Micikevicius et al., arXiv 1710.03740)."""

    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0.0)] = 0.0
    """0 means dynamic."""
    initial_scale_power: NonNegativeInt = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, Field(gt=0.0)] = 1.0


class Bf16Config(_Block):
    """``bf16``: bfloat16 compute over fp32 master weights."""

    enabled: bool = False


class DataTypesConfig(_Block):
    """``data_types``: dtypes other than those that parameters are computed in."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """What gradients are accumulated in; None is fp32."""
    buffer_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """What floating buffers are cast to; None is as parameters are."""


class ActivationCheckpointingConfig(_Block):
    """``activation_checkpointing``: if it is there, every block is computed again in backward."""

    enabled: bool = True
    cpu_checkpointing: bool = False
    """Keep the blocks' inputs in host memory until then."""
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: PositiveInt | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class OptimizerConfig(_Block):
    """``optimizer``: a torch optimizer by name; see zero_core.optimizer for ``params``."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class SchedulerConfig(_Block):
    """``scheduler``: a learning-rate schedule by name; see zero_core.lr_schedules."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Config(_Block):
    """The whole configuration, resolved."""

    train_batch_size: PositiveInt
    train_micro_batch_size_per_gpu: PositiveInt
    gradient_accumulation_steps: PositiveInt
    zero_optimization: ZeroConfig = ZeroConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Annotated[float, Field(ge=0.0)] = 0.0
    """Largest global 2-norm of the gradient; 0 is off."""
    check_grad_overflow: bool = True
    """Skip a step whose gradient is not finite, at every precision."""
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    activation_checkpointing: ActivationCheckpointingConfig | None = None
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    broadcast_buffers: bool = True
    """Take rank 0's buffers before a forward, as DDP does; see zero_core.buffers."""
    seed: NonNegativeInt | None = None
    """Seeds torch on every rank before the first step, if given."""
    steps_per_print: PositiveInt | None = None
    """Log step, loss scale and learning rate every so many steps; None is off."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What floating parameters are cast to; None leaves each as it is."""
        if self.bf16.enabled:
            return torch.bfloat16
        return torch.float16 if self.fp16.enabled else None

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """What floating buffers are cast to; None leaves each as it is."""
        name = self.data_types.buffer_dtype
        return self.compute_dtype if name is None else DTYPES[name]


DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

_OWN_AUTO = "zero_optimization.offload_optimizer.ratio"
"""Where "auto" is a value of this engine's own."""

_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def load_config(source: Mapping[str, Any] | str | Path, *, world_size: int) -> Config:
    """Read, check and resolve a configuration.

    Args:
        source: the configuration as a mapping, or the path of its JSON file.
        world_size: number of data-parallel ranks; the batch triple is resolved with it.

    Raises:
        ConfigError: with the path of the key, what was found, and what to do.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read_json(Path(source))
    raw = _without_nulls(raw)
    # bf16.check_grad_overflow is DeepSpeed's place for it; here it holds at every precision.
    bf16 = raw.get("bf16")
    if isinstance(bf16, dict) and "check_grad_overflow" in bf16:
        raw["bf16"] = {k: v for k, v in bf16.items() if k != "check_grad_overflow"}
        if bf16.get("enabled"):
            raw.setdefault("check_grad_overflow", bf16["check_grad_overflow"])
    _refuse_auto(raw, "")
    raw = _take_out_further_keys(raw)
    raw.update(_resolve_batch(raw, world_size))
    try:
        config = Config.model_validate(raw)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None
    _refuse_unserved(config)
    _tell_unneeded(raw, config)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{path}: duplicate key {twice[0]!r}: keep one of them")
        return dict(pairs)

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error}") from error
    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys that are null: in DeepSpeed's JSON that means the default."""
    return {
        k: _without_nulls(v) if isinstance(v, Mapping) else v
        for k, v in block.items()
        if v is not None
    }


def _take_out_further_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Drop DeepSpeed's keys that say what holds anyway; refuse them where they ask for more."""
    for key, same in _REFUSED_UNLESS.items():
        value = raw.get(key, same)
        is_off = value.get("enabled") is False if isinstance(value, Mapping) else False
        if value != same and not is_off and value != {}:
            raise ConfigError(
                f"{key} = {value!r} is not served; leave the key out (same as {same!r})"
            )
    return {k: v for k, v in raw.items() if k not in _REFUSED_UNLESS}


def _refuse_auto(block: Mapping[str, Any], path: str) -> None:
    for key, value in block.items():
        if value == "auto" and f"{path}{key}" != _OWN_AUTO:
            raise ConfigError(
                f'{path}{key}: "auto" is filled in by the Hugging Face integration; '
                "give a value here or leave the key out"
            )
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{path}{key}.")


def _resolve_batch(raw: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks."""
    given: dict[str, int] = {}
    for key in _BATCH:
        value = raw.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: expected a whole number >= 1, found {value!r}")
        if key in raw:
            given[key] = value
    total, micro, steps = (given.get(key) for key in _BATCH)
    if total is None and micro is None:
        raise ConfigError(
            "train_batch_size or train_micro_batch_size_per_gpu must be given: "
            "one of them is needed to know how many samples make a step"
        )
    if micro is None:
        assert total is not None
        micro = _divide(total, world_size * (steps or 1), given, world_size)
    if steps is None:
        steps = 1 if total is None else _divide(total, micro * world_size, given, world_size)
    product = micro * steps * world_size
    if total is not None and total != product:
        raise _batch_error(given, world_size)
    return dict(zip(_BATCH, (product, micro, steps), strict=True))


def _divide(total: int, by: int, given: Mapping[str, int], world_size: int) -> int:
    if total % by:
        raise _batch_error(given, world_size)
    return total // by


def _batch_error(given: Mapping[str, int], world_size: int) -> ConfigError:
    found = ", ".join(f"{key} = {value}" for key, value in given.items())
    return ConfigError(
        f"{found} with {world_size} ranks does not multiply out: train_batch_size must equal "
        "train_micro_batch_size_per_gpu * gradient_accumulation_steps * number of ranks; "
        "leave one of them out and it is derived"
    )


def _block_at(path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model class whose field the last element of ``path`` would be."""
    block: type[BaseModel] = Config
    for key in path[:-1]:
        field = block.model_fields.get(str(key))
        kinds = [] if field is None else [field.annotation, *_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not inner:
            return None
        block = inner[0]
    return block


def _args(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())


def _explain(error: Any) -> str:
    """One line for one of pydantic's errors."""
    path: tuple[int | str, ...] = error["loc"]
    name = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        block = _block_at(path)
        known = sorted(block.model_fields) if block is not None else []
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{name}: unknown key; {hint}"
    return f"{name}: {error['msg']}, found {error['input']!r}"


def _refuse_unserved(config: Config) -> None:
    """Raise for combinations that are wrong and for features that are not served."""
    zero, offload = config.zero_optimization, config.zero_optimization.offload_optimizer
    shares = ("ratio", "parameters", "device_budget")
    given = [k for k in shares if k in offload.model_fields_set and getattr(offload, k) is not None]
    again, params = config.activation_checkpointing, zero.offload_param
    wrong = [
        (
            config.fp16.enabled and config.bf16.enabled,
            "fp16.enabled and bf16.enabled: only one of them can be true",
        ),
        (
            offload.device == "nvme" and not offload.nvme_path,
            "zero_optimization.offload_optimizer.device = 'nvme' needs "
            "zero_optimization.offload_optimizer.nvme_path, a folder on the NVMe disk",
        ),
        (
            params.device != "none" and zero.stage != 3,
            f"zero_optimization.offload_param.device = {params.device!r} needs stage 3, found "
            f"{zero.stage}: at lower stages every rank holds all parameters",
        ),
        (
            params.device == "nvme" and params.nvme_path is None,
            "zero_optimization.offload_param.device = 'nvme' needs nvme_path: name a folder on "
            "the NVMe disk",
        ),
        (
            bool(offload.update_in_backward) and offload.device == "none",
            "zero_optimization.offload_optimizer.update_in_backward needs device 'cpu' or 'nvme'",
        ),
        (
            bool(offload.update_in_backward)
            and bool(config.gradient_clipping or config.fp16.enabled or config.check_grad_overflow),
            "zero_optimization.offload_optimizer.update_in_backward: a step must not be called off "
            "any more once a unit is updated, so leave gradient_clipping and fp16 out and set "
            "check_grad_overflow to false",
        ),
        (
            offload.device == "none" and len(given) > 0,
            f"zero_optimization.offload_optimizer.{next(iter(given), '')} needs device 'cpu' or "
            "'nvme'",
        ),
        (
            len(given) > 1,
            f"zero_optimization.offload_optimizer: {' and '.join(given)} each say what the host "
            "updates: give one",
        ),
        (
            offload.ratio == "auto" and zero.stage == 0,
            "zero_optimization.offload_optimizer.ratio = 'auto' needs stage 1 or more: at stage 0 "
            "every rank updates every element, and ranks that choose different ratios may round "
            "one differently",
        ),
        (
            offload.device == "none" and "state_dtype" in offload.model_fields_set,
            "zero_optimization.offload_optimizer.state_dtype needs device 'cpu' or 'nvme'",
        ),
        (
            zero.zero_quantized_weights and zero.stage != 3,
            "zero_optimization.zero_quantized_weights needs stage 3: at lower stages the gathered "
            "weights are the master weights",
        ),
        (
            zero.zero_quantized_nontrainable_weights,
            "zero_optimization.zero_quantized_nontrainable_weights is not served; "
            "zero_quantized_weights covers frozen weights too",
        ),
        (
            zero.zero_quantized_gradients,
            "zero_optimization.zero_quantized_gradients is not served",
        ),
        (
            zero.zero_hpz_partition_size > 1,
            "zero_optimization.zero_hpz_partition_size > 1 is not served",
        ),
        (
            zero.zeropp_loco_param is not None,
            "zero_optimization.zeropp_loco_param is not served",
        ),
        (
            again is not None and again.profile,
            "activation_checkpointing.profile is not served: leave it out",
        ),
        (
            again is not None and again.synchronize_checkpoint_boundary,
            "activation_checkpointing.synchronize_checkpoint_boundary is not served: leave it out",
        ),
        (zero.mics_shard_size > 0, "zero_optimization.mics_shard_size is not served"),
        (zero.zenflow is not None, "zero_optimization.zenflow is not served"),
        (zero.leaf_module is not None, "zero_optimization.leaf_module is not served"),
    ]
    for is_wrong, message in wrong:
        if is_wrong:
            raise ConfigError(message)


def _unneeded(config: Config) -> dict[str, str]:
    """`UNNEEDED`, and the keys that this configuration makes pointless."""
    zero = config.zero_optimization
    device = zero.offload_param.device
    pointless = [
        (device == "none", _OF_PARAM_OFFLOAD, "used with offload_param only"),
        (device != "nvme", _OF_PARAM_NVME, "used with offload_param.device 'nvme' only"),
        (
            zero.offload_optimizer.device != "nvme",
            _OF_OPTIMIZER_NVME,
            "used with offload_optimizer.device 'nvme' only",
        ),
        (
            zero.offload_optimizer.device == "none",
            [f"offload_optimizer.{key}" for key in ("pin_memory", "pin_memory_bytes", "numa")],
            "used with offload_optimizer only",
        ),
    ]
    found = dict(UNNEEDED)
    for is_pointless, keys, why in pointless:
        if is_pointless:
            found |= {f"zero_optimization.{key}": why for key in keys}
    return found


def _tell_unneeded(raw: Mapping[str, Any], config: Config) -> None:
    """Log, once per build, the keys that were given and have no effect here."""
    for path, reason in _unneeded(config).items():
        block: Any = raw
        *parents, key = path.split(".")
        for parent in parents:
            block = block.get(parent, {})
        if key in block:
            _log.info("%s = %r has no effect: %s", path, block[key], reason)
