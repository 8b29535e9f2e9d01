"""A report draws all of its charts in a browser: light and dark, on a desk and on a phone.

Chromium shows a page that a training of two ranks has left, with a probe at its end that tells what
it finds. ``nox -s report`` runs this; it takes Debian's chromium, or what CHROMIUM names.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zero_core.testing import spawn
from zero_engine.report import write_report

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
CURE = "no browser: apt-get install chromium, or set CHROMIUM to the program of one"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--virtual-time-budget=20000", "--enable-logging=stderr", "--v=0"),
)
PROBE = """
<script>
  const timer = setInterval(() => {
    const root = document.documentElement;
    if (root.dataset.drawn === undefined && root.dataset.failed === undefined) return;
    clearInterval(timer);
    const places = [...document.querySelectorAll(".chart")];
    const marks = (place) => place.querySelectorAll("svg [class*=mark-] path, svg rect").length;
    parent.postMessage(JSON.stringify({
      failed: root.dataset.failed,
      drawn: Number(root.dataset.drawn),
      empty: places.filter((place) => marks(place) < 1).length,
      overflow: root.scrollWidth - window.innerWidth,
      widest: Math.max(...places.map((p) => p.querySelector("svg").getBoundingClientRect().width)),
      width: window.innerWidth,
      back: getComputedStyle(document.body).backgroundColor,
      text: getComputedStyle(document.body).color,
      axis: getComputedStyle(document.querySelector(".role-axis-label text")).fill,
      requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    }), "*");
  }, 50);
</script>
"""
# A window of Chromium's is never narrower than 500 pixels, a frame may be.
FRAME = """
<!doctype html>
<link rel="icon" href="data:,">
<script>
  addEventListener("message", (event) => {{ document.body.dataset.probe = event.data; }});
</script>
<body><iframe src="report.html?theme={theme}" width="{width}" height="900" frameborder="0">
</iframe></body>
"""


def _train(rank: int, world_size: int, folder: str) -> None:
    import torch
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    import zero_core

    torch.manual_seed(0)
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
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
    """Return the page of a run beside itself, with the probe at its end."""
    folder = tmp_path_factory.mktemp("run")
    spawn(_train, 2, str(folder))
    path = write_report([folder, folder], folder / "report.html")
    text = path.read_text(encoding="utf-8")
    end = text.rindex("</body>")  # the charts' library has the word, too
    path.write_text(text[:end] + PROBE + text[end:], encoding="utf-8")
    return path


@pytest.mark.skipif(BROWSER is None, reason=CURE)
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_charts_are_drawn(page: Path, tmp_path: Path, theme: str, width: int) -> None:
    """Nothing is written to the console, nothing is fetched, and nothing is wider than the page."""
    assert BROWSER is not None
    frame = page.with_name(f"{theme}-{width}.html")
    frame.write_text(FRAME.format(theme=theme, width=width), encoding="utf-8")
    shown = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={tmp_path}",
            "--window-size=1300,1000",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    found = re.search(r'data-probe="([^"]*)"', shown.stdout)
    assert found is not None, shown.stderr
    probe: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert probe.get("failed") is None
    assert probe["drawn"] == page.read_text(encoding="utf-8").count('<div class="chart"') > 8
    assert probe["empty"] == 0
    assert probe["requests"] == []
    assert probe["width"] == width
    assert probe["overflow"] <= 0
    assert probe["widest"] <= width
    is_dark = theme == "dark"
    assert (_brightness(probe["back"]) < 0.3) is is_dark
    for name in ("text", "axis"):
        assert abs(_brightness(probe[name]) - _brightness(probe["back"])) > 0.35


def _brightness(color: str) -> float:
    red, green, blue = (int(value) / 255 for value in re.findall(r"\d+", color)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue
