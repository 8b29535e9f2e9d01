"""Program that saves asynchronously at every training step: ``saving_program.py FOLDER STEPS``."""

from __future__ import annotations

import sys

import torch

import zero_core
from zero_core.testing import Case, batch, make_model

if __name__ == "__main__":
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    engine = zero_core.build(make_model(width=96), Case(stage=2).config())
    engine.resume(folder)
    for step in range(engine.global_steps, steps):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()
        engine.async_save(folder, keep_last=3)
    engine.close()
