"""Fine-tuning with the calls of Ray Train's DeepSpeed page."""

from __future__ import annotations

import tempfile

import ray
import texts
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer


def train_func(config) -> None:
    import deepspeed
    import measured
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        default_data_collator,
        set_seed,
    )

    measured.allow_cpu()
    with measured.measuring():
        set_seed(42)
        tokenizer = AutoTokenizer.from_pretrained(config["model"])
        rows = texts.pairs(tokenizer, config["dataset"])
        model = AutoModelForSequenceClassification.from_pretrained(config["model"], num_labels=2)
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config["deepspeed_config"]
        )
        device = get_accelerator().device_name(engine.local_rank)
        data = texts.Rows(rows)
        loader = DataLoader(
            data,
            batch_size=config["batch_size"],
            sampler=DistributedSampler(data, shuffle=True, seed=0),
            collate_fn=default_data_collator,
        )
        engine.train()
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with measured.step() as step:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                step.loss = loss
        torch.distributed.barrier()
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
            torch.distributed.barrier()
            checkpoint = Checkpoint.from_directory(folder)
            report({"loss": measured.LOSSES[-1]}, checkpoint=checkpoint)
    assert get_context().get_world_size() == 2


def main() -> None:
    args = texts.parser().parse_args()
    deepspeed_config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "none"},
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": True,
        "steps_per_print": 10,
        "train_micro_batch_size_per_gpu": 16,
        "wall_clock_breakdown": False,
    }
    ray.init(num_cpus=3, object_store_memory=100 * 1000**2, include_dashboard=False)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={
            "model": args.model,
            "dataset": args.dataset,
            "batch_size": 16,
            "deepspeed_config": deepspeed_config,
        },
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=args.output_dir),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
