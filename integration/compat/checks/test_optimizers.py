"""Optimizers of torchao, bitsandbytes and transformers train as with DDP.

Their states are quantized in blocks, factored, or kept per parameter. bitsandbytes has CPU kernels
for its 8-bit and 32-bit updates. Its paged optimizers are not paged on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.optim
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing import rows, seeded, spawn, train

STEPS = 3
WIDTH = 72  # 5184 elements are no multiple of 256, so torchao does not quantize this layer's states
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "torchao AdamW8bit": partial(torchao.optim.AdamW8bit, lr=1e-2),
    "torchao AdamW4bit": partial(torchao.optim.AdamW4bit, lr=1e-2),
    "torchao AdamWFp8": partial(torchao.optim.AdamWFp8, lr=1e-2),
    "bitsandbytes AdamW8bit": partial(bitsandbytes.optim.AdamW8bit, lr=1e-2),
    "bitsandbytes PagedAdamW32bit": partial(bitsandbytes.optim.PagedAdamW32bit, lr=1e-2),
    "bitsandbytes Lion8bit": partial(bitsandbytes.optim.Lion8bit, lr=1e-3),
    "bitsandbytes LAMB": partial(bitsandbytes.optim.LAMB, lr=1e-2),
    "transformers Adafactor": partial(
        transformers.Adafactor, lr=1e-2, scale_parameter=False, relative_step=False
    ),
    "transformers Adafactor, own steps": transformers.Adafactor,
}
HOST = {"offload_optimizer": {"device": "cpu"}}


class Blocks(nn.Module):
    """Model with layers that cross shard boundaries and layers too small to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.first = nn.Linear(96, 128)  # 48 blocks of 256 elements
            self.blocks = nn.ModuleList([nn.Linear(128, 128), nn.Linear(128, WIDTH)])
            self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x).square().mean()


def by_ddp(make: Make, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Blocks()
    optimizer = make(model.parameters())
    wrapped = DistributedDataParallel(model)
    for batch in batches:
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()
    return model.state_dict()


def engine_of(make: Make, stage: int, **zero: Any) -> zero_core.Engine:
    model = Blocks()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **zero}}
    return zero_core.build(model, config, optimizer=make(model.parameters()))


def _same_bits(rank: int, world_size: int, names: list[str], folder: str) -> None:
    # Skips torchao's compilation of the update, which takes minutes.
    torch.compiler.set_stance("force_eager")
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    batches = [rows(step, rank, width=96) for step in range(STEPS)]
    for name in names:
        make = OPTIMIZERS[name]
        expected = by_ddp(make, batches)
        start = Blocks().state_dict()
        assert not any(torch.equal(expected[key], value) for key, value in start.items())
        for stage, zero in ((0, {}), (1, {}), (2, HOST), (3, {})):
            engine = engine_of(make, stage, **zero)
            train(engine, batches[:-1])
            place = Path(folder, f"{name}-{stage}")
            engine.save_checkpoint(place)
            engine.close()
            engine = engine_of(make, 3 - stage)
            engine.load_checkpoint(place)
            train(engine, batches[-1:])
            found = engine.full_state_dict()
            for key, value in expected.items():
                gap = float((found[key] - value).abs().max())
                # Three ranks add gradients in another order, and Adam divides by small numbers.
                assert gap <= (0.0 if world_size < 3 else 1e-5), (name, stage, key, gap)
            engine.close()


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes", "transformers"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_update_is_that_of_ddp_at_every_stage_and_after_a_checkpoint(world_size, package, tmp_path):
    names = [name for name in OPTIMIZERS if name.startswith(package)]
    spawn(_same_bits, world_size, names, str(tmp_path))


SCRIPT = Path(__file__).parents[1] / "scripts" / "optim_words.py"
WORDS = (
    *("adafactor", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
    *("paged_adamw_32bit", "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("ademamix", "ademamix_8bit", "rmsprop_bnb_8bit"),
)
STARTERS = {
    "ddp": ("-m", "torch.distributed.run", "--standalone"),
    "zero-engine": ("-m", "zero_engine", "run"),
}


def losses_by_word(starter: str, folder: Path, zero: dict[str, Any] | None) -> dict[str, Any]:
    output = folder / f"{starter}.json"
    arguments = [str(SCRIPT), str(output), ",".join(WORDS), "--use_cpu=true"]
    if zero is not None:
        keys = "train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
        settings = {
            **dict.fromkeys(keys.split(), "auto"),
            "zero_allow_untested_optimizer": True,
            # Otherwise accelerate replaces the optimizer with DeepSpeed's Adam.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }
        config = folder / "deepspeed.json"
        config.write_text(json.dumps(settings))
        arguments.append(f"--deepspeed={config}")
    command = [sys.executable, *STARTERS[starter], "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.fixture(scope="module")
def ddp_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return losses_by_word("ddp", tmp_path_factory.mktemp("ddp"), None)


@pytest.mark.parametrize("zero", [{"stage": 2, **HOST}, {"stage": 3}])
def test_each_word_of_the_trainer_trains_as_with_ddp(zero, ddp_losses, tmp_path):
    found = losses_by_word("zero-engine", tmp_path, zero)
    assert found.keys() == set(WORDS)
    for word, expected in ddp_losses.items():
        assert found[word] == pytest.approx(expected, rel=1e-4), word
        assert expected[-1] < expected[0], word
