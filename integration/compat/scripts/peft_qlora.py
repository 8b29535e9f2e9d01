"""QLoRA by the calls of PEFT's documentation: a 4-bit base, adapters, and the Trainer."""

from __future__ import annotations

from dataclasses import dataclass

import texts
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    dataset_dir: str
    bnb_4bit_quant_storage_dtype: str = "uint8"
    lora_r: int = 8
    max_length: int = 8


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    arguments, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)  # adapters are made before the Trainer seeds
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=getattr(torch, arguments.bnb_4bit_quant_storage_dtype),
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model_name_or_path, quantization_config=quantization, dtype=torch.float32
    )
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=training.gradient_checkpointing
    )
    lora = LoraConfig(r=arguments.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    # Equally long: the Trainer weighs micro-steps by their tokens with DDP, not with DeepSpeed.
    rows = [
        tokenizer(row["text"], truncation=True, max_length=arguments.max_length)
        for row in texts.read(arguments.dataset_dir)
    ]
    rows = [row for row in rows if len(row["input_ids"]) == arguments.max_length]
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=texts.Rows(rows),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
