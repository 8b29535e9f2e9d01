"""`DeepSpeedConfig` has the attributes and values of DeepSpeed's own, which is installed here."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig as Theirs
from pydantic import BaseModel

from zero_engine.deepspeed.config.deepspeed_config import DeepSpeedConfig

NOT_SERVED = {
    *("autotuning_config", "compile_config", "data_efficiency_config", "datastates_config"),
    *("expert_parallel_config", "hybrid_engine", "pipeline", "tensor_parallel_config"),
    *("weight_quantization_config", "seq_parallel_communication_data_type", "checkpoint_config"),
}
"""Attributes of what is refused, or has no effect in either."""

FULL: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}, "legacy_fusion": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "disable_allgather": True,
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": True,
    "data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True},
    "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 3},
    "aio": {"queue_depth": 16},
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 3},
    "csv_monitor": {"enabled": True, "job_name": "j"},
    "zero_optimization": {"stage": 2},
}


def _plain(value: Any) -> Any:
    """Return the fields of an object, and those of its fields."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif not isinstance(value, dict | list | tuple | str) and hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("given", [{"train_batch_size": 1}, FULL])
def test_attributes_are_those_of_deepspeed(given: dict[str, Any]) -> None:
    expected = vars(Theirs(dict(given)))
    ours = DeepSpeedConfig(dict(given))
    blocks = {"zero_config", "float16_config", "bfloat16_config"}  # of zero-core's types
    names = {n for n in expected if not n.startswith("_")} - NOT_SERVED - blocks
    for name in sorted(names):
        found, wanted = _plain(getattr(ours, name)), _plain(expected[name])
        if isinstance(found, dict) and isinstance(wanted, dict):
            found = {key: found[key] for key in wanted}
        assert found == wanted, (name, found, wanted)
