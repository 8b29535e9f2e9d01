"""Ranks of a program, forked from one process per side that has imported the libraries.

``zero-engine run`` and torchrun would start a new Python per rank, whose imports take seconds.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.forked_python import start_server
from benchmarks.harness.ranks import CPU_ALONE, LOOPBACK, own_environment
from zero_engine.script.hook import hooked

HERE = Path(__file__).parent
MEASURED = str(HERE / "measured.py")
RANKS = 2
MODELS = ("bert", "gpt2", "llama", "roberta", "t5", "vit")
PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "lightning.pytorch",
    "peft",
    "safetensors.torch",
    *(f"transformers.models.{m}.modeling_{m}" for m in MODELS),
    "transformers.trainer_seq2seq",
    "measured",
)


def commands_of(
    program: Sequence[str], variables: Mapping[str, str], *, is_hooked: bool
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Return the command ``measured.py PROGRAM`` and its environment for each rank.

    With ``is_hooked``, ``import deepspeed`` serves this engine, as under ``zero-engine run``.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])  # a free port
    shared = {
        **environment(is_hooked=is_hooked),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        # Lightning takes a process for a rank of torchrun's by this variable.
        "TORCHELASTIC_RUN_ID": "compat",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **variables,
    }
    ranks = [str(rank) for rank in range(RANKS)]
    return (
        [[_python(is_hooked=is_hooked), MEASURED, *program]] * RANKS,
        [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks],
    )


@functools.cache
def _python(*, is_hooked: bool) -> str:
    trl = ("trl.trainer.sft_trainer",) if importlib.util.find_spec("trl") else ()
    return start_server(environment(is_hooked=is_hooked), *PRELOADED, *trl)


def environment(*, is_hooked: bool = False) -> dict[str, str]:
    """Return the environment of CPU programs: one thread per rank, offline, on the loopback."""
    own = own_environment()
    found = {
        **own,
        **CPU_ALONE,
        "PYTHONPATH": os.pathsep.join([str(HERE), own["PYTHONPATH"]]),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TOKENIZERS_PARALLELISM": "false",
    }
    return hooked(found) if is_hooked else found
