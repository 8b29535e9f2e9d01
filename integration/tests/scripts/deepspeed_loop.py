"""A script that runs under DeepSpeed and under this project's engine.

Arguments: stage, dtype ("fp32" or "bf16"), folder of rank 0's ``result.json``, config.
"""

import argparse
import json
import warnings
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from torch import nn

STEPS, ACCUMULATION = 4, 2


def make_model():
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1, bias=False)]
    return nn.Sequential(*layers)


def make_config(stage, dtype):
    adam = {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}
    warmup = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }


def numbers(tensor):
    return None if tensor is None else tensor.detach().float().flatten().tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("dtype")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    warnings.simplefilter("ignore")
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = make_model()
    engine, _, _, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        config=make_config(args.stage, args.dtype),
    )
    rank, dtype = deepspeed.comm.get_rank(), torch.bfloat16 if args.dtype == "bf16" else None
    seen = {"losses": [], "returned": [], "norms": [], "rates": [], "grads": [], "counts": []}
    for number in range(STEPS * ACCUMULATION):
        generator = torch.Generator().manual_seed(10 * number + rank)
        inputs = torch.randn(3, 6, generator=generator).to(dtype)
        loss = engine(inputs.to(engine.device)).float().square().mean()
        seen["returned"].append(engine.backward(loss).item())
        seen["losses"].append(loss.item())
        is_boundary = engine.is_gradient_accumulation_boundary()
        if is_boundary and args.stage > 0:
            seen["grads"].append(numbers(safe_get_full_grad(model[0].weight)))
        engine.step()
        counts = [engine.micro_steps, engine.global_steps, engine.global_samples]
        seen["counts"].append([is_boundary, *counts, engine.skipped_steps])
        if is_boundary:
            seen["norms"].append(float(engine.get_global_grad_norm()))
            seen["rates"].append([*engine.get_lr(), *scheduler.get_last_lr()])
    if args.stage > 0:
        weight = model[2].weight
        seen["master"] = numbers(safe_get_full_fp32_param(weight))
        seen["moment"] = numbers(safe_get_full_optimizer_state(weight, "exp_avg"))
    engine.save_checkpoint(str(args.folder / "saved"), client_state={"epoch": 3})
    path, client_state = engine.load_checkpoint(str(args.folder / "saved"))
    seen["tag"] = (args.folder / "saved" / "latest").read_text()
    seen["loaded"] = [path is not None, client_state["epoch"]]
    seen["missing"] = list(engine.load_checkpoint(str(args.folder / "nowhere")))
    answers = """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        zero_optimization_stage zero_optimization_partition_gradients
        zero_optimization_partition_weights bfloat16_enabled fp16_enabled gradient_clipping get_mom
        optimizer_name scheduler_name scheduler_params zero_allow_untested_optimizer
    """
    seen["facts"] = [
        *(getattr(engine, name)() for name in answers.split()),
        [name for name, _ in engine.named_parameters()],
        engine.dp_world_size,
        [list(p.shape) if args.stage < 3 else None for p in engine.parameters()],
    ]
    if rank == 0:
        (args.folder / "result.json").write_text(json.dumps(seen))
    engine.destroy()
    torch.distributed.destroy_process_group()


main()
