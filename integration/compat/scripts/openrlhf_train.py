"""Training of SFT, reward and DPO models with the calls of OpenRLHF's DeepSpeed strategy.

It uses OpenRLHF's configuration, Adam on the host with two parameter groups,
``deepspeed.initialize`` with model, optimizer and schedule, a reference engine without optimizer,
and OpenRLHF's own saving.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import measured
import texts
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    get_scheduler,
    set_seed,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig

LEARNING_RATE, WEIGHT_DECAY, BETA, STEPS = 1e-3, 0.01, 0.1, 10
MICRO_BATCH, BATCH = 4, 16
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
AUTO_AT_3 = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
)


def common_config(args, stage: int) -> dict:
    return {
        "steps_per_print": 100,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": stage, **dict.fromkeys(AUTO_AT_3, "auto")},
    }


def train_config(args) -> dict:
    config = common_config(args, args.zero_stage)
    config["zero_optimization"] |= {
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "sub_group_size": "auto",
        "reduce_bucket_size": "auto",
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    }
    if args.overlap_comm:
        config["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True}
    if args.zero_stage == 3:
        config["zero_optimization"]["reduce_scatter"] = True
    return config | {
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": None},
        "checkpoint": {"load_universal": False},
    }


def eval_config(args) -> dict:
    config = common_config(args, 3 if args.zero_stage == 3 else 0)
    config["zero_optimization"]["offload_param"] = {
        "device": "cpu" if args.ref_offload else "none",
        "pin_memory": True,
    }
    return config | {"gradient_clipping": 1.0}


class RewardModel(nn.Module):
    """Transformer that scores a sequence at its last token."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(path)
        self.value_head = nn.Linear(self.model.config.hidden_size, 1, bias=False)
        weight = self.value_head.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.normal_(mean=0.0, std=0.02)

    def forward(self, input_ids, attention_mask):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.size(1) - 1 - attention_mask.long().fliplr().argmax(dim=1)
        return self.value_head(hidden).squeeze(-1).gather(1, last.unsqueeze(1)).squeeze(1)


def log_probs(model, batch) -> torch.Tensor:
    """Return the summed log probabilities of each row's answer."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    chosen = labels.clamp(min=0).unsqueeze(-1)
    found = F.log_softmax(logits.float(), dim=-1).gather(2, chosen).squeeze(-1)
    return (found * (labels != -100)).sum(-1)


class Objective:
    def __init__(self, args, model, reference, tokenizer) -> None:
        self.args, self.model, self.reference, self.tokenizer = args, model, reference, tokenizer

    def padded(self, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        collator = DataCollatorForSeq2Seq(self.tokenizer, label_pad_token_id=-100)
        return collator([texts.labelled(self.tokenizer, *pair) for pair in pairs])

    def __call__(self, rows: list[dict]) -> torch.Tensor:
        if self.args.task == "sft":
            batch = self.padded([(row["instruction"], row["output"]) for row in rows])
            labels = batch["labels"][:, 1:]
            found = self.model(batch["input_ids"], attention_mask=batch["attention_mask"])
            logits = found.logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        chosen = [(row["prompt"], row["chosen"]) for row in rows]
        rejected = [(row["prompt"], row["rejected"]) for row in rows]
        # One forward for all rows, because the engine expects one forward per backward.
        batch = self.padded(chosen + rejected)
        if self.args.task == "rm":
            values = self.model(batch["input_ids"], batch["attention_mask"])
            return -F.logsigmoid(values[: len(rows)] - values[len(rows) :]).mean()
        policy = log_probs(self.model, batch)
        with torch.no_grad():
            before = log_probs(self.reference, batch)
        margins = (policy - before)[: len(rows)] - (policy - before)[len(rows) :]
        return -F.logsigmoid(BETA * margins).mean()


def groups_of(model: nn.Module) -> list[dict]:
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if any(part in name for part in NO_DECAY) else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("sft", "rm", "dpo"))
    parser.add_argument("--pretrain")
    parser.add_argument("--dataset")
    parser.add_argument("--save_path")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--ref_offload", action="store_true")
    parser.add_argument("--overlap_comm", action="store_true")
    args = parser.parse_args()

    set_seed(42)
    if args.local_rank != -1:
        os.environ["LOCAL_RANK"] = str(args.local_rank)
    deepspeed.init_distributed()
    ranks = torch.distributed.get_world_size()
    device = deepspeed.accelerator.get_accelerator().device_name()
    mesh = init_device_mesh(device, (ranks, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    accumulated = BATCH // MICRO_BATCH // ranks

    # While this object exists, transformers loads models directly into shards.
    from_shards = HfDeepSpeedConfig(train_config(args)) if args.zero_stage == 3 else None
    if args.task == "rm":
        model = RewardModel(args.pretrain)
        inner = model.model
    else:
        inner = model = AutoModelForCausalLM.from_pretrained(args.pretrain)
    inner.config.use_cache = False
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = DeepSpeedCPUAdam(
        groups_of(model), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
    )
    schedule = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=2,
        num_training_steps=STEPS,
        scheduler_specific_kwargs={"min_lr": LEARNING_RATE * 0.1},
    )
    placed = {"local_rank": int(os.environ.get("LOCAL_RANK", "-1"))}
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=train_config(args),
        args=placed,
        dist_init_required=True,
    )
    reference = None
    if args.task == "dpo":
        reference, *_ = deepspeed.initialize(
            model=AutoModelForCausalLM.from_pretrained(args.pretrain),
            args=placed,
            config=eval_config(args),
            dist_init_required=True,
        )
        reference.eval()
    del from_shards

    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    rows = texts.Rows(texts.read(args.dataset))
    group = mesh["dp"].get_group()
    sampler = DistributedSampler(
        rows,
        num_replicas=torch.distributed.get_world_size(group),
        rank=torch.distributed.get_rank(group),
        seed=42,
        drop_last=True,
    )
    loader = DataLoader(rows, MICRO_BATCH, sampler=sampler, drop_last=True, collate_fn=list)
    objective = Objective(args, engine, reference, tokenizer)
    batches = iter(loader)
    engine.train()
    for _ in range(STEPS):
        with measured.step() as step:
            total = 0.0
            for _ in range(accumulated):
                loss = objective(next(batches))
                engine.backward(loss)
                engine.step()
                total += loss.item() / accumulated
            step.loss = total
    save(args, engine)


def save(args, engine) -> None:
    if args.zero_stage > 2:
        state = engine._consolidated_16bit_state_dict()
        kept = [p for p in engine.module.parameters() if hasattr(p, "ds_id")]
        assert any(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in kept)
    else:
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        state = clone_tensors_for_torch_save(engine.module.state_dict())
    if torch.distributed.get_rank() == 0:
        assert set(engine.module.state_dict()) <= set(state)
        if args.task != "rm":
            engine.module.save_pretrained(args.save_path, state_dict=state)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
