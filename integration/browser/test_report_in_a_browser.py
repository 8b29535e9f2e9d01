"""A report draws all of its charts in a browser: light and dark, on a desk and on a phone.

``nox -s "nightly(report)"`` runs this; it takes Debian's chromium, or what CHROMIUM names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import check_page

from zero_core.testing import spawn
from zero_engine.report import write_report


def _train(rank: int, world_size: int, folder: str) -> None:
    import torch
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    import zero_core

    torch.manual_seed(0)
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
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
    """Return the page about a run in fp16 on two ranks, with a skipped step."""
    folder = tmp_path_factory.mktemp("run")
    spawn(_train, 2, str(folder))
    return write_report(folder, folder / "report.html")


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_charts_are_drawn(page: Path, tmp_path: Path, theme: str, width: int) -> None:
    shown = check_page(page, tmp_path, theme, width)
    charts = {rows[0][0] for rows in shown if len(rows[0]) == 1}
    assert {"loss", "gradient norm", "loss scale", "seconds of a step"} <= charts
    (skipped,) = [rows for rows in shown if rows[0][:1] == ["step"]]
    assert [row[0] for row in skipped[1:]] == ["6"]
