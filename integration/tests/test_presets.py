"""Runs of the printed example configurations and of the documentation's Python code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_here

import zero_core
from tests.support.doc_blocks import SKILL, Block, find_blocks, run_example
from zero_core.config import Config, load_config
from zero_core.config.json_schema import SCHEMA_FILE
from zero_core.testing import run_alone, spawn
from zero_engine.presets import EXAMPLES


def _train_all(rank: int, world_size: int, examples: dict[str, Any], folder: str) -> None:
    losses = {}
    for name, config in examples.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        engine = zero_core.build(model, config)
        batch = torch.ones(config["train_micro_batch_size_per_gpu"], 16)
        losses[name] = []
        for _ in range(2):
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
        engine.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(losses), encoding="utf-8")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return two losses of each example, on two nodes of one rank each."""
    folder = tmp_path_factory.mktemp("losses")
    printed = {name: run_here("config", "--example", name) for name in EXAMPLES}
    examples = {
        name: json.loads(text.replace("/local_nvme", str(folder))) for name, text in printed.items()
    }
    spawn(_train_all, 2, examples, str(folder), ranks_per_node=1)
    found: dict[str, list[float]] = json.loads((folder / "0.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_trains_as_it_is_printed(name: str, losses: dict[str, list[float]]) -> None:
    first, second = losses[name]
    assert second < first
    # Host and device differ in the last bit. Quantization changes more.
    tolerance = 0.05 if name in ("stage3-zeropp", "tour") else 0.01
    assert losses[name] == pytest.approx(losses["stage3"], rel=tolerance)


def test_the_schema_is_printed() -> None:
    assert run_here("config", "--schema") == SCHEMA_FILE.read_text(encoding="utf-8")


OWN = ("cpu-adam", "zero-comm", "zero-core", "zero-offload")
"""Packages whose own tests run their READMEs."""
BLOCKS = [
    block
    for block in find_blocks("python")
    if block.page.parent.name not in OWN and not block.needs_further
]


def test_the_skill_names_keys_that_exist() -> None:
    lines = re.findall(r'`("[^`]+: [^`]+)`', SKILL.read_text(encoding="utf-8"))
    blocks = [b.text.strip()[1:-1] for b in find_blocks("json") if b.page == SKILL]
    for text in (*lines, *blocks):
        keys = json.loads(f"{{{text}}}")
        is_whole = keys.keys() <= Config.model_fields.keys()
        config = keys if is_whole else {"zero_optimization": {"stage": 3, **keys}}
        load_config({"train_micro_batch_size_per_gpu": 1, **config}, world_size=1)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    run_alone(run_example, block, tmp_path)
