"""torchrun within this process: start ranks, wait for them, and end with their exit code.

torchrun (``torch.distributed.run``) passes SIGINT, SIGTERM and, here, SIGUSR1 on to the ranks. They
save and leave by themselves; it kills those that are still there after a grace period.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.run import run

from zero_core.errors import CollectiveError
from zero_engine.launch.orphans import GRACE_PERIOD_S

_OF_A_PEER = CollectiveError.__name__


def pass_on_warnings() -> None:
    """Have torchrun's parsers that are made from now on pass SIGUSR1 on, SLURM's usual warning."""
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", signals)


def local_address_only() -> dict[str, str]:
    """Variables for ranks that are all on this machine."""
    # gloo otherwise looks its own address up by host name, which a machine may not know.
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def run_ranks(arguments: Namespace) -> int:
    """Run what torchrun's parsed ``arguments`` describe, and wait for the end.

    Returns:
        The exit code: 0, 128 + signal if the run was asked to stop, else that of the rank that
        failed first.
    """
    # torch 2.10 and 2.11 give ranks 30 s to save, and ignore the variable.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_PERIOD_S))
    # [Note: a fresh store] in `ranks`: for programs that join by themselves, and later nodes.
    if arguments.max_restarts or ":" in arguments.nnodes:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # torchrun tells at length what is said here in one line, or is part of a normal end.
    for name in logging.root.manager.loggerDict:  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as error:
        return _exit_code(error)
    return 0


def _exit_code(error: ChildFailedError) -> int:
    failures = error.failures
    # Times are whole seconds. What a rank says of others' absence is not the cause.
    rank = min(
        failures, key=lambda r: (failures[r].timestamp, _line(failures[r]).startswith(_OF_A_PEER))
    )
    failure = failures[rank]
    line = _line(failure)
    if line and "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher's own
        with suppress(OSError):  # the error is named below in any case
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    reason = f": {line}" if line else ""
    code = int(failure.exitcode)
    if code < 0:
        print(f"rank {rank} was killed by {signal.Signals(-code).name}{reason}", file=sys.stderr)
        return 128 - code
    if code == 1:  # Python's code for an exception that nobody caught
        print(f"rank {rank} failed first, see above{reason}", file=sys.stderr)
    return code


def _line(failure: ProcessFailure) -> str:
    """Return class and first line of the error that the rank wrote to its file, "" if none."""
    message = failure.error_file_data["message"]  # torch's own text, where there is no file
    line = message["message"] if isinstance(message, dict) else ""
    return str(line).partition("\n")[0]
