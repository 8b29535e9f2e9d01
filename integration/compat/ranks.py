"""Ranks of one side, started once by its launcher, from which programs' ranks are forked.

The launcher (``zero-engine run`` or torchrun) runs this file in every rank. A rank imports the
libraries and starts serving. It writes its environment variables and the client program of
`benchmarks.harness.forked_python` to ``COMPAT_SERVERS/RANK.json``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.forked_python import hold_server, listen, serve
from benchmarks.harness.ranks import CPU_ALONE, LOOPBACK, RankError, own_environment, write_json

HERE = Path(__file__).parent
MEASURED = str(HERE / "measured.py")
START_LIMIT_S = 300.0
GRACE_S = 5.0
"""Seconds until a launcher that does not end is killed."""
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
    "measured",
)
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)")


class Ranks:
    """Ranks started by ``launcher``, interpreter arguments such as ``-m zero_engine run``.

    Raises RankError if the ranks do not start.
    """

    def __init__(self, launcher: Sequence[str], num_ranks: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "launcher.log"
        servers = [folder / f"{rank}.json" for rank in range(num_ranks)]
        command = [*launcher, f"--nproc-per-node={num_ranks}", __file__]
        with log.open("wb") as file:
            self._launcher = subprocess.Popen(
                [sys.executable, *command],
                env={**environment(), "COMPAT_SERVERS": str(folder)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._owned: list[socket.socket] = []
        try:
            self._wait_for(servers, log)
            self._servers = [json.loads(file.read_text(encoding="utf-8")) for file in servers]
            self._owned.extend(hold_server(server["program"]) for server in self._servers)
        except BaseException:  # the caller has no object to close
            self._launcher.terminate()  # ends servers to which no connection is held yet
            self.close()
            raise

    def commands(
        self, program: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[list[list[str]], list[dict[str, str]]]:
        """Return the command ``measured.py PROGRAM`` and its environment for each rank."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])  # a free port
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            # The launcher's store still has keys of the previous program.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            **variables,
        }
        return (
            [[server["program"], MEASURED, *program] for server in self._servers],
            [{**server["variables"], **shared} for server in self._servers],
        )

    def close(self) -> None:
        for connection in self._owned:
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()

    def _wait_for(self, files: Sequence[Path], log: Path) -> None:
        end = time.monotonic() + START_LIMIT_S
        while not all(file.exists() for file in files):
            if self._launcher.poll() is not None or time.monotonic() > end:
                said = log.read_text(encoding="utf-8", errors="replace")
                raise RankError("the launcher started no ranks", said)
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """Return the environment of CPU programs: one thread per rank, offline, on the loopback."""
    own = own_environment()
    paths = [str(HERE), own["PYTHONPATH"]]
    return {
        **own,
        **CPU_ALONE,
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TOKENIZERS_PARALLELISM": "false",
    }


def first_error(log: str) -> str:
    lines = log.splitlines()
    found = [match.group(1) for line in lines if (match := _ERROR.match(line))]
    return (found or [line for line in lines if line.strip()][-1:] or ["no output"])[0][:300]


def main() -> None:
    """Import the libraries on this rank and serve until `Ranks` closes its connection."""
    for module in PRELOADED:
        importlib.import_module(module)
    if importlib.util.find_spec("trl"):
        importlib.import_module("trl.trainer.sft_trainer")
    listener, program = listen(tempfile.mkdtemp())
    place = Path(os.environ["COMPAT_SERVERS"], f"{os.environ['RANK']}.json")
    write_json(place, {"program": program, "variables": dict(os.environ)})
    serve(listener)


if __name__ == "__main__":
    main()
