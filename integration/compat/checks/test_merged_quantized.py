"""Adapters on quantized bases (bitsandbytes, torchao) are merged into dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

import zero_core
from zero_core.testing import Case, SimulatedRanks, seeded, simulate
from zero_engine.hf.merged import export_merged

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 53}
KINDS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, nested, stored as bf16": lambda: BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "LLM.int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao float8": lambda: TorchAoConfig(Float8WeightOnlyConfig()),
}

DORA = ("nf4", "nf4, nested, stored as bf16")
"""Kinds of base weights for which peft has DoRA."""


def _adapted(base: nn.Module, *, use_dora: bool) -> nn.Module:
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, use_dora=use_dora)
    with seeded(1):
        model = peft.get_peft_model(base, config)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(torch.randn_like(param) / 8)
    return model


def _quantized(folder: Path, kind: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=KINDS[kind](), dtype=torch.float32, device_map="cpu"
    )


def _dequantized(model: nn.Module, plain: nn.Module) -> nn.Module:
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            is_weight = isinstance(module, nn.Linear) and name == "weight"
            value = dequantize_module_weight(module) if is_weight else param
            plain.get_submodule(path).get_parameter(name).data = value.data.float().clone()
    return plain


def _export(ranks: SimulatedRanks, folder: Path, models: list[nn.Module], stage: int) -> None:
    engine = zero_core.build(models[ranks.rank], Case(stage).config(), process_group=ranks)
    ids = torch.arange(5)[None]
    engine.backward(
        engine(input_ids=ids, labels=ids).loss
    )  # LLM.int8 moves its scales to the module in the first forward
    export_merged(engine.module, folder)


@pytest.mark.parametrize(
    ("kind", "use_dora"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in DORA)]
)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3)])
def test_a_librarys_base_is_merged_as_plain_weights(tmp_path, kind, use_dora, world_size, stage):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    with seeded(0):
        LlamaForCausalLM(LlamaConfig(**SIZES, **heads)).save_pretrained(tmp_path / "base")
    models = [
        _adapted(_quantized(tmp_path / "base", kind), use_dora=use_dora) for _ in range(world_size)
    ]
    simulate(_export, world_size, tmp_path / "merged", models, stage)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = _adapted(_dequantized(_quantized(tmp_path / "base", kind), plain), use_dora=use_dora)
    values: dict[str, Tensor] = expected.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(found.config, "quantization_config")
    assert found.state_dict().keys() == values.keys()
    for key, value in found.state_dict().items():
        assert torch.equal(value, values[key]), key
