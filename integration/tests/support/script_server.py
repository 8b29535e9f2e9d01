"""Ranks of a script under the import hook, forked from a process that has imported the libraries.

``zero-engine run`` starts a new Python per rank, which takes seconds. `run_script` is faster.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from benchmarks.harness.forked_python import start_server
from benchmarks.harness.ranks import RankError, run_together
from tests.support.ports import free_port
from zero_engine.script.hook import hooked

PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "accelerate",
    "lightning.fabric",
    "safetensors.torch",
)


def run_script(script: Path, *arguments: str, ranks: int = 2, folder: Path | None = None) -> None:
    """Run ``script`` in ``folder`` on forked ranks, like ``zero-engine run --nproc-per-node``."""
    from conftest import environment

    shared = {**hooked(environment()), "WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as logs:
        try:
            run_together(
                [[_python(), str(script), *arguments]] * ranks,
                [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
                Path(logs),
                work_folder=folder,
            )
        except RankError as error:
            raise AssertionError(error.log) from None


@functools.cache
def _python() -> str:
    from conftest import environment

    return start_server(hooked(environment()), *PRELOADED)
