"""Ranks of a script under the import hook, forked from one process that has imported libraries.

``zero-engine run`` starts a launcher and a new Python per rank, which import torch and transformers
anew: most of the time of a short script. The few tests of the launcher itself do so. The others run
their script by `run_script`. Its ranks are forked from a server, started once, which has the hook
from its first moment on.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "accelerate",
    "peft",
    "safetensors.torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer_seq2seq",
)


def run_script(
    script: Path,
    *arguments: str,
    ranks: int = 2,
    expected_code: int = 0,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as ``zero-engine run --nproc-per-node=RANKS`` does, on forked ranks.

    They run in ``folder``, or in the current one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
        request = {"argv": [str(script), *arguments], "scratch": scratch, "shared": shared}
        request["folder"] = str(folder or Path.cwd())
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**request, "ranks": ranks}) + "\n")
        server.stdin.flush()
        codes: list[int] = json.loads(server.stdout.readline())
        output, errors = (
            "".join(Path(scratch, f"{name}-{r}").read_text(encoding="utf-8") for r in range(ranks))
            for name in ("stdout", "stderr")
        )
    code = next((c for c in codes if c), 0)
    assert code == expected_code, output + errors
    return subprocess.CompletedProcess([str(script), *arguments], code, output, errors)


@functools.cache
def _server() -> subprocess.Popen[str]:
    from conftest import environment

    from zero_engine.script.hook import hooked

    server = subprocess.Popen(
        [sys.executable, __file__],
        env=hooked(environment()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # it ends with its input
    return server


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(rank, **request) for rank in range(request["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _fork(
    rank: int, argv: list[str], scratch: str, folder: str, shared: dict[str, Any], ranks: int
) -> int:
    child = os.fork()
    if child:
        return child
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{scratch}/{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.update({key: str(value) for key, value in shared.items()})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
