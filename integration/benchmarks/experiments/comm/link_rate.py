"""The rate of a plain TCP connection: the measure of the link before anything else uses it.

``python -m benchmarks.experiments.comm.link_rate take ADDRESS PORT`` prints bytes per second, from
the first to the last byte that ``... give ADDRESS PORT NBYTES`` sends.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.experiments.comm.link import NODES, Link

PORT = 29400
PIECE = 2**20
TRIES, PAUSE_S = 500, 0.1
LIMIT_S = 60.0
Environment = Mapping[str, str]


def measure_link(link: Link, nbytes: int, environment: Environment) -> list[float]:
    """Return the bytes per second that each node sends to the other, both at once."""
    return _measure(link, [(node, 1 - node) for node in NODES], nbytes, environment)


def measure_node(link: Link, nbytes: int, environment: Environment) -> float:
    """Return the bytes per second between two processes of a node."""
    return _measure(link, [(0, 0)], nbytes, environment)[0]


def _measure(
    link: Link, ways: list[tuple[int, int]], nbytes: int, environment: Environment
) -> list[float]:
    program = [sys.executable, "-m", __name__]
    takers = []
    with ExitStack() as stack:
        for port, (source, target) in enumerate(ways, PORT):
            end = (link.addresses[target], str(port))
            take = link.command(target, [*program, "take", *end])
            give = link.command(source, [*program, "give", *end, str(nbytes)])
            taker = subprocess.Popen(take, stdout=subprocess.PIPE, text=True, env=environment)
            takers.append(stack.enter_context(taker))
            stack.enter_context(subprocess.Popen(give, env=environment))
        return [float(taker.communicate()[0]) for taker in takers]


def _take(address: str, port: int) -> float:
    with socket.create_server((address, port)) as server:
        server.settimeout(LIMIT_S)  # the other end may have died
        connection, _ = server.accept()
    connection.settimeout(LIMIT_S)
    piece = bytearray(PIECE)
    total = first = connection.recv_into(piece)
    started_at = ended_at = time.perf_counter()
    while count := connection.recv_into(piece):
        total += count
        ended_at = time.perf_counter()
    return (total - first) / (ended_at - started_at)


def _give(address: str, port: int, nbytes: int) -> None:
    with _connect(address, port) as connection:
        for _ in range(max(1, nbytes // PIECE)):
            connection.sendall(bytes(PIECE))


def _connect(address: str, port: int) -> socket.socket:
    for _ in range(TRIES):
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # the other end has not started yet
            time.sleep(PAUSE_S)
    raise TimeoutError(f"no listener at {address}:{port} after {TRIES * PAUSE_S:.0f} s")


def main() -> None:
    role, address, port, *nbytes = sys.argv[1:]
    if role == "take":
        print(_take(address, int(port)))
    else:
        _give(address, int(port), int(nbytes[0]))


if __name__ == "__main__":
    main()
