"""Program of a rank process: ``python -m benchmarks.harness.rank TARGET ARGUMENTS FOLDER``.

It calls the function TARGET and writes the function's result, or its error, to FOLDER. See
`benchmarks.harness.ranks`.
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
        # An engine that still holds the group would end the group's threads only at exit.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
