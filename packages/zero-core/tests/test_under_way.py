"""A build that takes long says so on a terminal."""

import io
import sys
import time

import pytest
from torch import nn

import zero_core

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}}


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _shown_by_build(monkeypatch, stream, takes_s):
    """Return what a build that takes so long writes to stderr."""
    module = sys.modules["zero_core.build"]  # the package has the function under that name
    adopt_buffers = module.adopt_buffers

    def slow(*arguments):
        time.sleep(takes_s)
        adopt_buffers(*arguments)

    monkeypatch.setattr(module, "adopt_buffers", slow)
    monkeypatch.setattr(sys, "stderr", stream)
    zero_core.build(nn.Linear(2, 2), CONFIG).close()
    return stream.getvalue()


def test_long_build_is_shown_on_a_terminal(monkeypatch):
    shown = _shown_by_build(monkeypatch, _Terminal(), 1.8)
    assert "zero_core.build: 1 s\r" in shown
    assert shown.endswith("\r\x1b[K"), "the line is removed"


@pytest.mark.parametrize(
    ("stream", "rank", "takes_s"),
    [(_Terminal(), "0", 0.0), (_Terminal(), "1", 1.5), (io.StringIO(), "0", 1.5)],
    ids=["short", "another rank", "no terminal"],
)
def test_nothing_is_shown_otherwise(monkeypatch, stream, rank, takes_s):
    monkeypatch.setenv("RANK", rank)
    assert _shown_by_build(monkeypatch, stream, takes_s) == ""
