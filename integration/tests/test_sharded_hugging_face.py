"""Sharded Hugging Face models under zero.Init, and exports with merged adapters."""

from __future__ import annotations

import importlib
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
from tests.support.lm_models import lm_config, make_lm
from zero_core import CheckpointError, ConfigError
from zero_core.testing import Case, PeakMemory, SimulatedRanks, seeded, simulate, spawn
from zero_core.testing.quantized import WrappedCodes
from zero_engine.hf.merged import export_merged

# Trainer passes a config whose values are still "auto".
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}
CORE = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}
WAV2VEC2 = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WAV2VEC2 |= {"intermediate_size": 20, "num_conv_pos_embeddings": 4, "conv_dim": (8,)}
WAV2VEC2 |= {"num_conv_pos_embedding_groups": 2, "conv_stride": (5,), "conv_kernel": (10,)}

Make = Callable[[], nn.Module]


def _serve_deepspeed() -> None:
    from zero_engine.script.hook import ON_PATH, install

    sys.path.insert(0, str(ON_PATH))
    install()
    # The ranks' server imported transformers, which looks for deepspeed only at import.
    module = sys.modules.get("transformers.integrations.deepspeed")
    if module is not None:
        importlib.reload(module)


def _constructed(kind: str) -> nn.Module:
    import transformers as hf

    auto = hf.AutoModelForSeq2SeqLM if kind == "t5" else hf.AutoModelForCausalLM
    model: nn.Module = auto.from_config(lm_config(kind))
    return model


def _flows(folder: Path) -> dict[str, Make]:
    """Return functions that make a model before an engine exists, with and without zero.Init."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    def load(kind: str, cls: Any = hf.AutoModelForCausalLM, **options: Any) -> Any:
        return cls.from_pretrained(folder / kind, **options)

    def resize(kind: str, number: int) -> nn.Module:
        model: nn.Module = load(kind)
        model.resize_token_embeddings(number)
        return model

    def adapt(**options: Any) -> nn.Module:
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options)
        return get_peft_model(load("llama"), lora)

    return {
        "load gpt2": lambda: load("gpt2"),
        "load t5": lambda: load("t5", hf.AutoModelForSeq2SeqLM),
        # The constructor normalises a weight, which it gathers itself.
        "load wav2vec2": lambda: load("wav2vec2", hf.Wav2Vec2Model),
        "load with a new head": lambda: load(
            "gpt2", hf.AutoModelForSequenceClassification, num_labels=3
        ),
        "load in bf16": lambda: load("llama", dtype=torch.bfloat16),
        "add tokens": lambda: resize("gpt2", 67),
        "remove tokens": lambda: resize("llama", 49),
        "adapt": lambda: adapt(modules_to_save=["lm_head"]),
        "adapt by the weights' own directions": lambda: adapt(init_lora_weights="pissa"),
        "adapt magnitudes": lambda: adapt(use_dora=True),
    }


def _seeded(make: Make) -> nn.Module:
    torch.manual_seed(11)
    return make()


def _check(name: str, expected: nn.Module, model: nn.Module, *, has_loss: bool) -> None:
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    engine = zero_core.build(model, CORE)
    found = engine.full_state_dict()
    for key, value in expected.state_dict().items():
        assert found[key].dtype == value.dtype, (name, key)
        assert torch.equal(found[key], value), (name, key)
    buffers = dict(model.named_buffers())
    for key, buffer in expected.named_buffers():
        assert torch.equal(buffers[key], buffer), (name, key)
    if has_loss:
        ids = torch.arange(8)[None]
        labels = ids[:, 0] % 3 if name == "load with a new head" else ids
        inputs = {"input_ids": ids, "labels": labels}
        expected.eval()
        engine.eval()
        assert engine(**inputs).loss.item() == expected(**inputs).loss.item(), name
    engine.close()


def _compare(rank: int, world_size: int, folder: Path) -> None:
    _serve_deepspeed()
    import deepspeed
    import transformers as hf
    from transformers.initialization import no_init_weights
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    def construct_whole(kind: str) -> nn.Module:
        with no_init_weights():  # avoids initialisations that are overwritten later
            model: Any = _constructed(kind)
        model.initialize_weights()
        model.tie_weights()
        return model

    whole = {kind: _seeded(lambda k=kind: construct_whole(k)) for kind in ("gpt2", "llama", "t5")}
    if rank == 0:
        speech = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**WAV2VEC2))
        for kind, model in {**whole, "wav2vec2": speech}.items():
            model.save_pretrained(folder / kind)
    if world_size > 1:
        torch.distributed.barrier()
    flows = _flows(folder)
    expected = {name: _seeded(make) for name, make in flows.items()}

    keep = HfDeepSpeedConfig(DEEPSPEED)
    assert is_deepspeed_zero3_enabled()
    for kind in whole:
        model = _seeded(lambda k=kind: _constructed(k))
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        _check(kind, whole[kind], model, has_loss=False)
    for name, make in flows.items():
        _check(name, expected[name], _seeded(make), has_loss=name != "load wav2vec2")
    with deepspeed.zero.Init():  # the script's context, around transformers' context
        model = flows["load gpt2"]()
    _check("load within", expected["load gpt2"], model, has_loss=False)
    del keep


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_values_are_those_of_the_same_flow_without(tmp_path: Path, world_size: int) -> None:
    spawn(_compare, world_size, tmp_path)


MakeAdapted = Callable[[], peft.PeftModel]


def _adapted(base: nn.Module, kind: type = peft.LoraConfig, **options: Any) -> peft.PeftModel:
    """Add an adapter with nonzero values, since fresh adapters change nothing."""
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
    base = _llama()
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            codes = WrappedCodes.of(module.weight)
            weight = codes.dequantize() if is_whole else codes
            module.weight = nn.Parameter(weight, requires_grad=False)
    return base


KINDS: dict[str, MakeAdapted] = {
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
    # A bf16 configuration casts the adapters too.
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
@pytest.mark.parametrize(
    ("world_size", "stage", "kinds"),
    [(2, 3, [*KINDS]), (3, 1, ["bf16", "a trained head that was tied", "IA3", "quantized"])],
)
def test_merged_values_are_those_of_peft(tmp_path, world_size, stage, kinds):
    models = {name: [KINDS[name]() for _ in range(world_size)] for name in kinds}
    simulate(_export, world_size, tmp_path, models, stage)
    for name in kinds:
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


def _measure_export(rank: int, world_size: int, folder: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024}
    for depth in (1, 20):  # the small model is a warm-up of torch and peft
        model = _adapted(make_lm("llama", **sizes, num_hidden_layers=depth))
        largest = sum(p.nbytes for p in model.get_base_model().model.layers[0].parameters())
        whole = sum(p.nbytes for p in model.parameters())
        engine = zero_core.build(model, Case(3).config())
        engine.idle_forward()  # touches shared pages before the measurement
        with PeakMemory() as peak:
            export_merged(engine.module, folder / str(depth))
        engine.unwrap().to("meta")
    bound = 3 * largest + 8 * 1024**2  # 8 MiB for threads, messages and fragmentation
    assert bound < whole / 2, "half a model would be seen"
    assert peak.nbytes <= bound, (rank, peak.nbytes, bound)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_no_rank_holds_more_than_a_few_units_besides_its_shards(tmp_path: Path) -> None:
    spawn(_measure_export, 2, tmp_path)
