"""Hugging Face models under zero.Init have the values that they have without, and no rank all."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import spawn

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
GPT2 = {"n_layer": 2, "n_embd": 36, "n_head": 3, "vocab_size": 101, "n_positions": 17}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "vocab_size": 53, "tie_word_embeddings": False}
T5 = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3, "vocab_size": 53}
T5 |= {"decoder_start_token_id": 0}
WAV2VEC2 = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WAV2VEC2 |= {"intermediate_size": 20, "num_conv_pos_embeddings": 4, "conv_dim": (8,)}
WAV2VEC2 |= {"num_conv_pos_embedding_groups": 2, "conv_stride": (5,), "conv_kernel": (10,)}

Make = Callable[[], torch.nn.Module]


def _serve_deepspeed() -> None:
    """What ``zero-engine run`` does for a process; before transformers is imported."""
    from zero_engine.script.hook import ON_PATH, install

    sys.path.insert(0, str(ON_PATH))
    install()
    # transformers asks once, at import, whether there is a deepspeed; the ranks' server had none.
    module = sys.modules.get("transformers.integrations.deepspeed")
    if module is not None:
        importlib.reload(module)


def _flows(folder: Path) -> dict[str, Make]:
    """What scripts do before there is an engine, by name; the same code with and without it."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    def load_with_a_new_head() -> torch.nn.Module:
        return hf.AutoModelForSequenceClassification.from_pretrained(folder / "gpt2", num_labels=3)

    def load_low() -> torch.nn.Module:
        return hf.LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)

    def resize(kind: str, number: int) -> torch.nn.Module:
        model = hf.AutoModelForCausalLM.from_pretrained(folder / kind)
        model.resize_token_embeddings(number)
        return model

    def adapt(**options: Any) -> torch.nn.Module:
        model = hf.AutoModelForCausalLM.from_pretrained(folder / "llama")
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options)
        return get_peft_model(model, lora)

    return {
        "load gpt2": lambda: hf.AutoModelForCausalLM.from_pretrained(folder / "gpt2"),
        "load t5": lambda: hf.AutoModelForSeq2SeqLM.from_pretrained(folder / "t5"),
        # Normalises a weight in its constructor, within a gather of its own.
        "load wav2vec2": lambda: hf.Wav2Vec2Model.from_pretrained(folder / "wav2vec2"),
        "load with a new head": load_with_a_new_head,
        "load in bf16": load_low,
        "add tokens": lambda: resize("gpt2", 107),
        "remove tokens": lambda: resize("llama", 49),
        "adapt": lambda: adapt(modules_to_save=["lm_head"]),
        "adapt by the weights' own directions": lambda: adapt(init_lora_weights="pissa"),
        "adapt magnitudes": lambda: adapt(use_dora=True),
    }


def _seeded(make: Make) -> torch.nn.Module:
    torch.manual_seed(11)
    return make()


def _build(name: str, expected: torch.nn.Module, model: torch.nn.Module) -> zero_core.Engine:
    """An engine of ``model``, whose values must be those of ``expected``."""
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    engine = zero_core.build(model, CORE)
    found = engine.full_state_dict()
    for key, value in expected.state_dict().items():
        assert found[key].dtype == value.dtype, (name, key)
        assert torch.equal(found[key], value), (name, key)
    buffers = dict(model.named_buffers())
    for key, buffer in expected.named_buffers():
        assert torch.equal(buffers[key], buffer), (name, key)
    return engine


def _check_loss(name: str, expected: torch.nn.Module, engine: zero_core.Engine) -> None:
    ids = torch.arange(8)[None]
    labels = ids[:, 0] % 3 if name == "load with a new head" else ids
    inputs = {"input_ids": ids, "labels": labels}
    expected.eval()
    engine.eval()
    assert engine(**inputs).loss.item() == expected(**inputs).loss.item(), name


def _construct(kind: str) -> tuple[Make, Make]:
    """A model from its configuration: as under zero.Init, and as transformers does without."""
    import transformers as hf
    from transformers.initialization import no_init_weights

    auto, config = {
        "gpt2": (hf.AutoModelForCausalLM, hf.GPT2Config(**GPT2)),
        "llama": (hf.AutoModelForCausalLM, hf.LlamaConfig(**LLAMA)),
        "t5": (hf.AutoModelForSeq2SeqLM, hf.T5Config(**T5)),
    }[kind]

    def make_whole() -> torch.nn.Module:
        with no_init_weights():  # else modules draw values first that nobody gets
            model = auto.from_config(config)
        model.initialize_weights()
        model.tie_weights()
        return model

    return lambda: auto.from_config(config), make_whole


def _compare(rank: int, world_size: int, folder: str) -> None:
    _serve_deepspeed()
    import deepspeed
    import transformers as hf
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    made = {kind: _construct(kind) for kind in ("gpt2", "llama", "t5")}
    whole = {kind: _seeded(make_whole) for kind, (_, make_whole) in made.items()}
    if rank == 0:
        whole_speech = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**WAV2VEC2))
        for kind, model in {**whole, "wav2vec2": whole_speech}.items():
            model.save_pretrained(Path(folder) / kind)
    if world_size > 1:
        torch.distributed.barrier()
    expected = {name: _seeded(make) for name, make in _flows(Path(folder)).items()}

    keep = HfDeepSpeedConfig(DEEPSPEED)
    assert is_deepspeed_zero3_enabled()
    for kind, (make, _) in made.items():
        model = _seeded(make)
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        _build(kind, whole[kind], model).close()
    for name, make in _flows(Path(folder)).items():
        engine = _build(name, expected[name], _seeded(make))
        if name != "load wav2vec2":  # which has no loss
            _check_loss(name, expected[name], engine)
        engine.close()
    with deepspeed.zero.Init():  # the script's own, around that of transformers
        model = _flows(Path(folder))["load gpt2"]()
    _build("load within", expected["load gpt2"], model).close()
    del keep


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_values_are_those_of_the_same_flow_without(tmp_path: Path, world_size: int) -> None:
    spawn(_compare, world_size, str(tmp_path))


LARGE = {**GPT2, "n_layer": 20, "n_embd": 256, "n_head": 2}
BLOCK_BYTES = 4 * (12 * 256**2 + 13 * 256)
MODEL_BYTES = 20 * BLOCK_BYTES  # 63 MB, embeddings aside
SLACK_BYTES = 10 * 1024**2  # what the process does besides: messages between ranks
M_MMAP_THRESHOLD = -3  # of malloc.h


def _own_bytes() -> int:
    """Resident memory of this process without the files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(found[key].split()[0]) for key in ("RssAnon", "RssShmem"))


class _Peak:
    """Within, how far the process's own memory rises; files that it maps are not counted."""

    def __enter__(self) -> _Peak:
        gc.collect()  # a model before, which is in cycles, would make room meanwhile
        self._before = self._highest = _own_bytes()
        self._has_ended = Event()
        self._watcher = Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._watcher.join()
        self.nbytes = max(self._highest, _own_bytes()) - self._before

    def _watch(self) -> None:
        while not self._has_ended.wait(0.001):
            self._highest = max(self._highest, _own_bytes())


def _measure(rank: int, world_size: int, folder: str) -> None:
    _serve_deepspeed()
    import transformers as hf
    from transformers.integrations import HfDeepSpeedConfig

    # glibc returns what was freed from this size on, so that the peak has no fragments in it.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024) == 1
    small, large = Path(folder) / "small", Path(folder) / "large"
    if rank == 0:
        hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)).save_pretrained(small)
        hf.GPT2LMHeadModel(hf.GPT2Config(**LARGE)).save_pretrained(large, max_shard_size="20MB")
    torch.distributed.barrier()
    keep = HfDeepSpeedConfig(DEEPSPEED)
    config = hf.GPT2Config(**LARGE)
    flows: dict[str, tuple[Make, Make]] = {
        "construct": (
            lambda: hf.AutoModelForCausalLM.from_config(hf.GPT2Config(**GPT2)),
            lambda: hf.AutoModelForCausalLM.from_config(config),
        ),
        "load": (
            lambda: hf.AutoModelForCausalLM.from_pretrained(small),
            lambda: hf.AutoModelForCausalLM.from_pretrained(large),
        ),
    }
    # transformers gathers what a module and its children have, to initialize it.
    bound = MODEL_BYTES / world_size + 2 * BLOCK_BYTES + SLACK_BYTES
    assert bound < MODEL_BYTES * 2 / 3, "a whole model would be seen"
    for name, (make_small, make) in flows.items():
        zero_core.build(make_small(), CORE).close()  # what is allocated at first use is there
        with _Peak() as peak:
            model = make()
        assert peak.nbytes > MODEL_BYTES / world_size * 0.9, "the measurement sees what is there"
        assert peak.nbytes < bound, (name, rank, peak.nbytes, bound)
        with _Peak() as peak:  # while what was sharded before is taken over
            engine = zero_core.build(model, CORE)
        assert peak.nbytes < bound - MODEL_BYTES / world_size, (name, rank, peak.nbytes)
        engine.close()
        del engine, model
    del keep


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets glibc's allocator")
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    spawn(_measure, 3, str(tmp_path))
