"""Checkpoints in DeepSpeed's format, written with stand-ins for DeepSpeed's classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_engine.deepspeed_import.source import MASTER

GROUP = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "fused": True}
STATES = (MASTER, "exp_avg", "exp_avg_sq")
SHAPES = {"first.weight": (3, 2), "first.bias": (3,), "last": (2,)}


@contextmanager
def deepspeed_classes() -> Iterator[dict[str, type]]:
    found: dict[str, type] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            ("deepspeed.utils.tensor_fragment", "fragment_address"),
            ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ):
            found[name] = type(name, (), {"__module__": module})
            parts = module.split(".")
            for length in range(1, len(parts) + 1):
                parent = ".".join(parts[:length])
                patch.setitem(sys.modules, parent, ModuleType(parent))
            setattr(sys.modules[module], name, found[name])
        yield found


def instance(cls: type, **attributes: Any) -> Any:
    made = cls()
    vars(made).update(attributes)
    return made


def values() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: {state: torch.rand(shape, generator=generator) for state in STATES}
        for name, shape in SHAPES.items()
    }


def model_states(**more: Any) -> dict[str, Any]:
    last = torch.ones(2, dtype=torch.bfloat16)
    module = {
        "frozen": torch.arange(3.0),
        "last": last,
        "tied": last,
        "seen": torch.tensor(5),
        "first.weight": torch.zeros(3, 2, dtype=torch.bfloat16),
        "first.bias": torch.zeros(3, dtype=torch.bfloat16),
    }
    return {
        "module": module,
        "buffer_names": ["seen"],
        "optimizer": None,
        "shared_params": {"tied": "last"},
        "param_shapes": [{n: torch.Size(s) for n, s in SHAPES.items()}],
        "lr_scheduler": {"last_batch_iteration": 3},
        "global_steps": 4,
        "skipped_steps": 1,
        "global_samples": 32,
        "ds_config": {"optimizer": {"type": "AdamW"}},
        "ds_version": "0.19.8",
        "mp_world_size": 1,
        "epoch": (7, {"best": torch.tensor([0.5])}),
        **more,
    }


def write_stage_2(folder: Path, classes: dict[str, type], num_ranks: int) -> None:
    """Write a stage 2 checkpoint. See [Note: DeepSpeed's partitions] in zero_engine."""
    folder.mkdir(parents=True)
    torch.save(model_states(), folder / "mp_rank_00_model_states.pt")
    folder.parent.joinpath("latest").write_text(folder.name)
    scaler = instance(
        classes["DynamicLossScaler"],
        cur_scale=64.0,
        cur_iter=9,
        last_overflow_iter=2,
        scale_window=4,
        cur_hysteresis=2,
        dtype=torch.half,
    )
    whole = {s: torch.cat([v[s].reshape(-1) for v in values().values()]) for s in STATES}
    part = -(-whole[MASTER].numel() // num_ranks)
    for rank in range(num_ranks):
        addresses, start = {}, 0
        for name, by_state in values().items():
            stop = start + by_state[MASTER].numel()
            low, high = max(start, rank * part), min(stop, (rank + 1) * part)
            if low < high:
                addresses[name] = instance(
                    classes["fragment_address"], numel=high - low, start=low - rank * part
                )
            start = stop
        mine = {
            state: flat[rank * part : (rank + 1) * part].clone() for state, flat in whole.items()
        }
        state = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": True,
            "base_optimizer_state": {
                "state": {0: {"step": 4, **{s: mine[s] for s in STATES[1:]}}},
                "param_groups": [{**GROUP, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [mine[MASTER]],
            "zero_stage": 2,
            "partition_count": [num_ranks],
            "param_slice_mappings": [addresses],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, folder / name)
