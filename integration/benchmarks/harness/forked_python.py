"""A replacement for the interpreter that forks from a process with imported libraries.

Imports take most of the time of a short program. A server process imports libraries once and forks
a process for each command line. Its client is a program with the interpreter's command line, to be
used as ``sys.executable`` or as torchrun's ``PYTHON_EXEC``. The client sends its arguments,
environment, folder and standard streams to the server, forwards signals, and exits with the
forked process's status.

A server runs until its owner closes its connection (`hold_server`). The server is the process that
calls `serve`, or one that `start_server` starts. The server of `forked_python` is forked like ranks
of `zero_core.testing`, with the modules given to `preload`.

Tests of the start or the end of an interpreter must not use the client.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.ranks import ROOT
from zero_core.testing import run_alone

CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = array.array("i", [0, 1, 2])
server.sendmsg([b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "variables": dict(os.environ)}}
server.sendall(json.dumps(request).encode() + b"\\n")
answers = server.makefile()
child = int(answers.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(child, number))
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def forked_python() -> str:
    """Start a server that ends with this process, and return the path of its client program."""
    listener, program = listen(tempfile.mkdtemp(prefix="python"))
    threading.Thread(target=run_alone, args=(serve, listener, program), daemon=True).start()
    # Exit handlers run in reverse order. The server must end before multiprocessing's handler joins
    # the server process.
    atexit.register(hold_server(program).close)
    return program


def start_server(environment: Mapping[str, str], *modules: str) -> str:
    """Start a server that imports ``modules`` and ends with this process. Return its client."""
    listener, program = listen(tempfile.mkdtemp(prefix="python"))
    number = listener.fileno()
    command = [sys.executable, "-m", __spec__.name, str(number), *modules]
    subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[number])
    listener.close()
    atexit.register(hold_server(program).close)
    return program


def listen(folder: str) -> tuple[socket.socket, str]:
    """Create a server's socket and client program in ``folder``. Return socket and program path."""
    address, program = f"{folder}/server", Path(folder, "python")
    client = CLIENT.format(python=sys.executable, address=address)
    program.write_text(client, encoding="utf-8")
    program.chmod(0o755)
    return socket.create_server(address, family=socket.AF_UNIX, backlog=64), str(program)


def hold_server(program: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(program).with_name("server")))
    connection.sendall(b" {}\n")
    return connection


def serve(listener: socket.socket, executable: str = sys.executable) -> None:
    """Fork a process per connection until the owner's connection closes. Then remove its folder.

    Forked processes see ``executable`` as ``sys.executable``.
    """
    sys.executable = executable
    gc.freeze()  # keeps the garbage collector from scanning imported objects in every fork
    ended, notify = socket.socketpair()
    for end in (ended, notify):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(notify.fileno())
    owner: socket.socket | None = None
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for known in (listener, ended):
            selector.register(known, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                if source is ended:
                    ended.recv(4096)
                elif source is listener:
                    connection, _ = listener.accept()
                    request, files = _request_of(connection)
                    if request is None:
                        connection.close()
                        continue
                    selector.register(connection, selectors.EVENT_READ)
                    if request:
                        children[_start(request, files, connection)] = connection
                    else:
                        owner = connection
                elif source is owner:
                    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
                    return
                else:  # a closed connection of a client means that the client was killed
                    child = next(pid for pid, one in children.items() if one is source)
                    with suppress(ProcessLookupError):  # the child may not have called setsid yet
                        os.killpg(child, signal.SIGKILL)
                    os.kill(child, signal.SIGKILL)
                    selector.unregister(source)
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    connection = children.pop(child)
                    with suppress(KeyError):
                        selector.unregister(connection)
                    with suppress(OSError), connection:
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _request_of(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Read a client's request and its open files. The request is None if the client was killed."""
    files: list[int] = []
    with suppress(OSError, ValueError):
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile() as text:
            return json.loads(text.readline()), files
    for file in files:
        os.close(file)
    return None, []


def _start(request: dict[str, Any], files: list[int], connection: socket.socket) -> int:
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _run(files, **request)
    for file in files:
        os.close(file)
    with suppress(OSError):
        connection.sendall(b"%d\n" % child)
    return child


def _run(files: list[int], arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Run a command line as the interpreter would, and end the process."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    code = 0
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
        sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
        # The server may have imported another sitecustomize, such as Debian's.
        sys.modules.pop("sitecustomize", None)
        # In Python 3.14 multiprocessing clears all exit handlers. Register weakref's handler again.
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
        with suppress(ImportError):
            importlib.import_module("sitecustomize")
        while arguments[0] in ("-u", "-W"):
            if arguments.pop(0) == "-W":
                warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        is_module = arguments[0] == "-m"
        sys.argv[:] = arguments[is_module:]
        if is_module:
            sys.path.insert(0, folder)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
