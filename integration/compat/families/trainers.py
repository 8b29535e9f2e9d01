"""Configurations of LlamaFactory and axolotl, with their calls of the Trainer.

The keys and values are the projects' own: ``examples/deepspeed/ds_*_config.json`` and
``deepspeed_configs/*.json``.
"""

from __future__ import annotations

from cases import Case, Config

CPU = {"device": "cpu"}
PINNED = {**CPU, "pin_memory": True}
AUTO_BATCH: Config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}

RUN = (
    "--output_dir={output}",
    "--do_train=True",
    "--max_steps=10",
    "--per_device_train_batch_size=4",
    "--gradient_accumulation_steps=2",
    "--learning_rate=1e-3",
    "--lr_scheduler_type=cosine",
    "--logging_steps=1",
    "--save_strategy=no",
    "--report_to=none",
    "--disable_tqdm=True",
)


def llamafactory(zero: Config) -> Config:
    """What all of LlamaFactory's files share, with this block."""
    return {
        **AUTO_BATCH,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", "initial_scale_power": 16, **SCALE},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "comms_config": {"verbose": False},
        "monitor_config": {
            "enabled": True,
            "tag": "DeepSpeedMonitor",
            "csv_monitor": {"enabled": False},
        },
    }


BELOW_3: Config = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
AT_3: Config = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
LLAMAFACTORY: dict[str, Config] = {
    "ds_z0_config": {"stage": 0, **BELOW_3},
    "ds_z2_config": {"stage": 2, **BELOW_3},
    "ds_z2_offload_config": {"stage": 2, "offload_optimizer": PINNED, **BELOW_3},
    "ds_z3_config": AT_3,
    "ds_z3_offload_config": {"offload_optimizer": PINNED, "offload_param": PINNED, **AT_3},
}


def axolotl(zero: Config, **further: object) -> Config:
    """What all of axolotl's files share, with this block."""
    return {"zero_optimization": zero, **AUTO_BATCH, "wall_clock_breakdown": False, **further}


_CLIPPED: Config = {"gradient_clipping": "auto"}
_ANY_DTYPE: Config = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32, **SCALE},
}
_BF16: Config = {"bf16": {"enabled": True}, **_CLIPPED}
_1: Config = {"stage": 1, "overlap_comm": True}
_2: Config = {
    "stage": 2,
    "offload_optimizer": CPU,
    "contiguous_gradients": True,
    "overlap_comm": True,
}
_3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "reduce_bucket_size": "auto",
}
_ALL_3: Config = {
    **_3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
# These files have some keys without "stage3_".
_OFFLOADED_3: Config = {
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}
_COMPILE = {"disable": False, "backend": "inductor"}
_AUTO_ADAMW = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
_FREE = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
AXOLOTL: dict[str, Config] = {
    "zero1": axolotl(_1, **_ANY_DTYPE, optimizer=_AUTO_ADAMW),
    "zero1_torch_compile": axolotl(_1, **_ANY_DTYPE, **_CLIPPED, compile=_COMPILE),
    "zero2": axolotl(_2, **_ANY_DTYPE, **_CLIPPED),
    "zero2_torch_compile": axolotl(_2, **_ANY_DTYPE, **_CLIPPED, compile=_COMPILE),
    "zero3": axolotl(_ALL_3, **_ANY_DTYPE, **_CLIPPED),
    "zero3_bf16": axolotl(_ALL_3, **_BF16),
    "zero3_bf16_cpuoffload_all": axolotl(
        {**_3, "offload_optimizer": PINNED, "offload_param": PINNED, **_OFFLOADED_3},
        **_BF16,
        **_FREE,
    ),
    "zero3_bf16_cpuoffload_params": axolotl(
        {**_3, "offload_param": PINNED, **_OFFLOADED_3}, **_BF16, **_FREE
    ),
}


def of_llamafactory(name: str, zero: Config) -> Case:
    """Full fine-tuning with one of its files."""
    return Case(
        "LlamaFactory",
        f"{name}.json",
        "llamafactory_sft.py",
        (
            "--model_name_or_path={model}/llama",
            "--dataset_dir={data}/instruction",
            "--deepspeed={config}",
            "--gradient_checkpointing=True",
            "--warmup_steps=2",
            *RUN,
        ),
        llamafactory(zero),
    )


def of_axolotl(name: str, config: Config) -> Case:
    """Packed rows with one of its files; the model is compiled where the file's name says so.

    Not by inductor, whose compiler takes minutes on a CPU.
    """
    compiled = "torch_compile" in name
    arguments = (
        "--base_model={model}/llama",
        "--dataset={data}/text",
        "--optim=adamw_torch_fused",
        f"--bf16={'bf16' in name}",
        f"--torch_compile={compiled}",
        *(["--torch_compile_backend=aot_eager"] if compiled else []),
        *RUN,
    )
    return Case(
        "axolotl",
        f"{name}.json",
        "axolotl_train.py",
        ("--deepspeed={config}", *arguments),
        config,
        ddp=("--use_cpu=True", *arguments) if compiled else (),
        why_ddp="0.19.8 refuses compile.disable and compile.backend" if compiled else "",
    )


CASES = [
    *(of_llamafactory(name, zero) for name, zero in LLAMAFACTORY.items()),
    *(of_axolotl(name, config) for name, config in AXOLOTL.items()),
]
