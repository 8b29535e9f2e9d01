"""Generates tokens with a model trained by DeepSpeed, or with a plain model on each rank."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measured
import torch
from transformers import AutoModelForCausalLM, set_seed

CALLS, BATCH, PROMPT, TOKENS = 6, 4, 16, 32
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--deepspeed", help="a configuration of DeepSpeed's")
    parser.add_argument("--gathered", action="store_true", help="within GatheredParameters")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model)
    if options.deepspeed is not None:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=options.deepspeed
        )
        model = engine.module
    model.eval()
    for call in range(CALLS):
        set_seed(100 * call + int(os.environ["RANK"]))
        prompt = torch.randint(10, model.config.vocab_size, (BATCH, PROMPT))
        gathering = (
            deepspeed.zero.GatheredParameters(model.parameters())
            if options.gathered
            else nullcontext()
        )
        with measured.step() as step, gathering:
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                **WAYS[options.way],
            )
            step.loss = float((tokens * torch.arange(1, tokens.numel() + 1).view_as(tokens)).sum())


if __name__ == "__main__":
    main()
