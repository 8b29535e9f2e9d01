"""Print the curves of a module's schedules as JSON: ``python deepspeed_curves.py MODULE``."""

from __future__ import annotations

import importlib
import json
import os
import sys

import torch
from torch import nn

NUM_STEPS = 40
CASES = [
    ("WarmupLR", {"warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.3, "warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": [0.1, 0.0], "warmup_max_lr": [0.3, 1], "warmup_num_steps": 9}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 33, "warmup_num_steps": 6}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": None, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_min_lr": 0.001, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 31, "warmup_num_steps": 8}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 25,
            "warmup_num_steps": 5,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 11}),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.01, 0.02],
            "cycle_max_lr": [0.1, 0.7],
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 5,
            "decay_step_size": 3,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": 0.02,
            "cycle_min_mom": [0.7, 0.6],
            "cycle_max_mom": 0.95,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 13,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
            "cycle_momentum": False,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": 0}),
    ("LRRangeTest", {"lr_range_test_step_size": 7}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.01, 0.02],
            "lr_range_test_step_size": 6,
            "lr_range_test_step_rate": 0.7,
            "lr_range_test_staircase": True,
        },
    ),
]
CONFIGS = [
    {},
    {"type": "OneCycle"},
    {"type": "OneCycle", "params": {"cycle_max_lr": 3}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 2}},
    {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 5}},
    {"type": "StepLR", "params": {}},
]
ARGUMENTS = [
    "--lr_schedule=OneCycle",
    "--cycle_max_lr=0.5",
    "--cycle_momentum",
    "--decay_step_size=3",
]


def make_optimizer(kind):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.125, 0.3)]
    return kind(groups)


def record(optimizer):
    return [[g["lr"], list(g.get("betas", ()))] for g in optimizer.param_groups]


def curve(schedules, kind, name, params):
    """Record each step. After a third of the steps a new schedule loads the saved state."""
    optimizer = make_optimizer(kind)
    fresh = [group["lr"] for group in optimizer.param_groups]
    schedule = getattr(schedules, name)(optimizer, **params)
    rows = [record(optimizer)]
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 3:
            held = optimizer.state_dict()
            for group, rate in zip(optimizer.param_groups, fresh, strict=True):
                group["lr"] = rate
            again = getattr(schedules, name)(optimizer, **params)
            optimizer.load_state_dict(held)
            again.load_state_dict(schedule.state_dict())
            schedule = again
        if step == NUM_STEPS - 2:
            schedule.step(3)
        else:
            schedule.step()
        rows.append([record(optimizer), schedule.get_last_lr(), schedule.last_batch_iteration])
    return rows


def tuning(schedules):
    import argparse

    parser = schedules.add_tuning_arguments(argparse.ArgumentParser())
    found = {}
    for name in schedules.VALID_LR_SCHEDULES:
        args = parser.parse_args([*ARGUMENTS, f"--lr_schedule={name}"])
        found[name] = [vars(args), schedules.get_config_from_args(args)]
    none = schedules.get_config_from_args(parser.parse_args([]))[0]
    return [found, none, [schedules.get_lr_from_config(config)[0] for config in CONFIGS]]


def main():
    # DeepSpeed prints to standard output on import.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    schedules = importlib.import_module(sys.argv[1])
    curves = [
        curve(schedules, kind, name, params)
        for kind in (torch.optim.AdamW, torch.optim.SGD)
        for name, params in CASES
    ]
    json.dump({"curves": curves, "tuning": tuning(schedules)}, output)
    output.flush()


if __name__ == "__main__":
    main()
