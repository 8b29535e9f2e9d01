"""Two nodes on one machine: network namespaces joined by a veth pair that ``tc tbf`` limits.

[Note: link]
node    a network namespace with a loopback device and one end of the veth pair. Ranks of one node
        use the address of their node's end, which Linux routes over the loopback without a limit
rate    Mbit/s (10**6 bits) in either direction, frame headers included. TCP reaches 96% of the
        rate. Each end limits what it sends
keeper  a process in its own session that removes the namespaces after this process has ended, even
        by SIGKILL. It waits for the end of a pipe that only this process holds open
plain   bytes per second of a TCP connection, measured before training uses the link

Names contain this process's pid so that parallel runs do not collide.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness.ranks import Node, Place, Row, run_ranks

NODES = (0, 1)
TOOLS = ("ip", "tc")
NETWORK = "10.213.0"
PORT = 29400
PIECE = 2**20
LIMIT_S = 60.0
# TCP sends segments of up to 64 KiB. A smaller burst would split them, which costs CPU time and
# adds one header per frame to the counted bytes. A shorter queue would drop packets.
BURST, QUEUE = "128kb", "2mb"
REMOVAL = (
    'cat >/dev/null; for n in "$@"; do '
    'for p in $(ip netns pids "$n"); do kill -KILL "$p"; done; ip netns del "$n"; done'
)


class LinkError(RuntimeError):
    """The system cannot create the link. The message says why."""


def missing_for_link() -> str:
    """Return why this process cannot create a link, with the remedy, or an empty string."""
    if sys.platform != "linux":
        return f"needs network namespaces of Linux, found {sys.platform}"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"needs {tool!r}, which is not on the PATH: apt install iproute2"
    if os.geteuid() != 0:
        return "needs root, for network namespaces: run it with sudo, or as root of a container"
    return ""


def limit_command(device: str, rate: int) -> list[str]:
    limits = ("rate", f"{rate}mbit", "burst", BURST, "limit", QUEUE)
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", *limits]


def sent_bytes(device: str) -> int:
    counter = Path("/sys/class/net", device, "statistics", "tx_bytes")
    return int(counter.read_text(encoding="ascii"))


class Link:
    """Two nodes and the link between them. See [Note: link]. Use `Link.made` to create one."""

    def __init__(self, number: int) -> None:
        self._namespaces = [f"zero{number}n{node}" for node in NODES]
        self.devices = [f"zb{number}v{node}" for node in NODES]
        """Each node's end of the veth pair."""
        self.addresses = [f"{NETWORK}.{node + 1}" for node in NODES]

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Link]:
        """Create an unlimited link that exists until the context ends, or raise LinkError."""
        link = cls(os.getpid())
        keeper = subprocess.Popen(
            ["sh", "-c", REMOVAL, "keeper", *link._namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the keeper
        )
        try:
            link._make()
            yield link
        finally:
            keeper.communicate()

    @property
    def nodes(self) -> list[Node]:
        return [
            Node(("ip", "netns", "exec", namespace), device)
            for namespace, device in zip(self._namespaces, self.devices, strict=True)
        ]

    def limit(self, rate: int) -> None:
        for node in self.nodes:
            _do([*node.prefix, *limit_command(node.interface, rate)])

    def plain_rates(self, num_bytes: int) -> list[float]:
        """Return the bytes per second that each node sends while both nodes send at once."""
        # Source rank, target rank and target address of each transfer.
        ways = [(0, 2, self.addresses[1]), (3, 1, self.addresses[0])]
        arguments = {"ways": ways, "num_bytes": num_bytes}
        found = run_ranks(f"{__name__}:transfer", arguments, 4, nodes=self.nodes)
        return [found[target]["bytes_per_s"] for _, target, _ in ways]

    def _make(self) -> None:
        for namespace in self._namespaces:
            _do(["ip", "netns", "add", namespace])
        (here, there), (near, far) = self._namespaces, self.devices
        pair = ("type", "veth", "peer", "name", far, "netns", there)
        _do(["ip", "link", "add", near, "netns", here, *pair])
        for namespace, device, address in zip(
            self._namespaces, self.devices, self.addresses, strict=True
        ):
            own = ("ip", "-n", namespace)
            # IPv6 would send further packets, which the counters would include.
            _do([*own, "link", "set", device, "addrgenmode", "none"])
            _do([*own, "address", "add", f"{address}/24", "dev", device])
            for up in ("lo", device):
                _do([*own, "link", "set", up, "up"])


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def transfer(place: Place, ways: Sequence[tuple[int, int, str]], num_bytes: int) -> Row:
    """Send or receive on this rank. A receiver returns ``bytes_per_s``, from first to last byte."""
    place.join()
    for port, (source, target, address) in enumerate(ways, PORT):
        if place.rank == target:
            with socket.create_server((address, port)) as server:
                return {"bytes_per_s": _take(server)}
        if place.rank == source:
            dist.barrier()  # all receivers listen
            with socket.create_connection((address, port)) as connection:
                for _ in range(max(1, num_bytes // PIECE)):
                    connection.sendall(bytes(PIECE))
    return {}


def _take(server: socket.socket) -> float:
    # A large receive buffer would fill while this process is not scheduled, and distort the rate.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
    server.settimeout(LIMIT_S)  # the sender may have died
    dist.barrier()
    connection, _ = server.accept()
    connection.settimeout(LIMIT_S)
    piece = bytearray(PIECE)
    total = first = connection.recv_into(piece)
    started_at = ended_at = time.perf_counter()
    while count := connection.recv_into(piece):
        total += count
        ended_at = time.perf_counter()
    return (total - first) / (ended_at - started_at)
