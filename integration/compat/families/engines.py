"""Programs that call ``deepspeed.initialize`` themselves: OpenRLHF and DeepSpeedExamples."""

from cases import Case

_RLHF = (
    "--pretrain={model}/llama",
    "--save_path={output}",
    "--max_steps=10",
    "--micro_train_batch_size=4",
    "--train_batch_size=16",
    "--param_dtype=fp32",
    "--adam_offload",
    "--gradient_checkpointing",
)
CASES = [
    Case(
        "OpenRLHF",
        "SFT, --zero_stage 2",
        "openrlhf_train.py",
        ("--task=sft", "--dataset={data}/instruction", "--zero_stage=2", *_RLHF),
    ),
    Case(
        "OpenRLHF",
        "reward model, --zero_stage 3",
        "openrlhf_train.py",
        ("--task=rm", "--dataset={data}/preference", "--zero_stage=3", "--overlap_comm", *_RLHF),
    ),
    Case(
        "OpenRLHF",
        "DPO, --zero_stage 3 --ref_offload",
        "openrlhf_train.py",
        ("--task=dpo", "--dataset={data}/preference", "--zero_stage=3", "--ref_offload", *_RLHF),
    ),
    Case(
        "DeepSpeedExamples",
        "cifar10_deepspeed.py --deepspeed --stage 2",
        "cifar10_deepspeed.py",
        ("--deepspeed", "--dtype=fp32", "--stage=2"),
    ),
    Case(
        "DeepSpeedExamples",
        "train_bert_ds.py, save and load",
        "train_bert_ds.py",
        (
            *("--model={model}/roberta", "--dataset={data}/text", "--checkpoint_dir={output}"),
            "--dtype=bf16",
        ),
    ),
]
