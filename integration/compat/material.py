"""Tiny untrained models and local data, for all programs of the pack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>")
WORDS = 506
VOCABULARY = len(SPECIAL) + WORDS
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CHAT = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> "
    "{% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def save_models(root: Path, *, layers: int, width: int) -> None:
    """Write a folder with tokenizer per model: llama, gpt2, bert, roberta, t5, vit."""
    heads = 4
    of_encoder: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 2 * width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    of_words: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    made = {
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 2,
                max_position_embeddings=256,
                **IDS,
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=256,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **IDS,
            )
        ),
        "bert": lambda: BertForSequenceClassification(BertConfig(**of_encoder, **of_words)),
        "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**of_encoder, **of_words)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=width,
                d_kv=width // heads,
                d_ff=2 * width,
                num_layers=layers,
                num_heads=heads,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                eos_token_id=2,
                pad_token_id=0,
            )
        ),
        "vit": lambda: ViTForImageClassification(
            ViTConfig(**of_encoder, image_size=32, patch_size=8, num_labels=10)
        ),
    }
    tokenizer = make_tokenizer()
    for name, make in made.items():
        torch.manual_seed(0)
        make().save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per word; the words are w0, w1, ..., and those of chats."""
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
    """Walks through the words, each by a step of its own."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 100, (count, 1), generator=generator)
    step = torch.randint(1, 5, (count, 1), generator=generator)
    walks = (start + step * torch.arange(length)) % 100
    return [" ".join(f"w{word}" for word in walk) for walk in walks.tolist()]


def save_data(root: Path) -> None:
    """Write JSON lines: text, instruction, pairs (of sentences), translation, preference, chats."""
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
