"""The compared public scripts and configurations, by project."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts import trl_trainer

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program with its arguments.

    In ``arguments`` and ``launcher``, ``{model}`` is a folder of tiny models, ``{data}`` a folder
    of data, ``{output}`` a new folder, and ``{config}`` the file to which ``config`` is written.

    Attributes:
        family: project of the script or configuration.
        name: name, unique in the family.
        program: file in ``scripts/``, or an installed module.
        config: DeepSpeed configuration; None where the program has its own.
        launcher: the program's own launcher with arguments, which starts the ranks.
        files: further files by name, written to the folder of the configuration. ``{config}`` is
            replaced.
        ddp: arguments for the same training with DDP, where DeepSpeed cannot run on the CPU.
        compared: entry of a Trainer's log to compare; not "loss" where the loss is always 0.
        needs: required modules that may be missing.
    """

    family: str
    name: str
    program: str
    arguments: tuple[str, ...] = ()
    config: Config | None = None
    launcher: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    ddp: tuple[str, ...] = ()
    compared: str = "loss"
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.family}: {self.name}"

    @property
    def reference(self) -> str:
        """Side whose losses are the reference."""
        return "ddp" if self.ddp else "deepspeed"


def auto(*keys: str) -> Config:
    return dict.fromkeys(keys, "auto")


def buckets(numel: float) -> Config:
    """Return the settings of buckets in configurations for stages below 3."""
    return {
        "allgather_partitions": True,
        "allgather_bucket_size": numel,
        "reduce_scatter": True,
        "reduce_bucket_size": numel,
        "contiguous_gradients": True,
    }


CPU = {"device": "cpu"}
PINNED = {**CPU, "pin_memory": True}
AUTO_BATCH = auto(
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
)
CLIPPED: Config = {"gradient_clipping": "auto"}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
AUTO_ADAMW = {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")}
AUTO_WARMUP = auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
AUTO_3 = auto(
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
)
LARGE_3: Config = {
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    **AUTO_3,
    **GATHERED,
}
QUIET = ("--logging_steps=1", "--save_strategy=no", "--report_to=none", "--disable_tqdm=True")
TRAINER = (
    *("--output_dir={output}", "--do_train=True", "--max_steps=10", "--learning_rate=1e-3"),
    *("--per_device_train_batch_size=4", "--gradient_accumulation_steps=2"),
    *("--lr_scheduler_type=cosine", *QUIET),
)

# TRL's installed scripts, with the blocks of TRL's ``accelerate_configs``.
NEEDS_TRL = ("trl", "datasets")
TRL_AUTO: Config = {**AUTO_BATCH, **CLIPPED}
TRL_2: Config = {**TRL_AUTO, "zero_optimization": {"stage": 2}}
TRL_3: Config = {**TRL_AUTO, "zero_optimization": {"stage": 3, **GATHERED}}
TRL_OFFLOADED: Config = {
    **TRL_AUTO,
    "zero_optimization": {
        **TRL_3["zero_optimization"],
        "offload_optimizer": CPU,
        "offload_param": CPU,
    },
}
TRL_RUN = (
    *("--model_name_or_path={model}/llama", "--output_dir={output}", "--dtype=float32"),
    *("--bf16=False", "--max_steps=8", "--per_device_train_batch_size=4"),
    *("--gradient_accumulation_steps=1", "--learning_rate=1e-3", *QUIET),
)
GENERATES = (
    *("--dataset_name={data}/prompts", "--reward_funcs=scripts.trl_trainer.reward"),
    *("--num_generations=4", "--max_completion_length=12", "--beta=0.04"),
)


def trained(
    family: str, name: str, program: tuple[str, ...], config: Config, *arguments: str, **more: Any
) -> Case:
    """Return a case of a Trainer. With ``is_by_ddp`` DDP is the reference."""
    ddp = (*program[1:], "--use_cpu=True", *arguments) if more.pop("is_by_ddp", False) else ()
    given = (*program[1:], "--deepspeed={config}", *arguments)
    return Case(family, name, program[0], given, config, ddp=ddp, **more)


def trl_script(trainer: str, what: str, config: Config, *arguments: str, **more: Any) -> Case:
    script, more = f"trl.scripts.{trainer}", {"needs": NEEDS_TRL, **more}
    return trained("TRL", f"{script}, {what}", (script,), config, *arguments, *TRL_RUN, **more)


_trl = find_spec("trl")
ZERO_3_FILE = Path((_trl and _trl.origin) or "trl/_").with_name("accelerate_configs") / "zero3.yaml"
TRL = [
    trl_script("sft", "ZeRO-3", TRL_3, "--dataset_name={data}/text"),
    trl_script("dpo", "ZeRO-3", TRL_3, "--dataset_name={data}/preference"),
    trl_script("kto", "ZeRO-2", TRL_2, "--dataset_name={data}/unpaired"),
    trl_script("reward", "ZeRO-3", TRL_3, "--dataset_name={data}/preference"),
    trl_script("grpo", "ZeRO-3", TRL_3, *GENERATES),
    trl_script("rloo", "ZeRO-3, all offloaded", TRL_OFFLOADED, *GENERATES, compared="grad_norm"),
    Case(
        "TRL",
        "trl.scripts.sft with LoRA, accelerate_configs/zero3.yaml",
        "trl.scripts.sft",
        ("--dataset_name={data}/text", "--use_peft", "--lora_target_modules=all-linear", *TRL_RUN),
        launcher=(
            *("accelerate", "launch", f"--config_file={ZERO_3_FILE}"),
            *("--num_processes=2", "--mixed_precision=no", "--main_process_port=0"),
        ),
        needs=NEEDS_TRL,
    ),
]


# All trainers of TRL that need no server, compared with DDP. TRL's experimental trainers call
# DeepSpeed for their teachers and to gather parameters.
TRL_TRAINERS = [
    trained(
        *("TRL", f"{'DPOTrainer with BEMA' if name == 'bema_dpo' else case.trainer}, {setting}"),
        *(("trl_trainer.py", name), config, "--model={model}", "--output_dir={output}"),
        is_by_ddp=True,
        needs=NEEDS_TRL,
    )
    for name, case in trl_trainer.CASES.items()
    for setting, config in (
        ("stage 2", TRL_2),
        ("stage 3", TRL_3),
        ("stage 3, all offloaded", TRL_OFFLOADED),
    )
    # At stage 3 TRL refuses A2PO, which copies its model as the reference model.
    if name != "a2po" or setting == "stage 2"
]


# LlamaFactory's ``examples/deepspeed/ds_*_config.json``.
BELOW_3 = {**buckets(5e8), "overlap_comm": False, "round_robin_gradients": True}
AT_3: Config = {"stage": 3, "overlap_comm": False, **LARGE_3}
LLAMAFACTORY: dict[str, Config] = {
    "ds_z0_config": {"stage": 0, **BELOW_3},
    "ds_z2_config": {"stage": 2, **BELOW_3},
    "ds_z2_offload_config": {"stage": 2, "offload_optimizer": PINNED, **BELOW_3},
    "ds_z3_config": AT_3,
    "ds_z3_offload_config": {"offload_optimizer": PINNED, "offload_param": PINNED, **AT_3},
}


def llamafactory(name: str, zero: Config) -> Case:
    arguments = (
        *("llamafactory_sft", "--model_name_or_path={model}/llama"),
        *("--dataset_name={data}/instruction", "--deepspeed={config}"),
        *("--gradient_checkpointing=True", "--warmup_steps=2", *TRAINER),
    )
    config = {
        **AUTO_BATCH,
        **CLIPPED,
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
    return Case("LlamaFactory", f"{name}.json", "trainers.py", arguments, config)


# axolotl's ``deepspeed_configs/*.json``.
ANY_DTYPE: Config = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32, **SCALE},
}
BF16: Config = {"bf16": {"enabled": True}, **CLIPPED}
AXOLOTL_1: Config = {"stage": 1, "overlap_comm": True}
AXOLOTL_2: Config = {
    "stage": 2,
    "offload_optimizer": CPU,
    "contiguous_gradients": True,
    "overlap_comm": True,
}
AXOLOTL_3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "reduce_bucket_size": "auto",
}
ALL_3: Config = {
    **AXOLOTL_3,
    **AUTO_3,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    **GATHERED,
}
# Some keys of these axolotl files lack the prefix "stage3_".
OFFLOADED_3: Config = {
    **AXOLOTL_3,
    **AUTO_3,
    "offload_param": PINNED,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}
COMPILE = {"disable": False, "backend": "inductor"}
FREE = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
AXOLOTL: dict[str, tuple[Config, Config]] = {
    "zero1": (AXOLOTL_1, {**ANY_DTYPE, "optimizer": AUTO_ADAMW}),
    "zero1_torch_compile": (AXOLOTL_1, {**ANY_DTYPE, **CLIPPED, "compile": COMPILE}),
    "zero2": (AXOLOTL_2, {**ANY_DTYPE, **CLIPPED}),
    "zero2_torch_compile": (AXOLOTL_2, {**ANY_DTYPE, **CLIPPED, "compile": COMPILE}),
    "zero3": (ALL_3, {**ANY_DTYPE, **CLIPPED}),
    "zero3_bf16": (ALL_3, BF16),
    "zero3_bf16_cpuoffload_all": (
        {**OFFLOADED_3, "offload_optimizer": PINNED},
        {**BF16, **FREE},
    ),
    "zero3_bf16_cpuoffload_params": (OFFLOADED_3, {**BF16, **FREE}),
}


def axolotl(name: str, zero: Config, further: Config) -> Case:
    """Return a case that trains on packed rows with one of axolotl's DeepSpeed configurations.

    If ``name`` has "torch_compile", aot_eager compiles the model, as inductor takes minutes on a
    CPU.
    """
    compiled = "torch_compile" in name
    return trained(
        *("axolotl", f"{name}.json", ("trainers.py", "axolotl_train")),
        {"zero_optimization": zero, **AUTO_BATCH, "wall_clock_breakdown": False, **further},
        *("--model_name_or_path={model}/llama", "--dataset_name={data}/text"),
        *("--optim=adamw_torch_fused", f"--bf16={'bf16' in name}", f"--torch_compile={compiled}"),
        *(["--torch_compile_backend=aot_eager"] if compiled else []),
        *TRAINER,
        is_by_ddp=compiled,  # DeepSpeed 0.19.8 refuses compile.disable and compile.backend
    )


# QLoRA as in PEFT's documentation and TRL's script, with bitsandbytes' weights on the CPU. DDP is
# the reference, because DeepSpeed's stages do not support packed weights.
def peft_qlora(name: str, zero: Config, *further: str) -> Case:
    return trained(
        *("PEFT", f"QLoRA, {name}", ("trainers.py", "peft_qlora")),
        {**AUTO_BATCH, **CLIPPED, "zero_optimization": zero},
        *("--model_name_or_path={model}/llama", "--dataset_name={data}/text"),
        *("--optim=adamw_torch", *further, *TRAINER),
        is_by_ddp=True,
        needs=("bitsandbytes",),
    )


# TRL makes the adapters bf16. DDP clips and updates them in bf16, the engine in fp32, so the losses
# differ slightly.
TRL_QLORA = (
    *("--dataset_name={data}/text", "--load_in_4bit", "--use_bnb_nested_quant", "--use_peft"),
    *("--lora_r=8", "--lora_target_modules=all-linear"),
)
TRL_QLORA_NEEDS = {"is_by_ddp": True, "needs": ("bitsandbytes", *NEEDS_TRL)}
QUANTIZED = [
    trl_script("sft", "QLoRA, ZeRO-2", TRL_2, *TRL_QLORA, **TRL_QLORA_NEEDS),
    trl_script("sft", "QLoRA, ZeRO-3", TRL_3, *TRL_QLORA, **TRL_QLORA_NEEDS),
    trl_script("sft", "QLoRA, ZeRO-3, all offloaded", TRL_OFFLOADED, *TRL_QLORA, **TRL_QLORA_NEEDS),
    peft_qlora("stage 2", {"stage": 2}),
    peft_qlora("stage 3", {"stage": 3}, "--bnb_4bit_quant_storage_dtype=bfloat16"),
    peft_qlora("stage 3, recomputed", {"stage": 3}, "--gradient_checkpointing=True"),
]

# Programs that call ``deepspeed.initialize`` themselves.
RLHF = ("--pretrain={model}/llama", "--save_path={output}")


def openrlhf(name: str, task: str, data: str, *further: str) -> Case:
    arguments = (f"--task={task}", f"--dataset={{data}}/{data}", *further, *RLHF)
    return Case("OpenRLHF", name, "openrlhf_train.py", arguments)


ENGINES = [
    openrlhf("SFT, --zero_stage 2", "sft", "instruction", "--zero_stage=2"),
    openrlhf(
        "reward model, --zero_stage 3", "rm", "preference", "--zero_stage=3", "--overlap_comm"
    ),
    openrlhf(
        *("DPO, --zero_stage 3 --ref_offload", "dpo", "preference"),
        *("--zero_stage=3", "--ref_offload"),
    ),
    Case(
        "DeepSpeedExamples",
        "cifar10_deepspeed.py --deepspeed --stage 2",
        "cifar10_deepspeed.py",
        ("--deepspeed", "--stage=2"),
    ),
    Case(
        "DeepSpeedExamples",
        "train_bert_ds.py, save and load",
        "train_bert_ds.py",
        ("--model={model}/roberta", "--dataset={data}/text", "--output_dir={output}"),
    ),
]

# transformers' example scripts, with the configurations of its DeepSpeed guide.
GUIDE_2: Config = {"stage": 2, "overlap_comm": True, **buckets(2e8)}
GUIDE_3: Config = {"stage": 3, "overlap_comm": True, **LARGE_3}


def example(script: str, what: str, zero: Config, model: str, data: str, *further: str) -> Case:
    arguments = (
        *(script, f"--model_name_or_path={{model}}/{model}", f"--dataset_name={{data}}/{data}"),
        *("--output_dir={output}", "--deepspeed={config}", "--do_train", "--do_eval"),
        *("--max_steps=10", "--per_device_train_batch_size=8", "--learning_rate=1e-3"),
        *("--warmup_steps=2", *QUIET, *further),
    )
    config = {
        **AUTO_BATCH,
        **CLIPPED,
        "fp16": {"enabled": "auto", "initial_scale_power": 16, **SCALE},
        "bf16": {"enabled": "auto"},
        "optimizer": AUTO_ADAMW,
        "scheduler": {"type": "WarmupLR", "params": AUTO_WARMUP},
        "zero_optimization": zero,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    return Case("transformers", f"{script}, {what}", "trainers.py", arguments, config)


EXAMPLES = [
    example("run_clm", "ZeRO-3", GUIDE_3, "gpt2", "text"),
    example(
        *("run_mlm", "ZeRO-2, offloaded", {**GUIDE_2, "offload_optimizer": PINNED}),
        *("roberta", "text"),
    ),
    example("run_glue", "ZeRO-2", GUIDE_2, "bert", "pairs"),
    example(
        *("run_image_classification", "ZeRO-1", {"stage": 1}, "vit", "text"),
        "--remove_unused_columns=False",
    ),
    example(
        *("run_summarization", "ZeRO-3 with generation, all offloaded"),
        {**GUIDE_3, "offload_optimizer": PINNED, "offload_param": PINNED},
        *("t5", "instruction", "--predict_with_generate", "--generation_max_length=12"),
        "--generation_num_beams=2",
    ),
]

# Uses of DeepSpeed in accelerate's documentation.
LAUNCH: Config = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "main_process_port": 0,
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
PLUGIN: dict[str, object] = {
    "deepspeed_multinode_launcher": "standard",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
ACCELERATE_2 = {
    **AUTO_BATCH,
    **CLIPPED,
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {**auto("lr", "weight_decay"), "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {**AUTO_WARMUP, "total_num_steps": "auto"}},
    "zero_optimization": {**GUIDE_2, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
FILE = ("accelerate", "launch", "--config_file={files}/launch.yaml")


def accelerated(
    name: str,
    way: str,
    config: Config | None = None,
    launcher: tuple[str, ...] = (),
    file: Config | None = None,
) -> Case:
    run = (way, "--model={model}/bert", "--dataset={data}/pairs", "--output_dir={output}")
    files = {"launch.yaml": json.dumps(file)} if file else {}  # JSON is valid YAML
    return Case("accelerate", name, "accelerate_loops.py", run, config, launcher, files)


ACCELERATE = [
    accelerated(
        *("launch with deepspeed_config_file, stage 2", "config_file", ACCELERATE_2, FILE),
        {**LAUNCH, "deepspeed_config": {"deepspeed_config_file": "{config}"}},
    ),
    accelerated(
        *("launch with the plugin's fields, stage 3", "plugin", None, FILE),
        {**LAUNCH, "deepspeed_config": PLUGIN, "mixed_precision": "no"},
    ),
    accelerated(
        "launch --use_deepspeed --zero_stage=3, all offloaded",
        "plugin",
        launcher=(
            *("accelerate", "launch", "--use_deepspeed", "--num_processes=2"),
            *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
            *("--main_process_port=0", "--zero_stage=3", "--gradient_accumulation_steps=2"),
            *("--offload_optimizer_device=cpu", "--offload_param_device=cpu"),
            *("--zero3_init_flag=true", "--zero3_save_16bit_model=true"),
        ),
    ),
    accelerated("DeepSpeedPlugin(zero_stage=2) in the program", "in_code"),
]


# Lightning's documented DeepSpeed strategies. DDP is the reference, because Lightning passes a
# GPU's index to DeepSpeed and fails without a GPU.
def lightning(name: str, way: str) -> Case:
    run = ("--model={model}/llama", "--dataset={data}/text", "--output_dir={output}")
    return Case("Lightning", name, "lightning_docs.py", (way, *run), ddp=("ddp", *run))


LIGHTNING = [
    *(
        lightning(f'strategy="{way}"', way)
        for way in ("deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_2_offload")
    ),
    lightning("DeepSpeedStrategy(stage=3, offload_optimizer, offload_parameters)", "in_code"),
]

# Ray Train's DeepSpeed page. Ray starts the workers, which inherit the import hook from the driver.
RAY = Case(
    "Ray",
    "deepspeed.initialize in TorchTrainer's workers, ZeRO-3",
    "ray_docs.py",
    ("--model={model}/bert", "--dataset={data}/pairs", "--output_dir={output}"),
    launcher=("sh", "{files}/start.sh"),
    files={"start.sh": 'exec python "$@"\n'},
    needs=("ray",),
)

PACK: list[Case] = [
    *TRL,
    *(llamafactory(name, zero) for name, zero in LLAMAFACTORY.items()),
    *(axolotl(name, zero, further) for name, (zero, further) in AXOLOTL.items()),
    *ENGINES,
    *EXAMPLES,
    *ACCELERATE,
    *LIGHTNING,
    *QUANTIZED,
    RAY,
    *TRL_TRAINERS,
]
