"""transformers' example scripts, with the configurations of its DeepSpeed guide."""

from cases import Case, Config

from families.trainers import SCALE

_AUTO_ADAMW = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
_WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
_PINNED = {"device": "cpu", "pin_memory": True}


def _guide(zero: Config) -> Config:
    return {
        "fp16": {"enabled": "auto", "initial_scale_power": 16, **SCALE},
        "bf16": {"enabled": "auto"},
        "optimizer": _AUTO_ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


ZERO_1: Config = {"stage": 1}
ZERO_2: Config = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO_3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO_2_OFFLOAD: Config = {**ZERO_2, "offload_optimizer": _PINNED}
ZERO_3_OFFLOAD: Config = {**ZERO_3, "offload_optimizer": _PINNED, "offload_param": _PINNED}


def _case(script: str, what: str, zero: Config, model: str, data: str, *further: str) -> Case:
    return Case(
        "transformers",
        f"{script}, {what}",
        "transformers_examples.py",
        (
            *(script, f"--model_name_or_path={{model}}/{model}", f"--dataset_name={{data}}/{data}"),
            *("--output_dir={output}", "--deepspeed={config}", "--do_train", "--do_eval"),
            *("--max_steps=10", "--per_device_train_batch_size=8", "--learning_rate=1e-3"),
            *("--warmup_steps=2", "--logging_steps=1", "--save_strategy=no", "--report_to=none"),
            *("--disable_tqdm=True", *further),
        ),
        _guide(zero),
    )


CASES = [
    _case("run_clm", "ZeRO-3", ZERO_3, "gpt2", "text"),
    _case("run_mlm", "ZeRO-2, offloaded", ZERO_2_OFFLOAD, "roberta", "text"),
    _case("run_glue", "ZeRO-2", ZERO_2, "bert", "pairs"),
    _case(
        *("run_image_classification", "ZeRO-1", ZERO_1, "vit", "text"),
        "--remove_unused_columns=False",
    ),
    _case(
        *("run_summarization", "ZeRO-3 with generation, all offloaded", ZERO_3_OFFLOAD),
        *("t5", "instruction", "--predict_with_generate", "--generation_max_length=12"),
        "--generation_num_beams=2",
    ),
]
