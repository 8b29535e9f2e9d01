"""Supervised fine-tuning by the calls that LlamaFactory's ``train`` makes.

A Seq2SeqTrainer on padded rows with masked prompts, recomputation, and a cosine schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import texts
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    dataset_dir: str
    finetuning_type: str = field(default="full")


def main() -> None:
    parser = HfArgumentParser((ModelArguments, Seq2SeqTrainingArguments))
    arguments, training = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, padding_side="right")
    config = AutoConfig.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, config=config)
    model.config.use_cache = False
    model.enable_input_require_grads()
    if arguments.finetuning_type == "lora":
        kind = TaskType.CAUSAL_LM
        lora = LoraConfig(task_type=kind, r=8, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(model, lora)
    rows = texts.read(arguments.dataset_dir)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer, model=model, pad_to_multiple_of=8, label_pad_token_id=-100
        ),
        train_dataset=texts.Rows(
            [texts.labelled(tokenizer, row["instruction"], row["output"]) for row in rows]
        ),
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
