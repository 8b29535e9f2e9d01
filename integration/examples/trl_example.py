"""TRL's SFTTrainer with ZeRO, without DeepSpeed and without a launcher's configuration file.

torchrun --nproc-per-node 2 integration/examples/trl_example.py --zero stage3-offload

`zero_trainer` takes every trainer of TRL: DPO, GRPO, RLOO, KTO, Reward, Distillation and others.
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from zero_engine.hf import zero_trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", default="stage3")
    zero = parser.parse_args().zero

    words = ["<pad>", "</s>", *(f"w{number}" for number in range(30))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    walks = [" ".join(f"w{(start + n) % 30}" for n in range(16)) for start in range(128)]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "vocab_size": len(words),
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    trainer = zero_trainer(SFTTrainer)(
        model=LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        args=SFTConfig(
            output_dir="runs/trl_example",
            max_steps=20,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.accelerator.is_available(),
        ),
        train_dataset=Dataset.from_dict({"text": walks}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
        ),
        zero=zero,
    )
    trainer.train()
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 1.0, losses


if __name__ == "__main__":
    main()
