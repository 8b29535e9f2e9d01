"""Tiny untrained models and local data for all cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>")
WORDS = 506
VOCABULARY = len(SPECIAL) + WORDS
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CHAT = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> "
    "{% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def save_models(root: Path) -> None:
    """Write one folder per model, with tokenizer: Llamas of four sizes, gpt2, bert, ..."""
    layers, width, heads = 4, 256, 4
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}

    def encoder(layers: int, width: int) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 2 * width,
        }

    def llama(layers: int, width: int, **more: Any) -> tuple[str, Any, dict[str, Any]]:
        sizes = encoder(layers, width) | words | IDS | {"num_key_value_heads": heads // 2}
        return "llama", AutoModelForCausalLM, sizes | more

    bert = encoder(layers, width)
    bert |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    of_words = bert | words | {"pad_token_id": 0}
    gpt2 = {"n_positions": 256, "n_embd": width, "n_layer": layers, "n_head": heads}
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    t5 = {"d_model": width, "d_kv": width // heads, "d_ff": 2 * width, "num_layers": layers}
    t5 |= {"num_heads": heads, "dropout_rate": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2}
    vit = bert | {"image_size": 32, "patch_size": 8, "num_labels": 10}
    made: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "llama": llama(layers, width),
        "policy": llama(2, 32, initializer_range=0.2),
        "teacher": llama(2, 48, initializer_range=0.2),
        "speaker": llama(6, 192, initializer_range=0.2),
        "gpt2": ("gpt2", AutoModelForCausalLM, gpt2 | IDS | {"vocab_size": VOCABULARY}),
        "bert": ("bert", AutoModelForSequenceClassification, of_words),
        "roberta": ("roberta", AutoModelForMaskedLM, of_words),
        "t5": ("t5", AutoModelForSeq2SeqLM, t5 | {"vocab_size": VOCABULARY, "pad_token_id": 0}),
        "vit": ("vit", AutoModelForImageClassification, vit),
    }
    tokenizer = make_tokenizer()
    for name, (kind, model, sizes) in made.items():
        torch.manual_seed(0)
        model.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per word: w0, w1, ... and the roles of chats."""
    words = ("user", "assistant", "system", *(f"w{number}" for number in range(WORDS - 3)))
    ids = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        sep_token="<sep>",
        cls_token="<s>",
        model_max_length=256,
    )
    made.chat_template = CHAT
    return made


def sentences(count: int, length: int, seed: int) -> list[str]:
    """Return sentences that step through the words w0 to w99, each with a random stride."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 100, (count, 1), generator=generator)
    step = torch.randint(1, 5, (count, 1), generator=generator)
    walks = (start + step * torch.arange(length)) % 100
    return [" ".join(f"w{word}" for word in walk) for walk in walks.tolist()]


def save_data(root: Path) -> None:
    """Write text, instruction, pairs, preference, prompts and unpaired data as JSON lines."""
    count, length = 256, 48
    texts, others = sentences(count, length, 0), sentences(count, length, 1)
    half = length // 2
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for text in texts],
        "instruction": [
            {"instruction": " ".join(text.split()[:half]), "output": " ".join(text.split()[half:])}
            for text in texts
        ],
        "pairs": [
            {"sentence1": one, "sentence2": one if number % 2 else other, "label": number % 2}
            for number, (one, other) in enumerate(zip(texts, others, strict=True))
        ],
        "preference": [
            {
                "prompt": " ".join(one.split()[:half]),
                "chosen": " ".join(one.split()[half:]),
                "rejected": " ".join(other.split()[half:]),
            }
            for one, other in zip(texts, others, strict=True)
        ],
        "prompts": [{"prompt": " ".join(text.split()[:8])} for text in texts],
        "unpaired": [
            {
                "prompt": " ".join(one.split()[:half]),
                "completion": " ".join((one if number % 2 else other).split()[half:]),
                "label": bool(number % 2),
            }
            for number, (one, other) in enumerate(zip(texts, others, strict=True))
        ],
    }
    for name, entries in rows.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / "train.jsonl").write_text(lines, encoding="utf-8")
