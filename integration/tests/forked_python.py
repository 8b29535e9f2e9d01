"""A stand-in for the interpreter, whose processes are forked from one that has imported libraries.

Launchers and the benchmarks start each rank as ``python -m MODULE`` or ``python SCRIPT``, and most
of the time of a short test is what such a process imports. `forked_python` is a program for
``sys.executable`` or torchrun's ``PYTHON_EXEC``. It takes the same command lines, and hands its
arguments, environment, folder, open files and namespaces to a server, which forks. It passes
signals on and ends as the forked process does. The server is itself forked as ranks of
`zero_core.testing` are, with what `preload` names.

Not for what a test says of the start or the end of an interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zero_core.testing import run_alone

CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = [0, 1, 2]
if sys.platform == "linux":
    files += [os.open("/proc/self/ns/" + kind, os.O_RDONLY) for kind in {namespaces!r}]
server.sendmsg([b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
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
NAMESPACES = ("net", "mnt")
"""Those that ``ip netns exec`` changes: devices, and the mounts that list them in /sys."""


@functools.cache
def forked_python() -> str:
    """Start the server and return the path of the program. The server ends with this process."""
    folder = tempfile.mkdtemp(prefix="python")
    address, program = f"{folder}/server", Path(folder, "python")
    client = CLIENT.format(python=sys.executable, address=address, namespaces=NAMESPACES)
    program.write_text(client, encoding="utf-8")
    program.chmod(0o755)
    listener = socket.create_server(address, family=socket.AF_UNIX, backlog=64)
    threading.Thread(target=run_alone, args=(_serve, listener, str(program)), daemon=True).start()
    # Registered after multiprocessing's, so it runs before that joins the server.
    atexit.register(_end, folder, address)
    return str(program)


def _end(folder: str, address: str) -> None:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(b" {}\n")
    shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket, program: str) -> None:
    """Fork a process for each connection, until one asks for nothing."""
    sys.executable = program  # what a forked process starts is forked, too
    ended, notify = socket.socketpair()
    for end in (ended, notify):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(notify.fileno())
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (listener, ended):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                if source is ended:
                    ended.recv(4096)
                elif source is listener:
                    connection, _ = listener.accept()
                    request, files = _request_of(connection)
                    if request == {}:
                        return
                    if request is None:
                        connection.close()
                        continue
                    child = _start(request, files, connection)
                    children[child] = connection
                    selector.register(connection, selectors.EVENT_READ)
                else:  # its client was killed
                    child = next(pid for pid, one in children.items() if one is source)
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
    """Read what the other end asks for, and its files. None if it was killed meanwhile."""
    files: list[int] = []
    with suppress(OSError, ValueError):
        _, files, _, _ = socket.recv_fds(connection, 1, 3 + len(NAMESPACES))
        with connection.makefile() as text:
            return json.loads(text.readline()), files
    for file in files:
        os.close(file)
    return None, []


def _start(request: dict[str, Any], files: list[int], connection: socket.socket) -> int:
    """Fork what the other end asks for, tell it the process, and return that."""
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


def _enter(kind: str, namespace: int) -> None:
    """Enter a namespace of Linux, if this process is in another one; Python can do so from 3.12."""
    is_there = os.fstat(namespace).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino
    if not is_there and ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {kind!r}")


def _run(files: list[int], arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Be the interpreter of a command line, and end the process."""
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    code = 0
    try:
        for kind, namespace in zip(NAMESPACES, files[3:], strict=False):
            _enter(kind, namespace)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
        sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
        with suppress(ImportError):  # as an interpreter does
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
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
