"""Ranks of a script under the import hook, forked from one process that has imported libraries.

``zero-engine run`` starts a launcher and a new Python per rank, which import torch and transformers
anew: most of the time of a short script. The few tests of the launcher itself do so. The others run
their script by `run_script`, on ranks that are forked from a server with the hook.
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
    """Run ``script`` as ``zero-engine run --nproc-per-node=RANKS`` does, on forked ranks.

    They run in ``folder``, or in the current one.
    """
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
