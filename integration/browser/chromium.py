"""Opens a report in headless Chromium, with a script appended that measures the charts."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
    const box = (node) => node.getBoundingClientRect();
    const texts = (within, what) => [...within.querySelectorAll(what)].filter(
      (text) => text.textContent && getComputedStyle(text).opacity !== "0");
    const meet = (a, b) => a.right > b.left && b.right > a.left
      && a.bottom > b.top && b.bottom > a.top;
    const neighbours = (axis) => {
      const labels = texts(axis, "text");
      return labels.slice(1).filter((label, i) => meet(box(labels[i]), box(label)));
    };
    parent.postMessage(JSON.stringify({
      failed: root.dataset.failed,
      drawn: Number(root.dataset.drawn),
      head: box(document.querySelector(".verdict")).bottom,
      empty: places.filter((place) => marks(place) < 1).length,
      clipped: places.flatMap((place) => texts(place, "svg text")
        .filter((text) => box(text).right > box(place).right + 1)).map((t) => t.textContent),
      overlapping: [...document.querySelectorAll(".role-axis-label")].flatMap(neighbours)
        .map((text) => text.textContent),
      overflow: root.scrollWidth - window.innerWidth,
      widest: Math.max(...places.map((place) => box(place.querySelector("svg")).width)),
      width: window.innerWidth,
      back: getComputedStyle(document.body).backgroundColor,
      text: getComputedStyle(document.body).color,
      axis: getComputedStyle(document.querySelector(".role-axis-label text")).fill,
      shown: [...document.querySelectorAll("section")].flatMap((section) => [
        ...[...section.querySelectorAll("table")].map((table) => [...table.rows].map(
          (row) => [...row.cells].map((cell) => cell.innerText))),
        ...[...section.querySelectorAll(".chart")].map((chart) => [
          [...chart.querySelectorAll(".role-title-text text")].map((text) => text.textContent),
          [...chart.querySelectorAll(".role-legend-label text, .role-axis-label text")].map(
            (text) => text.textContent)]),
      ]),
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
<body><iframe src="{page}?theme={theme}" width="{width}" height="900" frameborder="0">
</iframe></body>
"""


def check_page(page: Path, folder: Path, theme: str, width: int) -> list[list[list[str]]]:
    """Assert that all charts of ``page`` are drawn as they should be.

    Nothing is written to the console, nothing is fetched, nothing is wider than the page, and no
    label is cut off or lies on another. The first move ends within 400 pixels of the top.

    Args:
        page: a report.
        folder: for the browser's files, new.
        theme: "light" or "dark".
        width: of the page, in pixels.

    Returns:
        What is shown: rows of each table, and title and labels of each chart.
    """
    probed, frame = folder / "probed.html", folder / "frame.html"
    text = page.read_text(encoding="utf-8")
    end = text.rindex("</body>")  # the charts' library has the word, too
    probed.write_text(text[:end] + PROBE + text[end:], encoding="utf-8")
    frame.write_text(FRAME.format(page=probed.name, theme=theme, width=width), encoding="utf-8")
    found = _look(frame, folder / "profile")
    assert found.get("failed") is None
    assert found["drawn"] == text.count('<div class="chart"') > 8
    assert found["empty"] == 0
    assert found["clipped"] == []
    assert found["overlapping"] == []
    assert found["requests"] == []
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert found["head"] <= 400, "the first move is not in sight"
    assert found["widest"] <= width
    assert (_brightness(found["back"]) < 0.3) is (theme == "dark")
    for name in ("text", "axis"):
        assert abs(_brightness(found[name]) - _brightness(found["back"])) > 0.35
    shown: list[list[list[str]]] = found["shown"]
    return shown


def _look(frame: Path, profile: Path) -> dict[str, Any]:
    """Return what the probe in ``frame`` has found."""
    assert BROWSER is not None, CURE
    where = (f"--user-data-dir={profile}", "--window-size=1300,1000", "--dump-dom", frame.as_uri())
    shown = subprocess.run(
        [BROWSER, *FLAGS, *where], capture_output=True, text=True, timeout=300, check=True
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    found = re.search(r'data-probe="([^"]*)"', shown.stdout)
    assert found is not None, shown.stderr
    probe: dict[str, Any] = json.loads(html.unescape(found[1]))
    return probe


def _brightness(color: str) -> float:
    red, green, blue = (int(value) / 255 for value in re.findall(r"\d+", color)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue
