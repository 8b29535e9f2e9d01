"""Trainings with the calls of public scripts and the Trainer's arguments: ``trainers.py NAME ...``.

``run_clm``, ``run_mlm``, ``run_glue``, ``run_image_classification`` and ``run_summarization``
follow transformers' example scripts. ``llamafactory_sft`` pads rows and masks prompts.
``axolotl_train`` packs several samples into a row, each with its own positions. ``peft_qlora``
trains adapters on a 4-bit base.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import texts
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

NUM_EVAL = 16


@dataclass
class Arguments:
    model_name_or_path: str
    dataset_name: str = ""
    bnb_4bit_quant_storage_dtype: str = "uint8"


def accuracy(prediction) -> dict[str, float]:
    return {
        "accuracy": float((np.argmax(prediction.predictions, 1) == prediction.label_ids).mean())
    }


def blocks(tokenizer, rows: list[dict], size: int) -> list[dict[str, list[int]]]:
    """Concatenate all texts and cut them into blocks of ``size`` tokens."""
    ids = [token for row in rows for token in tokenizer(row["text"])["input_ids"]]
    parts = [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
    return [{"input_ids": part, "labels": list(part)} for part in parts]


def run_clm(own, training, tokenizer):
    rows = blocks(tokenizer, texts.read(own.dataset_name), 64)
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, config=config)
    return model, rows, {"data_collator": default_data_collator}


def run_mlm(own, training, tokenizer):
    rows = blocks(tokenizer, texts.read(own.dataset_name), 64)
    model = AutoModelForMaskedLM.from_pretrained(own.model_name_or_path)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    return model, [{"input_ids": row["input_ids"]} for row in rows], {"data_collator": collator}


def run_glue(own, training, tokenizer):
    config = AutoConfig.from_pretrained(own.model_name_or_path, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(
        own.model_name_or_path, config=config
    )
    rows = texts.pairs(tokenizer, own.dataset_name)
    return model, rows, {"data_collator": default_data_collator, "compute_metrics": accuracy}


def run_image_classification(own, training, tokenizer):
    model = AutoModelForImageClassification.from_pretrained(
        own.model_name_or_path, num_labels=10, ignore_mismatched_sizes=True
    )
    rows = [{"pixel_values": image, "labels": label} for image, label in texts.images(320)]
    return model, rows, {"data_collator": default_data_collator, "compute_metrics": accuracy}


def run_summarization(own, training, tokenizer):
    model = AutoModelForSeq2SeqLM.from_pretrained(own.model_name_or_path)
    rows = [
        {
            **tokenizer(f"summarize: {row['instruction']}"),
            "labels": tokenizer(text_target=row["output"])["input_ids"],
        }
        for row in texts.read(own.dataset_name)
    ]

    def lengths(prediction) -> dict[str, float]:
        ids = np.where(prediction.predictions >= 0, prediction.predictions, 0)
        said = tokenizer.batch_decode(torch.as_tensor(ids), skip_special_tokens=True)
        return {"gen_len": float(np.mean([len(text.split()) for text in said]))}

    collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100)
    return model, rows, {"data_collator": collator, "compute_metrics": lengths}


def llamafactory_sft(own, training, tokenizer):
    tokenizer.padding_side = "right"
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, config=config)
    model.config.use_cache = False
    model.enable_input_require_grads()
    rows = texts.read(own.dataset_name)
    rows = [texts.labelled(tokenizer, row["instruction"], row["output"]) for row in rows]
    collator = DataCollatorForSeq2Seq(
        tokenizer, model=model, pad_to_multiple_of=8, label_pad_token_id=-100
    )
    return model, rows, {"data_collator": collator}


def axolotl_train(own, training, tokenizer):
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, dtype=dtype)
    model.config.use_cache = False
    rows, ids, positions, length = [], [], [], 96
    for row in texts.read(own.dataset_name):
        one = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        ids, positions = ids + one, [*positions, *range(len(one))]
        if len(ids) >= length:
            tokens = torch.tensor(ids[:length])
            of_row = torch.tensor(positions[:length])
            rows.append({"input_ids": tokens, "position_ids": of_row, "labels": tokens.clone()})
            ids, positions = [], []
    return model, rows, {}


def peft_qlora(own, training, tokenizer):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=getattr(torch, own.bnb_4bit_quant_storage_dtype),
    )
    model = AutoModelForCausalLM.from_pretrained(
        own.model_name_or_path, quantization_config=quantization, dtype=torch.float32
    )
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=training.gradient_checkpointing
    )
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    # All rows are equally long, because the Trainer weighs micro-steps by tokens with DDP but not
    # with DeepSpeed.
    rows = [
        tokenizer(row["text"], truncation=True, max_length=8)
        for row in texts.read(own.dataset_name)
    ]
    rows = [row for row in rows if len(row["input_ids"]) == 8]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return get_peft_model(model, lora), rows, {"data_collator": collator}


SEQ2SEQ = (run_summarization, llamafactory_sft)
OTHERS = (run_clm, run_mlm, run_glue, run_image_classification, axolotl_train, peft_qlora)
TASKS = {task.__name__: task for task in (*SEQ2SEQ, *OTHERS)}


def main() -> None:
    task, given = TASKS[sys.argv[1]], sys.argv[2:]
    make, of_training = Trainer, TrainingArguments
    if task in SEQ2SEQ:
        make, of_training = Seq2SeqTrainer, Seq2SeqTrainingArguments
    own, training = HfArgumentParser((Arguments, of_training)).parse_args_into_dataclasses(given)
    set_seed(training.seed)  # adapters are created before the Trainer sets its seed
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model, rows, more = task(own, training, tokenizer)
    trainer = make(
        model=model,
        args=training,
        processing_class=tokenizer,
        train_dataset=texts.Rows(rows),
        eval_dataset=texts.Rows(rows[:NUM_EVAL]),
        **more,
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
