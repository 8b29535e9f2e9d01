"""QLoRA as PEFT's documentation has it, with bitsandbytes' weights on the CPU."""

from __future__ import annotations

from cases import Case, Config

from families.trainers import AUTO_BATCH, RUN

WHY = "its stages are not meant for weights whose bytes have another shape than the matrix"


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


CASES = [
    qlora("stage 2", {"stage": 2}),
    qlora("stage 3", {"stage": 3}, "--bnb_4bit_quant_storage_dtype=bfloat16"),
    qlora("stage 3, recomputed", {"stage": 3}, "--gradient_checkpointing=True"),
]
