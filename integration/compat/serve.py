"""A rank that has imported the libraries and forks a process for each program.

A launcher starts it (``zero-engine run`` or torchrun), with all of a rank's variables. Importing
torch, transformers and TRL takes most of the time of a short program, and is done once here.
``COMPAT_PORT`` is where `ranks.Ranks` listens. Each line from there is a request; the answers to
it are the child's number and, at its end, its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
import traceback
from typing import Any

import measured

PRELOADED = (
    "deepspeed",
    "torch._dynamo",
    "lightning.pytorch",
    "peft",
    "safetensors.torch",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "transformers.trainer_seq2seq",
)


def serve() -> None:
    """Import, connect, and run what is asked for until the other side closes."""
    for module in PRELOADED:
        importlib.import_module(module)
    if importlib.util.find_spec("trl"):
        importlib.import_module("trl.trainer.sft_trainer")
    gc.freeze()
    with (
        socket.create_connection(("127.0.0.1", int(os.environ["COMPAT_PORT"]))) as connection,
        connection.makefile("rw") as lines,
    ):
        _say(lines, {"rank": int(os.environ["RANK"])})
        for line in lines:
            child = _fork(json.loads(line))
            _say(lines, {"child": child})
            _say(lines, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def _say(lines: Any, answer: dict[str, int]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()  # it is ended with its own children
    log = os.open(f"{request['folder']}/{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["variables"])
    sys.argv[1:] = request["program"]
    code = 0
    try:
        measured.main()
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
    serve()
