"""The configuration of ``zero=...``, completed from TrainingArguments.

A key that TrainingArguments decide may be missing or "auto". Otherwise it must agree with them.

[Note: who does what] The Trainer divides the loss by the micro-steps, makes the optimizer and the
schedule, and steps both. The engine computes in bf16 or fp16, scales the loss, clips, and updates.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
from transformers import TrainingArguments

from zero_core import ConfigError
from zero_core.config import SchedulerConfig, explain, shown
from zero_engine.deepspeed.config.reader import load
from zero_engine.presets import PRESETS

_AUTO = "auto"
_LEFT_TO_ENGINE = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
"""Keys of ``zero_optimization`` whose "auto" is the engine's default."""


def read_zero(zero: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of ``zero``: a preset's name, a JSON file's path, or a
    configuration.

    "auto" values are still in it.
    """
    if isinstance(zero, Mapping):
        return copy.deepcopy(dict(zero))
    if isinstance(zero, str) and zero in PRESETS:
        return {"zero_optimization": copy.deepcopy(dict(PRESETS[zero]))}
    if Path(zero).suffix == ".json" or Path(zero).is_file():
        return copy.deepcopy(load(zero))
    near = difflib.get_close_matches(str(zero), PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"zero = {str(zero)!r} is neither a preset nor a file: {hint}"
        f"Presets: {', '.join(PRESETS)}; or give a configuration, or the path of its JSON file"
    )


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that select another engine or would change the sharded model."""
    refused = {
        "deepspeed": "leave it out: zero=... takes the same configuration",
        "fsdp": "leave it out: the engine shards the model",
        "torch_compile": "compile the model's blocks in place instead: block.compile()",
        "bf16_full_eval": "set bf16=True: the engine trains and evaluates in bf16",
        "fp16_full_eval": "set fp16=True: the engine trains and evaluates in fp16",
        "parallelism_config": "leave it out: the engine is data-parallel alone",
    }
    for name, advice in refused.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}={getattr(args, name)!r}) does not go with zero=...: "
                f"{advice}"
            )


def fill_config(config: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return ``config`` completed from ``args``, without ``scheduler``."""
    filled = {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    for key in ("zero_optimization", "optimizer", "bf16", "fp16"):
        if not isinstance(filled.get(key, {}), Mapping):
            raise ConfigError(f"{key}: expected a block of keys, found {shown(filled[key])}")
    scheduler = filled.pop("scheduler", None)
    if scheduler is not None:
        try:
            SchedulerConfig.model_validate(scheduler)
        except pydantic.ValidationError as error:
            raise ConfigError(explain(error, SchedulerConfig, scheduler, "scheduler")) from None
    zero = filled.setdefault("zero_optimization", {})
    for key in _LEFT_TO_ENGINE:
        if zero.get(key) == _AUTO:
            del zero[key]
    if zero.get("zero_hpz_partition_size") == _AUTO:
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
        zero["zero_hpz_partition_size"] = of_node if of_node < args.world_size else 1
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    decided = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * args.world_size,
        "gradient_clipping": float(args.max_grad_norm or 0.0),
        "bf16.enabled": bool(args.bf16),
        "fp16.enabled": bool(args.fp16),
    }
    differences: list[str] = []
    for path, value in decided.items():
        _fill(filled, path, value, differences)
    if "optimizer" in filled:
        params = dict(filled["optimizer"].get("params", {}))
        filled["optimizer"] = {**filled["optimizer"], "params": params}
        of_trainer = {
            "lr": args.learning_rate,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        for key, value in of_trainer.items():
            if key in params:
                _fill(params, key, value, differences, prefix="optimizer.params.")
    if differences:
        raise ConfigError(
            "the configuration and TrainingArguments differ; take the value of TrainingArguments, "
            'or "auto", or leave the key out:\n' + "\n".join(differences)
        )
    return filled


def fill_schedule(
    params: Mapping[str, Any], args: TrainingArguments, num_steps: int
) -> dict[str, Any]:
    """Return ``scheduler.params`` with "auto" filled in, for a training of ``num_steps`` steps."""
    known = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": args.get_warmup_steps(num_steps),
        "total_num_steps": num_steps,
    }
    return {k: known.get(k, v) if v == _AUTO else v for k, v in params.items()}


def _fill(
    block: dict[str, Any], path: str, value: Any, differences: list[str], prefix: str = ""
) -> None:
    """Set ``path``, a key or "block.key", to ``value``, or append a difference."""
    *outer, key = path.split(".")
    for name in outer:
        block = block.setdefault(name, {})
    found = block.get(key)
    if found is None or found == _AUTO:
        block[key] = value
    elif (list(found) if isinstance(found, tuple) else found) != value:
        differences.append(f"- {prefix}{path} = {found!r}, TrainingArguments: {value!r}")
