"""The program of every rank process: ``python -m benchmarks.harness.rank TARGET ARGUMENTS FOLDER``.

Calls a function by its name and writes its result, or its error; see `benchmarks.harness.ranks`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness.ranks import Place


def main() -> None:
    target, arguments, folder = sys.argv[1:]
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder))
    try:
        module, _, name = target.partition(":")
        measure = getattr(importlib.import_module(module), name)
        place.write(measure(place, **json.loads(arguments)))
    except BaseException as error:
        said = " ".join(str(error).split())
        place.write({"error": f"{type(error).__name__}: {said}"}, ".failure")
        raise
    if dist.is_initialized():
        gc.collect()  # an engine that still held the group would end its threads only at exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
