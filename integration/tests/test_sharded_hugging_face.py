"""Hugging Face models under zero.Init: equal values, and no rank that holds them all."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from tests.support.lm_models import lm_config
from zero_core.testing import OwnPeakMemory, spawn

# As Trainer hands it over: with values that are still open.
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
    """Serve the deepspeed modules in this process, as ``zero-engine run`` does."""
    from zero_engine.script.hook import ON_PATH, install

    sys.path.insert(0, str(ON_PATH))
    install()
    # transformers asks once, at import, whether there is a deepspeed; the ranks' server had none.
    module = sys.modules.get("transformers.integrations.deepspeed")
    if module is not None:
        importlib.reload(module)


def _constructed(kind: str) -> nn.Module:
    import transformers as hf

    auto = hf.AutoModelForSeq2SeqLM if kind == "t5" else hf.AutoModelForCausalLM
    model: nn.Module = auto.from_config(lm_config(kind))
    return model


def _flows(folder: Path) -> dict[str, Make]:
    """Return ways in which scripts make a model before there is an engine.

    The same code runs with and without zero.Init.
    """
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
        # Normalises a weight in its constructor, within a gather of its own.
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
    """Build an engine of ``model``, and compare it with ``expected``."""
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
        with no_init_weights():  # else modules draw values first that nobody gets
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
    with deepspeed.zero.Init():  # the script's own, around that of transformers
        model = flows["load gpt2"]()
    _check("load within", expected["load gpt2"], model, has_loss=False)
    del keep


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_values_are_those_of_the_same_flow_without(tmp_path: Path, world_size: int) -> None:
    spawn(_compare, world_size, tmp_path)


DEPTH, WIDTH = 20, 256
BLOCK_BYTES = 4 * (12 * WIDTH**2 + 13 * WIDTH)
MODEL_BYTES = DEPTH * BLOCK_BYTES  # 63 MB, embeddings aside
SLACK_BYTES = 10 * 1024**2  # what the process does besides: messages between ranks
M_MMAP_THRESHOLD = -3  # of malloc.h


def _measure(rank: int, world_size: int, folder: Path) -> None:
    _serve_deepspeed()
    import transformers as hf
    from transformers.integrations import HfDeepSpeedConfig

    # glibc returns what was freed from this size on, so that the peak has no fragments in it.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024) == 1
    large = lm_config("gpt2", n_layer=DEPTH, n_embd=WIDTH)
    sizes = {"small": lm_config("gpt2"), "large": large}
    if rank == 0:
        for name, config in sizes.items():
            hf.GPT2LMHeadModel(config).save_pretrained(folder / name, max_shard_size="20MB")
    torch.distributed.barrier()
    keep = HfDeepSpeedConfig(DEEPSPEED)
    auto = hf.AutoModelForCausalLM
    # transformers gathers what a module and its children have, to initialize it.
    bound = MODEL_BYTES / world_size + 2 * BLOCK_BYTES + SLACK_BYTES
    assert bound < MODEL_BYTES * 2 / 3, "a whole model would be seen"
    for make in (
        lambda name: auto.from_config(sizes[name]),
        lambda name: auto.from_pretrained(folder / name),
    ):
        zero_core.build(make("small"), CORE).close()  # what is allocated at first use is there
        with OwnPeakMemory() as peak:
            model = make("large")
        assert peak.nbytes > MODEL_BYTES / world_size * 0.9, "the measurement sees what is there"
        assert peak.nbytes < bound, (rank, peak.nbytes, bound)
        with OwnPeakMemory() as peak:  # while what was sharded before is taken over
            engine = zero_core.build(model, CORE)
        assert peak.nbytes < bound - MODEL_BYTES / world_size, (rank, peak.nbytes)
        engine.close()
        del engine, model
    del keep


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets glibc's allocator")
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    spawn(_measure, 3, tmp_path)
