"""A report draws all of its charts in a browser: light and dark, on a desk and on a phone.

``nox -s "nightly(report)"`` runs this; it takes Debian's chromium, or what CHROMIUM names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import check_page

from zero_core.testing import spawn
from zero_engine.report import write_report

BOTH = (
    "time of a usual step",
    "memory of a rank",
    "training",
    "own work of a rank, without waits",
    "checkpoints, failures and resumes",
)
"""Tables of which both runs have figures. Of what one rank sends there are none, for example."""


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


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_charts_are_drawn_and_every_axis_has_both_runs(
    page: Path, tmp_path: Path, theme: str, width: int
) -> None:
    shown = check_page(page, tmp_path, theme, width)
    tables = {rows[0][0]: rows for rows in shown if len(rows[0]) > 2}
    for axis in BOTH:
        assert tables[axis][0][1:3] == ["A", "B"], axis
        assert any(row[1] and row[2] for row in tables[axis][1:]), axis
    found = {row[0]: tuple(row[1:3]) for rows in tables.values() for row in rows[1:]}
    assert found["ranks"] == ("2", "1")
    assert found["skipped steps"] == ("1", "0")
    assert found["zero_optimization.stage"] == ("3", "2")
    assert found["zero_optimization.offload_optimizer.device"] == ('"cpu"', "default")
    assert found["fp16.enabled"] == ("default", "true")
    assert found["rank 1"][1] == "" != found["rank 1"][0]
    assert found["saved"] == ("1", "1")
    moves = tables["next move, and what is predicted"][1:]
    assert any(a for _, a, _ in moves)
    assert any(b for _, _, b in moves)
    charts = {rows[0][0]: set(rows[1]) for rows in shown if len(rows[0]) == 1}
    assert {"loss", "gradient norm", "seconds of a step"} <= charts.keys()
    assert "B" in charts.pop("loss scale")  # A computes in fp32
    for title, labels in charts.items():
        assert {"A", "B"} <= labels, title
    assert found["last loss scale"] == ("", "256")
