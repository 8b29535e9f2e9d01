"""accelerate's documented ways to DeepSpeed, started by its own launcher."""

import json

from cases import Case

_LAUNCH = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
{block}
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
main_process_port: 0
{precision}
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
_OWN = "mixed_precision: 'no'"


def _launch(block: dict[str, object], precision: str = _OWN) -> str:
    lines = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in block.items())
    return _LAUNCH.format(block=lines, precision=precision)


_PLUGIN: dict[str, object] = {
    "deepspeed_multinode_launcher": "standard",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
_ZERO_2 = {
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_RUN = ("--model={model}/bert", "--dataset={data}/pairs", "--output_dir={output}")
_FILE = ("accelerate", "launch", "--config_file={files}/launch.yaml")
CASES = [
    Case(
        "accelerate",
        "launch with deepspeed_config_file, stage 2",
        "accelerate_loops.py",
        ("config_file", *_RUN),
        _ZERO_2,
        _FILE,
        {"launch.yaml": _launch({"deepspeed_config_file": "{config}"}, "")},
    ),
    Case(
        "accelerate",
        "launch with the plugin's fields, stage 3",
        "accelerate_loops.py",
        ("plugin", *_RUN),
        launcher=_FILE,
        files={"launch.yaml": _launch(_PLUGIN)},
    ),
    Case(
        "accelerate",
        "launch --use_deepspeed --zero_stage=3, all offloaded",
        "accelerate_loops.py",
        ("plugin", *_RUN),
        launcher=(
            *("accelerate", "launch", "--use_deepspeed", "--num_processes=2"),
            *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
            *("--main_process_port=0", "--zero_stage=3", "--gradient_accumulation_steps=2"),
            *("--offload_optimizer_device=cpu", "--offload_param_device=cpu"),
            *("--zero3_init_flag=true", "--zero3_save_16bit_model=true"),
        ),
    ),
    Case(
        "accelerate",
        "DeepSpeedPlugin(zero_stage=2) in the program",
        "accelerate_loops.py",
        ("in_code", *_RUN),
    ),
]
