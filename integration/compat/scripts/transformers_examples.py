"""transformers' example scripts by their calls, with the Trainer's own arguments.

``run_clm``, ``run_mlm``, ``run_glue``, ``run_image_classification`` and ``run_summarization``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import texts
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
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


@dataclass
class Arguments:
    model_name_or_path: str
    dataset_name: str = ""


def parsed(kind: type = TrainingArguments):
    own, training = HfArgumentParser((Arguments, kind)).parse_args_into_dataclasses(sys.argv[2:])
    set_seed(training.seed)
    return own, training, AutoTokenizer.from_pretrained(own.model_name_or_path)


def accuracy(prediction) -> dict[str, float]:
    return {
        "accuracy": float((np.argmax(prediction.predictions, 1) == prediction.label_ids).mean())
    }


def train(model, training, rows: list, num_eval: int, kind: type = Trainer, **more) -> None:
    """Train, evaluate on the first rows, and save."""
    trainer = kind(
        model=model,
        args=training,
        train_dataset=texts.Rows(rows),
        eval_dataset=texts.Rows(rows[:num_eval]),
        **more,
    )
    result = trainer.train(resume_from_checkpoint=None)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def blocks(tokenizer, rows: list[dict], size: int) -> list[dict[str, list[int]]]:
    """All texts one after another, in blocks of one size."""
    ids = [token for row in rows for token in tokenizer(row["text"])["input_ids"]]
    parts = [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
    return [{"input_ids": part, "labels": list(part)} for part in parts]


def run_clm() -> None:
    own, training, tokenizer = parsed()
    rows = blocks(tokenizer, texts.read(own.dataset_name), 64)
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, config=config)
    embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings > 0:
        model.resize_token_embeddings(len(tokenizer))
    train(
        *(model, training, rows, 16),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )


def run_mlm() -> None:
    own, training, tokenizer = parsed()
    rows = [
        {"input_ids": row["input_ids"]}
        for row in blocks(tokenizer, texts.read(own.dataset_name), 64)
    ]
    model = AutoModelForMaskedLM.from_pretrained(own.model_name_or_path)
    train(
        *(model, training, rows, 16),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )


def run_glue() -> None:
    own, training, tokenizer = parsed()
    config = AutoConfig.from_pretrained(own.model_name_or_path, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(
        own.model_name_or_path, config=config
    )
    rows = []
    for row in texts.read(own.dataset_name):
        pair = (row["sentence1"], row["sentence2"])
        found = tokenizer(*pair, padding="max_length", max_length=96, truncation=True)
        rows.append({**found, "label": row["label"]})
    train(
        *(model, training, rows, 32),
        compute_metrics=accuracy,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )


def run_image_classification() -> None:
    own, training, _ = parsed()
    model = AutoModelForImageClassification.from_pretrained(
        own.model_name_or_path, num_labels=10, ignore_mismatched_sizes=True
    )
    rows = [{"pixel_values": image, "labels": label} for image, label in texts.images(320)]
    train(model, training, rows, 32, compute_metrics=accuracy)


def run_summarization() -> None:
    own, training, tokenizer = parsed(Seq2SeqTrainingArguments)
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

    train(
        *(model, training, rows, 10),
        kind=Seq2SeqTrainer,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=lengths,
    )


if __name__ == "__main__":
    {
        "run_clm": run_clm,
        "run_mlm": run_mlm,
        "run_glue": run_glue,
        "run_image_classification": run_image_classification,
        "run_summarization": run_summarization,
    }[sys.argv[1]]()
