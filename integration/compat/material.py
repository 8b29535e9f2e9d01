"""Tiny untrained models and local data for all cases."""

from __future__ import annotations

import json
from collections import defaultdict
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
    """Write one folder per model, with tokenizer: Llamas of three sizes, gpt2, bert, ..."""
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
    count, half = 256, 24
    lines: dict[str, list[str]] = defaultdict(list)
    texts = zip(*(sentences(count, 2 * half, seed) for seed in (0, 1)), strict=True)
    for number, (text, other) in enumerate(texts):
        words, is_own = text.split(), bool(number % 2)
        prompt, chosen = " ".join(words[:half]), " ".join(words[half:])
        rejected = " ".join(other.split()[half:])
        second, answer = (text, chosen) if is_own else (other, rejected)
        rows: dict[str, dict[str, Any]] = {
            "text": {"text": text},
            "instruction": {"instruction": prompt, "output": chosen},
            "pairs": {"sentence1": text, "sentence2": second, "label": int(is_own)},
            "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
            "prompts": {"prompt": " ".join(words[:8])},
            "unpaired": {"prompt": prompt, "completion": answer, "label": is_own},
        }
        for name, row in rows.items():
            lines[name].append(json.dumps(row) + "\n")
    for name, written in lines.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "train.jsonl").write_text("".join(written), encoding="utf-8")
