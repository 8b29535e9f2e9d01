"""QLoRA as PEFT's documentation and TRL's script have it, with bitsandbytes' weights on the CPU."""

from __future__ import annotations

from cases import Case, Config

from families import trl_scripts
from families.trainers import AUTO_BATCH, RUN

WHY = "its stages are not meant for weights whose bytes have another shape than the matrix"
BF16_ADAPTERS = (
    "TRL makes the adapters bf16: DDP clips and updates them in bf16, the engine in fp32, "
    "which is what the losses differ by"
)


def qlora(name: str, zero: Config, *further: str) -> Case:
    """A training of adapters on a 4-bit base."""
    arguments = (
        "--model_name_or_path={model}/llama",
        "--dataset_dir={data}/text",
        "--optim=adamw_torch",
        *further,
        *RUN,
    )
    return Case(
        "PEFT",
        f"QLoRA, {name}",
        "peft_qlora.py",
        ("--deepspeed={config}", *arguments),
        {**AUTO_BATCH, "gradient_clipping": "auto", "zero_optimization": zero},
        ddp=("--use_cpu=True", *arguments),
        why_ddp=WHY,
        needs=("bitsandbytes",),
    )


def sft(name: str, config: Config) -> Case:
    """Supervised fine-tuning by TRL's script, as its documentation has it for QLoRA."""
    arguments = (
        "--dataset_name={data}/text",
        *("--load_in_4bit", "--use_bnb_nested_quant", "--use_peft"),
        *("--lora_r=8", "--lora_target_modules=all-linear"),
        *trl_scripts.RUN,
    )
    return Case(
        "TRL",
        f"trl.scripts.sft, QLoRA, {name}",
        "trl.scripts.sft",
        ("--deepspeed={config}", *arguments),
        config,
        ddp=("--use_cpu=True", *arguments),
        why_ddp=f"{WHY}. {BF16_ADAPTERS}",
        needs=("bitsandbytes", *trl_scripts.NEEDS),
    )


CASES = [
    sft("ZeRO-2", trl_scripts.ZERO_2),
    sft("ZeRO-3", trl_scripts.ZERO_3),
    sft("ZeRO-3, all offloaded", trl_scripts.ZERO_3_OFFLOAD),
    qlora("stage 2", {"stage": 2}),
    qlora("stage 3", {"stage": 3}, "--bnb_4bit_quant_storage_dtype=bfloat16"),
    qlora("stage 3, recomputed", {"stage": 3}, "--gradient_checkpointing=True"),
]
