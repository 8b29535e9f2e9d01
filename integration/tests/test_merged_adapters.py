"""Merged adapters are exported one unit at a time, with the values that peft merges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers import LlamaForCausalLM as Llama

import zero_core
from zero_core import CheckpointError, ConfigError
from zero_core.testing import Case, PeakMemory, SimulatedRanks, seeded, simulate, spawn
from zero_core.testing.quantized import WrappedCodes
from zero_engine.hf.merged import export_merged

LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"n_layer": 2, "n_embd": 24, "n_head": 2, "vocab_size": 53, "n_positions": 16}


def _llama(*, is_tied: bool = False, **sizes: Any) -> Llama:
    with seeded(0):
        return Llama(LlamaConfig(**LLAMA | sizes, tie_word_embeddings=is_tied))


def _gpt2() -> GPT2LMHeadModel:
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with seeded(0):
        return GPT2LMHeadModel(GPT2Config(**GPT2, **ends))


def _adapted(base: nn.Module, kind: type = peft.LoraConfig, **options: Any) -> peft.PeftModel:
    """Adapters whose values are not those of a fresh one, which change nothing."""
    options = {"target_modules": ["q_proj", "down_proj"]} | options
    with seeded(1):
        model = peft.get_peft_model(base, kind(**options))
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(torch.randn_like(param) / 8)
    return model


def _reserved(base: nn.Module) -> nn.Module:
    """Quantize the linear maps, adapted or not, but the head: a subclass in each weight."""
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            codes = WrappedCodes.of(module.weight)
            module.weight = nn.Parameter(codes, requires_grad=False)
    return base


def _dequantized(base: nn.Module) -> nn.Module:
    for module in base.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, WrappedCodes):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return base


LORA = {"r": 4}
KINDS: dict[str, Callable[[], peft.PeftModel]] = {
    "llama": lambda: _adapted(_llama(), **LORA),
    "bf16": lambda: _adapted(_llama().bfloat16(), **LORA),
    "DoRA": lambda: _adapted(_llama(), use_dora=True, **LORA),
    "a trained head": lambda: _adapted(_llama(), modules_to_save=["lm_head"], **LORA),
    "a trained head that was tied": lambda: _adapted(
        _llama(is_tied=True), modules_to_save=["lm_head"], **LORA
    ),
    "tied, new tokens": lambda: _adapted(
        _llama(is_tied=True), trainable_token_indices=[3, 7], **LORA
    ),
    "tied, adapted embedding": lambda: _adapted(
        _llama(is_tied=True), target_modules=["embed_tokens", "v_proj"], **LORA
    ),
    "tied, adapted head": lambda: _adapted(
        _llama(is_tied=True), target_modules=["lm_head"], **LORA
    ),
    "gpt2": lambda: _adapted(_gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, **LORA),
    "IA3": lambda: _adapted(_llama(), peft.IA3Config, feedforward_modules=["down_proj"]),
}


def _merge_whole(model: peft.PeftModel, folder: Path) -> None:
    model.merge_and_unload().save_pretrained(folder)


def _loaded(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def _export(
    ranks: SimulatedRanks, folder: Path, models: dict[str, list[peft.PeftModel]], stage: int
) -> None:
    for name, model in models.items():
        low = "bf16" if name == "bf16" else "fp32"
        engine = zero_core.build(model[ranks.rank], Case(stage, low).config(), process_group=ranks)
        before = engine.full_state_dict()
        export_merged(engine.module, folder / name)
        after = engine.full_state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items()), name


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 1)])
def test_merged_values_are_those_of_peft(tmp_path: Path, world_size: int, stage: int) -> None:
    models = {name: [make() for _ in range(world_size)] for name, make in KINDS.items()}
    simulate(_export, world_size, tmp_path / "ours", models, stage)
    for name, make in KINDS.items():
        model = make()
        if name == "bf16":  # a configuration of bf16 casts adapters, too
            model = model.bfloat16()
        _merge_whole(model, tmp_path / "theirs" / name)
        found, expected = _loaded(tmp_path / "ours" / name), _loaded(tmp_path / "theirs" / name)
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, (name, key)
            assert torch.equal(found[key], value), (name, key)


def _export_quantized(ranks: SimulatedRanks, folder: Path, models: list[peft.PeftModel]) -> None:
    engine = zero_core.build(models[ranks.rank], Case(3).config(), process_group=ranks)
    export_merged(engine.module, folder)


def test_a_quantized_base_is_written_as_plain_weights(tmp_path: Path) -> None:
    """As if the adapters were merged into the dequantized model."""
    models = [_adapted(_reserved(_llama()), **LORA) for _ in range(2)]
    simulate(_export_quantized, 2, tmp_path / "ours", models)
    _merge_whole(_adapted(_dequantized(_reserved(_llama())), **LORA), tmp_path / "theirs")
    found, expected = _loaded(tmp_path / "ours"), _loaded(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_weights_type_and_the_adapters_can_be_chosen(tmp_path: Path) -> None:
    def make() -> peft.PeftModel:
        model = _adapted(_llama(), **LORA)
        with seeded(2):
            model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False))
        return model

    model, expected = make(), make().merge_and_unload(adapter_names=["other"])
    engine = zero_core.build(model, Case(0).config())
    export_merged(engine.module, tmp_path, adapter_names=["other"], dtype=torch.float16)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(found[key], value.half()), key


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine has this model's parameters"):
        export_merged(_adapted(_llama(), **LORA), tmp_path)
    with pytest.raises(ConfigError, match="was given a LlamaForCausalLM of"):
        export_merged(_llama(), tmp_path)
    prompted = peft.get_peft_model(
        _llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ConfigError, match=r"was given a PeftModel\w* of LlamaForCausalLM"):
        export_merged(prompted, tmp_path)
    base = _llama()
    codes = base.model.layers[1].self_attn.v_proj.weight.to(torch.float8_e4m3fn)
    base.model.layers[1].self_attn.v_proj.weight = nn.Parameter(codes, requires_grad=False)
    stored = _adapted(base, **LORA)
    engine = zero_core.build(stored, Case(0).config())
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_proj\.weight is stored as"):
        export_merged(engine.module, tmp_path)
    quantized = _adapted(_reserved(_llama()), peft.IA3Config, feedforward_modules=["down_proj"])
    engine = zero_core.build(quantized, Case(0).config())
    with pytest.raises(ConfigError, match="adapted by Linear: on quantized weights LoRA alone"):
        export_merged(engine.module, tmp_path)
    twice = _adapted(_llama(is_tied=True), target_modules=["embed_tokens", "lm_head"], **LORA)
    engine = zero_core.build(twice, Case(0).config())
    with pytest.raises(ConfigError, match=r"model\.embed_tokens and lm_head have one tied weight"):
        export_merged(engine.module, tmp_path)
    assert not list(tmp_path.iterdir())


def _export_to_a_file(ranks: SimulatedRanks, path: Path, models: list[peft.PeftModel]) -> None:
    engine = zero_core.build(models[ranks.rank], Case(3).config(), process_group=ranks)
    with pytest.raises(CheckpointError, match=r"export_merged\(\) failed on rank 0: .*taken"):
        export_merged(engine.module, path)


def test_every_rank_hears_of_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    models = [_adapted(_llama(), **LORA) for _ in range(2)]
    simulate(_export_to_a_file, 2, tmp_path / "taken", models)


DEPTH, WIDTH = 20, 256


def _measure(rank: int, world_size: int, folder: str) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": DEPTH}
    for depth in (1, DEPTH):  # the small one first: what torch and peft allocate when first used
        model = _adapted(_llama(**sizes | {"num_hidden_layers": depth}), **LORA)
        largest = sum(p.nbytes for p in model.get_base_model().model.layers[0].parameters())
        whole = sum(p.nbytes for p in model.parameters())
        engine = zero_core.build(model, Case(3).config())
        engine.idle_forward()  # pages that ranks share count for each, once it has read them
        with PeakMemory() as peak:
            export_merged(engine.module, f"{folder}/{depth}")
        engine.unwrap().to("meta")
    bound = 3 * largest + 8 * 1024**2  # threads, messages, the allocator's fragments
    assert bound < whole / 2, "half a model would be seen"
    assert peak.nbytes <= bound, (rank, peak.nbytes, bound)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_no_rank_holds_more_than_a_few_units_besides_its_shards(tmp_path: Path) -> None:
    spawn(_measure, 2, str(tmp_path))
