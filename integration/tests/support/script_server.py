"""Ranks of a script under the import hook, forked from a process that has imported the libraries.

``zero-engine run`` starts a new Python per rank, which takes seconds. `run_script` is faster.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from benchmarks.harness.forked_python import start_server
from benchmarks.harness.ranks import RankError, rank_variables, run_together
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

    shared, port = {**hooked(environment()), "GLOO_SOCKET_IFNAME": "lo"}, str(free_port())
    own = [rank_variables(rank, ranks, per_node=ranks, port=port) for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as logs:
        try:
            run_together(
                [[_python(), str(script), *arguments]] * ranks,
                [{**shared, **variables} for variables in own],
                Path(logs),
                work_folder=folder,
            )
        except RankError as error:
            raise AssertionError(error.log) from None


@functools.cache
def _python() -> str:
    from conftest import environment

    return start_server(hooked(environment()), *PRELOADED)
