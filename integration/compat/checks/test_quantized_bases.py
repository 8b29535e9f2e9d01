"""Quantized weights of bitsandbytes and torchao: training as with DDP, and merging of adapters.

Adapters are merged into the dequantized weights. torchao's float8 linears are trained, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import torchao.quantization as ao
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

import zero_core
from zero_core.testing import Case, SimulatedRanks, rows, seeded, simulate, train, train_ddp
from zero_engine.hf.merged import export_merged

WIDTH = 128
STEPS = 2
OFFLOADED = {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
PLACES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 3, OFFLOADED),
    (2, 0, {}),
    (2, 1, {}),
    (2, 2, {}),
    (2, 3, {}),
    (2, 3, OFFLOADED),
    (3, 3, {}),
]


def _nf4(*, nested: bool, storage: torch.dtype) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear4bit(
            WIDTH,
            WIDTH,
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_type="nf4",
            quant_storage=storage,
        )
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")

    return quantized


def _int8(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def _torchao(config: Any) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        holder = nn.Sequential(linear)
        ao.quantize_(holder, config)
        return holder[0]

    return quantized


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nf4": _nf4(nested=False, storage=torch.uint8),
    "nf4, nested, stored as bf16": _nf4(nested=True, storage=torch.bfloat16),
    "LLM.int8": _int8,
    "torchao int8": _torchao(ao.Int8WeightOnlyConfig()),
    "torchao float8": _torchao(ao.Float8WeightOnlyConfig()),
    "torchao int4": _torchao(ao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
}


class _Block(nn.Module):
    def __init__(self, quantized: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.first = quantized(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        self.last = quantized(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) + self.up(self.down(x)))
        total: Tensor = x + self.last(y)
        return total


class _Adapted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList(_Block(KINDS[kind]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def _raw(value: Tensor) -> list[Tensor]:
    """Return the bytes of a tensor, or of the tensors that a subclass wraps."""
    inner = getattr(value, "__tensor_flatten__", None)
    if inner is None:
        return [value.detach().contiguous().view(-1).view(torch.uint8)]
    return [raw for name in inner()[0] for raw in _raw(getattr(value, name))]


def _follow(
    ranks: SimulatedRanks, make: Callable[[], nn.Module], stage: int, zero: dict[str, Any]
) -> None:
    plain, batches = make(), [(rows(step, ranks.rank, WIDTH),) for step in range(STEPS)]
    losses = train_ddp(plain, ranks, batches)
    values = [p for p in plain.parameters() if p.requires_grad]
    engine = Case(stage, zero=zero).build(ranks, make())
    assert train(engine, batches) == losses
    with engine.gathered():
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        for mine, expected in zip(trained, values, strict=True):
            assert torch.equal(mine, expected)
    saved, expected_dict = engine.full_state_dict(), make().state_dict()
    assert list(saved) == list(expected_dict)
    frozen = {n for n in saved if not n.endswith(("up.weight", "down.weight"))}
    for name in frozen if len(trained) < len(saved) else ():
        for mine, theirs in zip(_raw(saved[name]), _raw(expected_dict[name]), strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_librarys_weights_follow_ddp(kind: str, place: Any) -> None:
    world_size, stage, zero = place
    simulate(_follow, world_size, lambda: _Adapted(kind), stage, zero)


def _evaluate(ranks: SimulatedRanks) -> None:
    """Alternate evaluation and training. bitsandbytes repacks weights to evaluate on some CPUs."""
    expected = _Adapted("nf4").eval()
    engine, x = Case(3).build(ranks, _Adapted("nf4")), rows(0, 0, WIDTH)
    for _ in range(2):
        engine.eval()
        with torch.no_grad():
            assert engine(x).item() == expected(x).item()
        loss = engine.train()(x)
        assert loss.item() == _Adapted("nf4")(x).item()
        engine.backward(loss)


def test_evaluation_between_steps_leaves_4_bit_weights_as_they_are() -> None:
    simulate(_evaluate, 2)


def _float8() -> nn.Module:
    with seeded(0):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), _MeanSquare())
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


class _MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_float8_linears_follow_ddp_with_the_same_conversion(world_size: int, stage: int) -> None:
    simulate(_follow, world_size, _float8, stage, {})


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 53}
BASES: dict[str, Callable[[], Any]] = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, nested, stored as bf16": lambda: BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "LLM.int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao float8": lambda: TorchAoConfig(ao.Float8WeightOnlyConfig()),
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
        folder, quantization_config=BASES[kind](), dtype=torch.float32, device_map="cpu"
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
    ("kind", "use_dora"), [*((kind, False) for kind in BASES), *((kind, True) for kind in DORA)]
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
