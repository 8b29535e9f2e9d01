"""Configurations by name, for ``zero-engine config`` and ``ZeroTrainer(zero=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_TWIN_FLOW = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
_ZEROPP = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": "node",
}
_NVME = {"device": "nvme", "nvme_path": "/local_nvme"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "stage1": {"stage": 1},
    "stage1-offload": {"stage": 1, **_OFFLOAD},
    "stage2": {"stage": 2},
    "stage2-offload": {"stage": 2, **_OFFLOAD},
    "stage2-twin-flow": {"stage": 2, **_TWIN_FLOW},
    "stage3": {"stage": 3},
    "stage3-offload": {"stage": 3, **_OFFLOAD},
    "stage3-offload-params": {"stage": 3, **_OFFLOAD, "offload_param": {"device": "cpu"}},
    "stage3-zeropp": {"stage": 3, **_ZEROPP},
}
"""``zero_optimization`` blocks by name. ``twin-flow`` is ZeRO-Offload++: the host updates the share
of the optimizer states that makes a step fastest. ``zeropp`` is ZeRO++ (Wang et al., arXiv
2306.10209): weights and gradients are sent quantized, and each node keeps a second copy of the
weights."""

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    name: {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "zero_optimization": block,
    }
    for name, block in {
        **PRESETS,
        "stage3-nvme": {"stage": 3, "offload_optimizer": _NVME, "offload_param": _NVME},
        "tour": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            "zero_quantized_weights": True,
        },
    }.items()
}


def default_config_text() -> str:
    """Return the JSON that is used where no ``--config`` is given."""
    file = resources.files("zero_engine.train").joinpath("default_config.json")
    return file.read_text(encoding="utf-8")
