"""DeepSpeed's JSON, read as DeepSpeed reads it, with DeepSpeed's defaults.

`read` sorts a configuration into keys for `zero_core.build` and keys for the DeepSpeed engine. A
key of DeepSpeed that zero-core lacks is in one of three tables, as in
``docs/deepspeed-config.md``: honoured (`HONOURED`), without effect (`UNNEEDED` has the reason), or
refused unless its value changes nothing (`REFUSED`). A key without effect becomes a `Note`, which
`zero_engine.deepspeed.initialize` prints. As in DeepSpeed, unknown keys are refused in the blocks
that DeepSpeed checks, and have no effect elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pydantic

from zero_core.config import (
    LARGEST,
    Config,
    as_kind,
    as_typed,
    as_whole,
    block_of,
    check_plain,
    explain,
    read_config_text,
    shown,
)
from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.hjson import parse_hjson
from zero_engine.deepspeed.served import VERSION
from zero_engine.monitoring import (
    COLLECTIVES,
    CommsLoggerSettings,
    FlopsProfilerSettings,
    MonitorSettings,
    ThroughputSettings,
)


class Refusal(NamedTuple):
    """Rule of a refused key: only its ``harmless`` values and disabled blocks are accepted."""

    harmless: tuple[Any, ...]
    reason: str


FLAGS = frozenset(
    {
        "activation_checkpointing.cpu_checkpointing",
        "dataloader_drop_last",
        "disable_python_gc",
        "dump_state",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "wall_clock_breakdown",
    }
)
"""Paths of booleans. The last name of a path is a field of `Settings`."""
HONOURED = FLAGS | frozenset(
    {
        *MonitorSettings.model_fields,
        "checkpoint.tag_validation",
        "log_level",
        "comms_logger",
        "flops_profiler",
        "timers.throughput",
        "zero_allow_untested_optimizer",
    }
)
"""Keys, and blocks of keys, that `Settings` has instead of zero-core's configuration."""

_DEEPCOMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)
_NVME = "block_size queue_depth intra_op_parallelism single_submit overlap_events"


def _alike(block: str, keys: str, reason: str) -> dict[str, str]:
    return dict.fromkeys((f"{block}.{key}" for key in keys.split()), reason)


UNNEEDED: Mapping[str, str] = {
    "activation_checkpointing.partition_activations": "there are no model-parallel ranks",
    "activation_checkpointing.contiguous_memory_optimization": "a block keeps its inputs alone",
    "activation_checkpointing.number_checkpoints": "each call is one checkpoint",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing waits for the host there",
    "activation_checkpointing.profile": "wall_clock_breakdown tells forward and backward",
    **_alike("aio", _NVME, "zero-offload has its own block size and queue"),
    "checkpoint.load_universal": "every checkpoint loads at any stage and world size",
    **_alike(
        "checkpoint",
        "parallel_write checkpoint_serialization writer",
        "checkpoints are written as safetensors, each rank its own part",
    ),
    **_alike("compile", _DEEPCOMPILE, "used with compile.deepcompile only, which is not served"),
    "data_parallel_size": "every rank is a data-parallel one",
    "disable_allgather": "DeepSpeed does nothing with it either",
    "flops_profiler.recompute_fwd_factor": "backward is counted, not taken for twice the forward",
    "optimizer.legacy_fusion": "of optimizers that are no longer there",
    "optimizer.params.set_grad_none": "gradients never stay on the parameters",
    "pipeline": "used with a PipelineModule only, which is not served",
    "seq_parallel_communication_data_type": "there are no sequence-parallel ranks",
    "timers.throughput.synchronized": "the device is waited for when a line is written only",
    "vocabulary_size": "DeepSpeed only warns if it is no multiple of 8",
    "zero_force_ds_cpu_optimizer": (
        "the host's kernel computes the rule of the optimizer that was given"
    ),
}
"""Keys without effect, and the reason."""

_GONE = "removed from DeepSpeed, too"
_NO_MODEL_PARALLEL = "all ranks are data-parallel: leave it out"

REFUSED: Mapping[str, Refusal] = {
    "aio.use_gds": Refusal((False,), "GPUDirect Storage is not served: set it to false"),
    "amp": Refusal((), f"{_GONE}: use bf16 or fp16"),
    "autotuning": Refusal((), "`zero-engine plan` says what fits: leave it out"),
    "checkpoint.use_node_local_storage": Refusal(
        (False,), "all ranks write into one folder: save to a file system that all nodes share"
    ),
    "compile.deepcompile": Refusal((False,), "call engine.compile(), or torch.compile a block"),
    "compression_training": Refusal((), _GONE),
    "curriculum_learning": Refusal((), _GONE),
    "data_efficiency": Refusal((), "give a sampler of your own to the data loader"),
    "data_types.keep_in_fp32_modules": Refusal(
        ([],), "buffers keep the dtype that the model gives them unless buffer_dtype is set"
    ),
    "datastates_ckpt": Refusal((False,), "checkpoints are safetensors: leave it out"),
    "eigenvalue": Refusal((), _GONE),
    "elasticity": Refusal((), f"{_GONE}: every checkpoint loads at any world size"),
    "expert_parallel": Refusal((), _NO_MODEL_PARALLEL),
    "graph_harvesting": Refusal((False,), _GONE),
    "hybrid_engine": Refusal((), "generate with engine.module.generate(), at any stage"),
    "msamp": Refusal((), "MS-AMP is not served: use bf16 or fp16"),
    "nebula": Refusal((), _GONE),
    "optimizer.params.max_grad_norm": Refusal((0,), "use gradient_clipping"),
    "progressive_layer_drop": Refusal((), _GONE),
    "quantize_training": Refusal((), _GONE),
    "sequence_parallel_size": Refusal((1,), _NO_MODEL_PARALLEL),
    "sparse_attention": Refusal((), _GONE),
    "sparse_gradients": Refusal((False,), f"{_GONE}: embeddings need sparse=False"),
    "tensor_parallel": Refusal((), _NO_MODEL_PARALLEL),
    "use_data_before_expert_parallelism": Refusal((False,), _NO_MODEL_PARALLEL),
    "weight_quantization": Refusal((), "see zero_quantized_weights for weights on the wire"),
}
"""Keys that are refused unless their value changes nothing."""


def check_refused(path: str, value: Any) -> None:
    harmless, reason = REFUSED[path]
    if isinstance(value, Mapping):
        is_block = "enabled" in value
        asked = [as_kind(value["enabled"], bool)] if is_block else list(value.values())
        is_off = not any(v is True or v not in (None, False, 0, 1, {}) for v in asked)
    else:
        is_off = as_kind(value, bool) in harmless
    if not is_off:
        raise ConfigError(f"{path} = {value!r} is not served: {reason}")


_ZERO = "zero_optimization"
_OWN_AUTO = ("accumulation_schedule", f"{_ZERO}.offload_optimizer.ratio")
"""Keys whose value "auto" is passed on to zero-core, which chooses a value."""

_STAGE3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Keys of ``zero_optimization`` that DeepSpeed accepts with and without ``stage3_``."""
_RENAMED = {
    **{key: f"stage3_{key}" for key in _STAGE3},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Keys of ``zero_optimization``, by other names that DeepSpeed accepts for them."""
_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}

_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}
"""DeepSpeed's defaults of Lion, which differ from `zero_core.Lion`'s."""
_DTYPE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
}

Tell = Callable[[str, Any, str], None]
"""Function that records a `Note`: a key's path, its value, and a text."""


def without_auto(block: Mapping[str, Any], tell: Tell, path: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in block.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping):
            kept[key] = without_auto(value, tell, f"{where}.")
        elif value == "auto" and where not in _OWN_AUTO:
            tell(where, value, "nothing filled it in: the default holds")
        elif value is not None:
            kept[key] = value
    return kept


def modernise(config: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Return ``config`` with old keys renamed. Raises ConfigError if both names are given."""
    new = dict(config)
    if "bfloat16" in new:
        _rename(new, "bfloat16", "bf16", tell)
    zero = new.get(_ZERO)
    if isinstance(zero, bool):
        tell(_ZERO, zero, f"an old form: {_ZERO}.stage = {int(zero)}")
        new[_ZERO] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        zero = new[_ZERO] = dict(zero)
        for old, name in _RENAMED.items():
            if old in zero:
                _rename(zero, old, name, tell, f"{_ZERO}.")
        pins = zero.pop("cpu_offload_use_pin_memory", None)
        for old, name in _OFFLOAD.items():
            if old in zero:
                _offload(zero, old, name, pins, tell)
        if pins is not None:
            text = "an old key: pin_memory of the offload"
            tell(f"{_ZERO}.cpu_offload_use_pin_memory", pins, text)
        if zero.get("zero_hpz_partition_size") == 0:
            zero["zero_hpz_partition_size"] = 1  # DeepSpeed's 0 also means no secondary shards
    for key in ("communication_data_type", "gradient_allreduce_op"):
        if isinstance(new.get(key), str):
            new[key] = new[key].lower()
    return new


def as_bool(path: str, value: Any) -> bool:
    """Return the boolean that DeepSpeed reads ``value`` as, or raise ConfigError."""
    found = as_kind(value, bool)
    if not isinstance(found, bool):
        raise ConfigError(f"{path}: expected true or false, found {shown(value)}")
    return found


def _offload(zero: dict[str, Any], old: str, name: str, pins: bool | None, tell: Tell) -> None:
    is_on = as_bool(f"{_ZERO}.{old}", zero.pop(old))
    tell(f"{_ZERO}.{old}", is_on, f"an old key: {_ZERO}.{name}.device")
    if not is_on:
        return
    if name in zero:
        raise ConfigError(f"{_ZERO}.{old} and {_ZERO}.{name} say the same: give the latter")
    zero[name] = {"device": "cpu", **({} if pins is None else {"pin_memory": pins})}


def _rename(block: dict[str, Any], old: str, name: str, tell: Tell, where: str = "") -> None:
    if name in block:
        raise ConfigError(f"{where}{old} and {where}{name} are the same key: give the latter")
    block[name] = block.pop(old)
    tell(f"{where}{old}", block[name], f"another name of {where}{name}")


def core_config(given: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Return ``given``, the keys for zero-core, in its form and with DeepSpeed's defaults."""
    core = {"gradient_clipping": 1.0, "broadcast_buffers": False, **given}
    clipping = core["gradient_clipping"]
    if isinstance(clipping, bool):
        core["gradient_clipping"] = float(clipping)
        tell("gradient_clipping", clipping, f"the norm {float(clipping)}, as DeepSpeed takes it")
    steps = core.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        tell("steps_per_print", steps, "never")
        del core["steps_per_print"]
    if _ZERO in core:
        zero = core[_ZERO] = dict(core[_ZERO])
        block = zero.get("offload_param")
        has_offload = isinstance(block, Mapping) and block.get("device", "none") != "none"
        if has_offload and zero.get("stage", 0) != 3:  # DeepSpeed ignores it below stage 3
            text = "used at stage 3 only: at lower stages every rank holds all parameters"
            tell(f"{_ZERO}.offload_param", dict(zero.pop("offload_param")), text)
    core["data_types"] = _data_types(core)
    if "fp16" in core:  # auto_cast is no key of zero-core: see `Settings.fp16_auto_cast`
        as_bool("fp16.auto_cast", core["fp16"].get("auto_cast", False))
        core["fp16"] = {k: v for k, v in core["fp16"].items() if k != "auto_cast"}
        asked = as_whole(core["fp16"].get("hysteresis", 2))
        is_at_0 = core.get(_ZERO, {}).get("stage", 0) == 0
        if is_at_0 and isinstance(asked, int) and 1 < asked <= LARGEST:
            if "hysteresis" in core["fp16"]:
                text = f"DeepSpeed {VERSION} has none at stage 0: each overflow halves the scale"
                tell("fp16.hysteresis", asked, text)
            core["fp16"]["hysteresis"] = 1
    for block in ("optimizer", "scheduler"):
        if block in core and "type" not in core[block]:
            tell(block, core.pop(block), "without a type there is none")
    if isinstance(params := core.get("scheduler", {}).get("params"), Mapping):
        kind = params.get("warmup_type", "log")
        if isinstance(kind, str) and kind not in ("log", "linear"):  # zero-core would refuse it
            text = "neither 'log' nor 'linear': 'log' is taken, as by DeepSpeed"
            tell("scheduler.params.warmup_type", kind, text)
            core["scheduler"] = {**core["scheduler"], "params": {**params, "warmup_type": "log"}}
    if "optimizer" in core:
        core["optimizer"] = _optimizer(core["optimizer"], tell)
        _apply_state_dtype(core, tell)
    return core


def _apply_state_dtype(core: dict[str, Any], tell: Tell) -> None:
    path, params = "optimizer.params.fp32_optimizer_states", core["optimizer"]["params"]
    if params.pop("fp32_optimizer_states", True):
        return
    kind = core["optimizer"]["type"]
    if str(kind).lower() not in ("adam", "adamw"):
        raise ConfigError(f"{path} = False needs Adam or AdamW, found {kind!r}: leave it out")
    keep_bf16_moments(core)
    is_short = any(core.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    same = f"another name of {_ZERO}.offload_optimizer.state_dtype = bfloat16"
    own = "states have the dtype of the parameters, which is fp32"
    tell(path, False, same if is_short else own)


def keep_bf16_moments(core: dict[str, Any]) -> None:
    """Make bf16 the default of offloaded moments with bf16 or fp16. ConfigError without offload."""
    zero = core.get(_ZERO, {})
    offload = zero.get("offload_optimizer", {})
    if offload.get("device", "none") == "none":
        raise ConfigError(
            f"fp32_optimizer_states = False needs {_ZERO}.offload_optimizer, as in DeepSpeed: on "
            "the device see bf16.bf16_optimizer_states"
        )
    if any(core.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")):
        core[_ZERO] = {**zero, "offload_optimizer": {"state_dtype": "bfloat16", **offload}}


def keep_updates_to_steps(core: dict[str, Any]) -> None:
    """Disable ``update_in_backward`` (ConfigError if set): no backward is known to be the last."""
    zero = core.get(_ZERO, {})
    offload = zero.get("offload_optimizer", {})
    if offload.get("device", "none") == "none":
        return
    if offload.get("update_in_backward"):
        raise ConfigError(
            f"{_ZERO}.offload_optimizer.update_in_backward = True needs to know a step's last "
            "backward, and with managed_gradient_accumulation = False no backward is known to be "
            "the last one: leave one of the two out"
        )
    core[_ZERO] = {**zero, "offload_optimizer": {**offload, "update_in_backward": False}}


def _data_types(core: Mapping[str, Any]) -> dict[str, Any]:
    types = {"buffer_dtype": "as_made", **core.get("data_types", {})}
    for key in ("buffer_dtype", "grad_accum_dtype", "param_dtype"):
        if key in types:
            types[key] = _DTYPE_NAMES.get(str(types[key]), types[key])
    asked = types.pop("param_dtype", None)
    is_on = [kind for kind in ("bf16", "fp16") if core.get(kind, {}).get("enabled")]
    enabled = is_on[0] if is_on else "fp32"
    if asked not in (None, enabled):
        raise ConfigError(
            f"data_types.param_dtype = {asked!r} contradicts the blocks fp16 and bf16, which say "
            f"{enabled!r}: leave it out"
        )
    return types


def _optimizer(block: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    if not isinstance(block.get("params", {}), Mapping):
        found = shown(block["params"])
        raise ConfigError(f"optimizer.params: expected a block of keys, found {found}")
    if str(block["type"]).lower() in ("onebitadam", "onebitlamb", "zerooneadam"):
        reason = f"{_GONE}: use AdamW, and zero_quantized_gradients for smaller messages"
        raise ConfigError(f"optimizer.type = {block['type']!r} is not served: {reason}")
    params = dict(block.get("params", {}))
    for key in list(params):
        path = f"optimizer.params.{key}"
        if path in UNNEEDED:
            tell(path, params.pop(key), UNNEEDED[path])
        elif path in REFUSED:
            check_refused(path, params.pop(key))
    if str(block["type"]).lower() == "lion":
        params = {**_LION, **params}
    for key in block.keys() - {"type", "params"}:
        text = "not a key of DeepSpeed's, which ignores it: expected type and params"
        tell(f"optimizer.{key}", block[key], text)
    return {"type": block["type"], "params": params}


TagValidation = Literal["IGNORE", "WARN", "FAIL"]

PATHS: Mapping[str, str] = {
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "fp16_auto_cast": "fp16.auto_cast",
    "gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "monitors": "",
    "tag_validation": "checkpoint.tag_validation",
    "throughput": "timers.throughput",
    "allows_untested_optimizer": "zero_allow_untested_optimizer",
}
"""Paths of fields of `Settings` whose key has another name. "" is the top level."""


class Note(NamedTuple):
    """A key that has no effect, or an effect that a user may not expect."""

    path: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration: zero-core's keys in ``core``, and fields for other keys (see `PATHS`).

    Attributes:
        core: configuration for `zero_core.build`, with DeepSpeed's defaults.
        steps_per_print: None means never.
        managed_gradient_accumulation: if False, each ``step()`` updates the parameters.
        allows_untested_optimizer: False refuses an optimizer that DeepSpeed calls untested. None, a
            missing key, allows it.
    """

    raw: dict[str, Any]
    core: dict[str, Any]
    monitors: MonitorSettings = field(default_factory=MonitorSettings)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    comms_logger: CommsLoggerSettings = field(default_factory=CommsLoggerSettings)
    flops_profiler: FlopsProfilerSettings = field(default_factory=FlopsProfilerSettings)
    throughput: ThroughputSettings = field(default_factory=ThroughputSettings)
    steps_per_print: int | None = None
    dataloader_drop_last: bool = False
    tag_validation: TagValidation = "WARN"
    gather_16bit_weights_on_model_save: bool = False
    cpu_checkpointing: bool = False
    fp16_auto_cast: bool = False
    dump_state: bool = False
    managed_gradient_accumulation: bool = True
    allows_untested_optimizer: bool | None = None
    log_level: str | None = None
    disable_python_gc: bool = False
    notes: tuple[Note, ...] = ()


Source = Mapping[str, Any] | str | PathLike[str]


def load(source: Source) -> dict[str, Any]:
    found = dict(source) if isinstance(source, Mapping) else parse_hjson(*_text_of(source))
    # accelerate writes Infinity as steps_per_print, which means never.
    check_plain({k: v for k, v in found.items() if k != "steps_per_print"})
    return source if isinstance(source, dict) else found


def _text_of(source: str | PathLike[str]) -> tuple[str, str]:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "the configuration"
    path = Path(source)
    if os.path.isfile(path):  # Path.is_file may raise for a name that is too long
        return read_config_text(path), str(path)
    if isinstance(source, str):
        try:
            return base64.urlsafe_b64decode(source).decode("utf-8"), "the base64 configuration"
        except (binascii.Error, UnicodeError, ValueError):
            pass  # not base64 either: refused below
    raise ConfigError(
        f"the configuration {shown(str(source))} is neither a file that exists, nor JSON, nor "
        "base64 of JSON: pass a dict or the path of a JSON file"
    )


_SHARED = ("data_types", "optimizer")
"""Blocks whose keys go to zero-core, except for keys in `UNNEEDED` and `REFUSED`."""
_BLOCKS = frozenset(
    path.partition(".")[0] for path in (*HONOURED, *UNNEEDED, *REFUSED) if "." in path
)
"""Blocks of which `HONOURED`, `UNNEEDED` or `REFUSED` has single keys."""
_VALIDATIONS: Mapping[str, TagValidation] = {"IGNORE": "IGNORE", "WARN": "WARN", "FAIL": "FAIL"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "checkpoint.tag_validation": tuple(_VALIDATIONS),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
}

_Parsed = TypeVar("_Parsed", bound=pydantic.BaseModel)


def read(config: Source) -> Settings:
    """Read DeepSpeed's configuration: a dict, a file's path, a JSON text, or its base64.

    It prints nothing and does not change ``config``. `zero_core.build` resolves the batch sizes,
    because it knows the number of ranks. Raises ConfigError if a key has a value that is not
    served.
    """
    raw = load(config)
    sorter = _Sorter()
    sorter.sort(as_typed(modernise(without_auto(raw, sorter.tell), sorter.tell), Config))
    core, own = core_config(sorter.core, sorter.tell), sorter.own
    zero = core.get("zero_optimization", {})
    flops = parse_block(FlopsProfilerSettings, own, "flops_profiler")
    comms = parse_block(CommsLoggerSettings, own, "comms_logger")
    if comms.enabled and comms.prof_ops:  # unknown names in prof_ops have no effect
        unknown = [name for name in comms.prof_ops if not name.startswith(COLLECTIVES)]
        if comms.prof_all:
            text = "prof_all is true, which is the default: all collectives are logged"
            sorter.tell("comms_logger.prof_ops", list(comms.prof_ops), text)
        elif unknown:
            text = f"no collective of the engine's, which are {', '.join(COLLECTIVES)}"
            sorter.tell("comms_logger.prof_ops", unknown, text)
    flags = {path.rpartition(".")[2]: own[path] for path in FLAGS if path in own}
    if not flags.get("managed_gradient_accumulation", True):
        keep_updates_to_steps(core)
    flags["wall_clock_breakdown"] = flags.get("wall_clock_breakdown", False) or flops.enabled
    return Settings(
        raw=raw,
        core=core,
        monitors=get_monitor_config(own),
        comms_logger=comms,
        flops_profiler=flops,
        throughput=parse_block(ThroughputSettings, own, "timers.throughput"),
        steps_per_print=core.get("steps_per_print"),
        tag_validation=_VALIDATIONS[own.get("checkpoint.tag_validation", "WARN").upper()],
        gather_16bit_weights_on_model_save=bool(
            zero.get("stage3_gather_16bit_weights_on_model_save", False)
        ),
        fp16_auto_cast=bool(sorter.core.get("fp16", {}).get("auto_cast", False)),
        allows_untested_optimizer=own.get("zero_allow_untested_optimizer"),
        log_level=own.get("log_level"),
        notes=tuple(sorter.notes),
        **flags,
    )


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorSettings:
    """Return a configuration's monitors. Raises ConfigError if one of their blocks is invalid."""
    kinds = {name: type(block) for name, block in MonitorSettings()}
    return MonitorSettings(**{name: parse_block(kinds[name], param_dict, name) for name in kinds})


class _Sorter:
    def __init__(self) -> None:
        self.core: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.notes: list[Note] = []

    def tell(self, path: str, value: Any, text: str) -> None:
        self.notes.append(Note(path, value, text))

    def sort(self, given: Mapping[str, Any]) -> None:
        for key, value in given.items():
            if key == "activation_checkpointing" and "enabled" in _mapping(key, value):
                self.core[key] = value  # zero-core's own form of the block
            elif self._dispose(key, value):
                continue
            elif key in _BLOCKS:
                items = _mapping(key, value).items()
                left = {k: v for k, v in items if not self._dispose(f"{key}.{k}", v)}
                if key in _SHARED:
                    self.core[key] = left
                    continue
                for name, inner in left.items():
                    self._unknown(f"{key}.{name}", inner)
            elif key in Config.model_fields:
                is_block = block_of(Config.model_fields[key]) is not None
                self.core[key] = _mapping(key, value) if is_block else value
            else:
                self._unknown(key, value)

    def _dispose(self, path: str, value: Any) -> bool:
        if path in HONOURED:
            if path in FLAGS or path == "zero_allow_untested_optimizer":
                value = as_bool(path, value)
            elif path in _CHOICES and str(value).upper() not in _CHOICES[path]:
                expected = ", ".join(_CHOICES[path])
                raise ConfigError(f"{path}: expected one of {expected}, found {shown(value)}")
            self.own[path] = value
            for key, inner in value.items() if isinstance(value, Mapping) else ():
                if f"{path}.{key}" in UNNEEDED:
                    self._dispose(f"{path}.{key}", inner)
        elif path in UNNEEDED:
            self.tell(path, value, UNNEEDED[path])
        elif path in REFUSED:
            check_refused(path, value)
        else:
            return False
        return True

    def _unknown(self, path: str, value: Any) -> None:
        known = {*Config.model_fields, *HONOURED, *UNNEEDED, *REFUSED}
        close = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
        hint = f": did you mean {close[0]!r}?" if close else ""
        self.tell(path, value, f"not a key of DeepSpeed's{hint}")


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a block of keys, found {shown(value)}")
    return value


def parse_block(kind: type[_Parsed], own: Mapping[str, Any], path: str) -> _Parsed:
    """Return the block ``own[path]`` as a ``kind``, or raise ConfigError."""
    block = _mapping(path, own.get(path, {}))
    try:
        return kind.model_validate(block)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, kind, block, path)) from None
