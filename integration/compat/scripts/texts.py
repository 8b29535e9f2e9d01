"""Readers of the local data sets, and the options of scripts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset


def parser(*names: str) -> argparse.ArgumentParser:
    """Return a parser with options for a model, a data set, a folder, and further ``names``."""
    made = argparse.ArgumentParser()
    for name in ("--model", "--dataset", "--output_dir", *names):
        made.add_argument(name)
    return made


def read(folder: str) -> list[dict]:
    lines = Path(folder, "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class Rows(Dataset):
    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self.rows[index]


def pairs(tokenizer, folder: str) -> list[dict]:
    """Tokenize pairs of sentences with labels."""
    options = {"padding": "max_length", "max_length": 96, "truncation": True}
    return [
        {**tokenizer(row["sentence1"], row["sentence2"], **options), "labels": row["label"]}
        for row in read(folder)
    ]


def labelled(tokenizer, prompt: str, answer: str) -> dict[str, list[int]]:
    """Tokenize a prompt and an answer. Only the answer's tokens have labels."""
    before = tokenizer(prompt)["input_ids"]
    after = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    ids = [*before, *after]
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": [-100] * len(before) + after,
    }


def images(count: int, classes: int = 10, size: int = 32) -> list[tuple[torch.Tensor, int]]:
    """Return noisy images of one random pattern per class, with labels."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, size, size, generator=generator)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return [(patterns[n % classes] + noise[n], n % classes) for n in range(count)]
