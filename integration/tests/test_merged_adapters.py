"""Merged adapters, exported one unit at a time with the values that peft merges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import zero_core
from tests.support.lm_models import make_lm
from zero_core import CheckpointError, ConfigError
from zero_core.testing import Case, PeakMemory, SimulatedRanks, seeded, simulate, spawn
from zero_core.testing.quantized import WrappedCodes
from zero_engine.hf.merged import export_merged

Make = Callable[[], peft.PeftModel]


def _adapted(base: nn.Module, kind: type = peft.LoraConfig, **options: Any) -> peft.PeftModel:
    """Adapt a model with nonzero values, since fresh adapters change nothing."""
    options = {"target_modules": ["q_proj", "down_proj"]} | options
    with seeded(1):
        model = peft.get_peft_model(base, kind(**options))
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(torch.randn_like(param) / 8)
    return model


def _llama() -> Any:
    return make_lm("llama")


def _tied() -> Any:
    return make_lm("llama", tie_word_embeddings=True)


def _quantized(*, is_whole: bool = False) -> Any:
    """Quantize all linear layers but the head.

    ``is_whole`` stores the dequantized values instead.
    """
    base = _llama()
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            codes = WrappedCodes.of(module.weight)
            weight = codes.dequantize() if is_whole else codes
            module.weight = nn.Parameter(weight, requires_grad=False)
    return base


KINDS: dict[str, Make] = {
    "llama": lambda: _adapted(_llama()),
    "bf16": lambda: _adapted(_llama().bfloat16()),
    "DoRA": lambda: _adapted(_llama(), use_dora=True),
    "a trained head": lambda: _adapted(_llama(), modules_to_save=["lm_head"]),
    "a trained head that was tied": lambda: _adapted(_tied(), modules_to_save=["lm_head"]),
    "tied, new tokens": lambda: _adapted(_tied(), trainable_token_indices=[3, 7]),
    "tied, adapted embedding": lambda: _adapted(_tied(), target_modules=["embed_tokens", "v_proj"]),
    "tied, adapted head": lambda: _adapted(_tied(), target_modules=["lm_head"]),
    "gpt2": lambda: _adapted(make_lm("gpt2"), target_modules=["c_attn"], fan_in_fan_out=True),
    "IA3": lambda: _adapted(_llama(), peft.IA3Config, feedforward_modules=["down_proj"]),
    "quantized": lambda: _adapted(_quantized()),
}


def _merged_by_peft(name: str) -> Any:
    if name == "quantized":
        return _adapted(_quantized(is_whole=True)).merge_and_unload()
    model = KINDS[name]()
    # A configuration of bf16 casts adapters, too.
    return (model.bfloat16() if name == "bf16" else model).merge_and_unload()


def _export(
    ranks: SimulatedRanks, folder: Path, models: dict[str, list[peft.PeftModel]], stage: int
) -> None:
    for name, model in models.items():
        low = "bf16" if name == "bf16" else "fp32"
        engine = zero_core.build(model[ranks.rank], Case(stage, low).config(), process_group=ranks)
        before = {} if name == "quantized" else engine.full_state_dict()
        export_merged(engine.module, folder / name)
        for key, value in (engine.full_state_dict() if before else {}).items():
            assert torch.equal(before[key], value), name


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 1)])
def test_merged_values_are_those_of_peft(tmp_path: Path, world_size: int, stage: int) -> None:
    models = {name: [make() for _ in range(world_size)] for name, make in KINDS.items()}
    simulate(_export, world_size, tmp_path, models, stage)
    for name in KINDS:
        _merged_by_peft(name).save_pretrained(tmp_path / f"{name} by peft")
        found, expected = (
            dict(AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict())
            for folder in (name, f"{name} by peft")
        )
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, msg=name)


def test_the_weights_type_and_the_adapters_can_be_chosen(tmp_path: Path) -> None:
    def make() -> peft.PeftModel:
        model = _adapted(_llama())
        with seeded(2):
            model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False))
        return model

    model, expected = make(), make().merge_and_unload(adapter_names=["other"])
    engine = zero_core.build(model, Case(0).config())
    export_merged(engine.module, tmp_path, adapter_names=["other"], dtype=torch.float16)
    found = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(found, dict(expected.half().state_dict()), rtol=0.0, atol=0.0)


def _prompted() -> peft.PeftModel:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(_llama(), config)


def _stored_in_8_bits() -> peft.PeftModel:
    base = _llama()
    attention = base.model.layers[1].self_attn
    codes = attention.v_proj.weight.to(torch.float8_e4m3fn)
    attention.v_proj.weight = nn.Parameter(codes, requires_grad=False)
    return _adapted(base)


@pytest.mark.parametrize(
    ("make", "is_built", "message"),
    [
        (KINDS["llama"], False, "no engine has this model's parameters"),
        (_llama, False, "was given a LlamaForCausalLM of"),
        (_prompted, False, r"was given a PeftModel\w* of LlamaForCausalLM"),
        (_stored_in_8_bits, True, r"layers\.1\.self_attn\.v_proj\.weight is stored as"),
        (
            lambda: _adapted(_quantized(), peft.IA3Config, feedforward_modules=["down_proj"]),
            True,
            "adapted by Linear: on quantized weights LoRA alone",
        ),
        (
            lambda: _adapted(_tied(), target_modules=["embed_tokens", "lm_head"]),
            True,
            r"model\.embed_tokens and lm_head have one tied weight",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, make, is_built, message):
    model = make()
    engine = zero_core.build(model, Case(0).config()) if is_built else None
    with pytest.raises(ConfigError, match=message):
        export_merged(engine.module if engine else model, tmp_path)
    assert not list(tmp_path.iterdir())


def _export_to_a_file(ranks: SimulatedRanks, path: Path, models: list[peft.PeftModel]) -> None:
    engine = zero_core.build(models[ranks.rank], Case(3).config(), process_group=ranks)
    with pytest.raises(CheckpointError, match=r"export_merged\(\) failed on rank 0: .*taken"):
        export_merged(engine.module, path)


def test_every_rank_hears_of_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    simulate(_export_to_a_file, 2, tmp_path / "taken", [_adapted(_llama()) for _ in range(2)])


def _measure(rank: int, world_size: int, folder: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024}
    for depth in (1, 20):  # the small one first: what torch and peft allocate when first used
        model = _adapted(make_lm("llama", **sizes, num_hidden_layers=depth))
        largest = sum(p.nbytes for p in model.get_base_model().model.layers[0].parameters())
        whole = sum(p.nbytes for p in model.parameters())
        engine = zero_core.build(model, Case(3).config())
        engine.idle_forward()  # pages that ranks share count for each, once it has read them
        with PeakMemory() as peak:
            export_merged(engine.module, folder / str(depth))
        engine.unwrap().to("meta")
    bound = 3 * largest + 8 * 1024**2  # threads, messages, the allocator's fragments
    assert bound < whole / 2, "half a model would be seen"
    assert peak.nbytes <= bound, (rank, peak.nbytes, bound)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_no_rank_holds_more_than_a_few_units_besides_its_shards(tmp_path: Path) -> None:
    spawn(_measure, 2, tmp_path)
