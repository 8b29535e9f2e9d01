"""A script with Hugging Face's Trainer for `zero-engine run`. It resumes from its last checkpoint.

zero-engine run --nproc-per-node 2 integration/examples/hf_script.py runs/two
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

output = Path(sys.argv[1])
text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[: 1 << 15]
windows = torch.tensor(list(text)).split(64)[:-1]
sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
torch.manual_seed(0)
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)),
    args=TrainingArguments(
        output_dir=str(output),
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            # Without the second key, save_model writes no weights at stage 3.
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "step_records": {"folder": str(output / "records")},  # read by zero-engine report
        },
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_steps=300,
        save_steps=100,
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in windows],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
trainer.save_model(str(output / "model"))
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
assert losses[-1] < losses[0]
