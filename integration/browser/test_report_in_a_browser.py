"""A report draws all of its charts in a browser: light and dark, on a desk and on a phone.

``nox -s report`` runs this; it takes Debian's chromium, or what CHROMIUM names.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from chromium import check_page

from zero_core.testing import spawn
from zero_engine.report import write_report


def _train(rank: int, world_size: int, folder: str, stage: int) -> None:
    import torch
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    import zero_core

    torch.manual_seed(0)
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": stage == 2, "initial_scale_power": 8},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu" if stage == 3 else "none"},
        },
    }
    engine = zero_core.build(GPT2LMHeadModel(shape), config)
    engine.record(folder, detail_every=4)
    for step in range(12):
        ids = torch.randint(64, (2, 16))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss * torch.nan if (rank, step) == (1, 5) else loss)
        engine.step()
    engine.save_checkpoint(Path(folder, "checkpoint"))
    engine.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page about two runs: stage 3 with offload on two ranks, stage 2 in fp16 on one."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    spawn(_train, 2, str(one), 3)
    spawn(_train, 1, str(two), 2)
    return write_report([one, two], one / "report.html")


def test_every_axis_has_both_runs(page: Path) -> None:
    text = html.unescape(page.read_text(encoding="utf-8"))
    rows = re.findall(r"<tr><td>(.*?)</td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", text)
    found = {title: (first, second) for title, first, second in rows}
    assert found["ranks"] == ("2", "1")
    assert found["zero_optimization.stage"] == ("3", "2")
    assert found["fp16.enabled"] == ("default", "True")
    assert found["rank 1"][1] == "" != found["rank 1"][0]
    assert found["saved"] == ("1", "1")


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_charts_are_drawn(page: Path, tmp_path: Path, theme: str, width: int) -> None:
    check_page(page, tmp_path, theme, width)
