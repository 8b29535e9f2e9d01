"""torchrun within this process: start ranks, wait for them, and return their exit code.

torchrun (``torch.distributed.run``) passes SIGINT, SIGTERM and, here, SIGUSR1 on to the ranks.
Ranks save and exit by themselves. torchrun kills those that still run after a grace period.
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
from zero_engine.launch.started_ranks import GRACE_PERIOD_S

_OF_A_PEER = CollectiveError.__name__


def pass_on_warnings() -> None:
    """Make torchrun pass SIGUSR1, SLURM's warning, to ranks. Call it before torchrun's parser."""
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")


def local_address_only() -> dict[str, str]:
    # Without the variable gloo resolves the host name, which may have no address.
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def run_ranks(arguments: Namespace) -> int:
    """Run the ranks that torchrun's parsed ``arguments`` describe, and wait for their end.

    Returns 0 on success, 128 + signal if a signal stopped the run, or the exit code of the rank
    that failed first.
    """
    # torch 2.10 and 2.11 ignore the variable and give ranks 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_PERIOD_S))
    # See [Note: a fresh store] in `ranks`. Programs that join the ranks themselves need a fresh
    # store after a restart, as do nodes that join later.
    if arguments.max_restarts or ":" in arguments.nnodes:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # `_exit_code` prints one line in place of torchrun's long messages.
    for name in logging.root.manager.loggerDict:  # each logger has its own level
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
    # Timestamps are whole seconds. Among equal timestamps a CollectiveError sorts last, since it
    # reports that another rank is gone.
    rank = min(
        failures, key=lambda r: (failures[r].timestamp, _line(failures[r]).startswith(_OF_A_PEER))
    )
    failure = failures[rank]
    line = _line(failure)
    # Copy the rank's error into the file of an outer launcher, if there is one.
    if line and "TORCHELASTIC_ERROR_FILE" in os.environ:
        with suppress(OSError):  # the error is printed below in any case
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    reason = f": {line}" if line else ""
    code = int(failure.exitcode)
    if code < 0:
        print(f"rank {rank} was killed by {signal.Signals(-code).name}{reason}", file=sys.stderr)
        return 128 - code
    if code == 1:  # Python's exit code for an uncaught exception
        print(f"rank {rank} failed first, see above{reason}", file=sys.stderr)
    return code


def _line(failure: ProcessFailure) -> str:
    message = failure.error_file_data["message"]  # without a file, torch puts a plain string here
    line = message["message"] if isinstance(message, dict) else ""
    return str(line).partition("\n")[0]
