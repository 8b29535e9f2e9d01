"""Limits on the files, classes and calls that a plain stage-3 step enters."""

import sys
from pathlib import Path

import torch
from torch import nn

import zero_core
from zero_core.testing import spawn

SOURCE = Path(zero_core.__file__).parent


class _Walk:
    def __init__(self):
        self.files = set()
        self.classes = set()
        self.num_calls = 0

    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(SOURCE):
            return
        name = str(path.relative_to(SOURCE))
        if name.startswith("comm/") and name != "comm/communicator.py":
            return
        self.num_calls += 1
        self.files.add(name)
        outer, *inner = frame.f_code.co_qualname.split(".")
        if inner and inner[0] != "<locals>":
            self.classes.add(f"{name} {outer}")


class _Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _walks(rank, world_size):
    model = _Four()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
    }
    engine = zero_core.build(model, config)
    for step in range(4):
        walk = _Walk()
        if step == 3:
            sys.setprofile(walk)
        loss = engine(torch.randn(2, 16)).square().mean()
        engine.backward(loss)
        num_calls, num_files, num_classes = walk.num_calls, len(walk.files), len(walk.classes)
        engine.step()
        sys.setprofile(None)
    assert num_files <= 13, sorted(walk.files)
    assert num_classes <= 18, sorted(walk.classes)
    assert num_calls <= 640, num_calls
    assert walk.num_calls <= 870, walk.num_calls
    assert len(walk.files) <= 17, sorted(walk.files)
    assert len(walk.classes) <= 25, sorted(walk.classes)
    engine.close()


def test_a_step_of_stage_3_walks_through_few_files_classes_and_calls():
    spawn(_walks, 2)
