"""TRL's own scripts, as installed, with the blocks of its ``accelerate_configs``."""

from importlib.util import find_spec
from pathlib import Path

from cases import Case, Config

_AUTO: Config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ZERO_2: Config = {**_AUTO, "zero_optimization": {"stage": 2}}
ZERO_3: Config = {
    **_AUTO,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
_CPU = {"device": "cpu"}
ZERO_3_OFFLOAD: Config = {
    **_AUTO,
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": _CPU,
        "offload_param": _CPU,
    },
}
RUN = (
    "--model_name_or_path={model}/llama",
    "--output_dir={output}",
    "--dtype=float32",
    "--bf16=False",
    "--max_steps=8",
    "--per_device_train_batch_size=4",
    "--gradient_accumulation_steps=1",
    "--learning_rate=1e-3",
    "--logging_steps=1",
    "--save_strategy=no",
    "--report_to=none",
    "--disable_tqdm=True",
)
_GENERATES = (
    "--dataset_name={data}/prompts",
    "--reward_funcs=scripts.texts.distinct_words",
    "--num_generations=4",
    "--max_completion_length=12",
    "--beta=0.04",
)
NEEDS = ("trl", "datasets")


def _installed(
    trainer: str, what: str, config: Config, *arguments: str, compared: str = "loss"
) -> Case:
    return Case(
        "TRL",
        f"trl.scripts.{trainer}, {what}",
        f"trl.scripts.{trainer}",
        ("--deepspeed={config}", *arguments, *RUN),
        config,
        compared=compared,
        needs=NEEDS,
    )


def _accelerate_config(name: str) -> Path:
    """A file that TRL ships."""
    found = find_spec("trl")
    origin = found.origin if found is not None else None
    return Path(origin or "trl/__init__.py").parent / "accelerate_configs" / name


CASES = [
    _installed("sft", "ZeRO-3", ZERO_3, "--dataset_name={data}/text"),
    _installed("dpo", "ZeRO-3", ZERO_3, "--dataset_name={data}/preference"),
    _installed("kto", "ZeRO-2", ZERO_2, "--dataset_name={data}/unpaired"),
    _installed("reward", "ZeRO-3", ZERO_3, "--dataset_name={data}/preference"),
    _installed("grpo", "ZeRO-3", ZERO_3, *_GENERATES),
    _installed("rloo", "ZeRO-3, all offloaded", ZERO_3_OFFLOAD, *_GENERATES, compared="grad_norm"),
    Case(
        "TRL",
        "trl.scripts.sft with LoRA, accelerate_configs/zero3.yaml",
        "trl.scripts.sft",
        ("--dataset_name={data}/text", "--use_peft", "--lora_target_modules=all-linear", *RUN),
        launcher=(
            *("accelerate", "launch", f"--config_file={_accelerate_config('zero3.yaml')}"),
            *("--num_processes=2", "--mixed_precision=no", "--main_process_port=0"),
        ),
        needs=NEEDS,
    ),
]
