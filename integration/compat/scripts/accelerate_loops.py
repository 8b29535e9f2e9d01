"""Training loops from accelerate's documentation.

``config_file`` is the loop of accelerate's DeepSpeed guide, whose configuration names optimizer and
schedule (``DummyOptim``, ``DummyScheduler``). ``plugin`` is ``nlp_example.py`` with a torch
optimizer. ``in_code`` creates a ``DeepSpeedPlugin`` itself.
"""

from __future__ import annotations

import measured
import texts
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

NUM_STEPS = 10


def main() -> None:
    args = texts.parser("way").parse_args()
    if args.way == "in_code":
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    elif args.way == "plugin":
        accelerator = Accelerator(gradient_accumulation_steps=2)
    else:
        accelerator = Accelerator()
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = texts.pairs(tokenizer, args.dataset)
    loader = DataLoader(
        texts.Rows(rows), shuffle=True, collate_fn=default_data_collator, batch_size=8
    )
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    plugin = accelerator.state.deepspeed_plugin
    by_config = "optimizer" in plugin.deepspeed_config
    make = DummyOptim if by_config else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-3)
    if by_config and "scheduler" in plugin.deepspeed_config:
        schedule = DummyScheduler(optimizer, total_num_steps=NUM_STEPS, warmup_num_steps=2)
    else:
        schedule = get_linear_schedule_with_warmup(
            optimizer, num_warmup_steps=2, num_training_steps=NUM_STEPS
        )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    batches = iter(loader)
    for _ in range(NUM_STEPS):
        with measured.step() as step:
            total = torch.zeros(())
            for _ in range(accelerator.gradient_accumulation_steps):
                batch = next(batches, None)
                if batch is None:
                    batches = iter(loader)
                    batch = next(batches)
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                total += loss.detach()
            step.loss = accelerator.gather(total.reshape(1)).mean()
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{args.output_dir}/state")
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
