"""Two nodes on one machine: network namespaces joined by a veth pair that ``tc tbf`` limits.

[Note: link]
node    a network namespace with a loopback and an end of the pair. Ranks of one node reach each
        other at the address of their end, which Linux serves over the loopback without a limit
rate    of either direction, in Mbit/s (10**6 bits), frames with their headers: TCP reaches 96% of
        it. Each end limits what it sends
keeper  a process in a session of its own that removes everything when this process has ended,
        however it ended: it waits for the end of a pipe that only this process holds open

Names hold this process's number, so that parallel runs do not collide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NODES = (0, 1)
TOOLS = ("ip", "tc")
NETWORK = "10.213.0"
# TCP sends up to 64 KiB in one piece. A smaller burst would cut pieces up, which costs processor
# time and adds a header per frame to what the counters show; a shorter queue would drop some.
BURST, QUEUE = "128kb", "2mb"
REMOVAL = (
    'cat >/dev/null; for n in "$@"; do '
    'for p in $(ip netns pids "$n"); do kill -KILL "$p"; done; ip netns del "$n"; done'
)


class LinkError(RuntimeError):
    """The system makes no link. The message says why."""


def missing_for_link() -> str:
    """Return why this process cannot make a link, with the cure, or an empty text."""
    if sys.platform != "linux":
        return f"needs network namespaces of Linux, found {sys.platform}"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"needs {tool!r}, which is not on the PATH: apt install iproute2"
    if os.geteuid() != 0:
        return "needs root, for network namespaces: run it with sudo, or as root of a container"
    return ""


def limit_command(device: str, rate: int) -> list[str]:
    """Return the command that limits ``device`` of this namespace to sending ``rate`` Mbit/s."""
    limits = ("rate", f"{rate}mbit", "burst", BURST, "limit", QUEUE)
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", *limits]


def sent_bytes(device: str) -> int:
    """Return the counter of ``device`` of this namespace."""
    counter = Path("/sys/class/net", device, "statistics", "tx_bytes")
    return int(counter.read_text(encoding="ascii"))


class Link:
    """The two nodes. See [Note: link]. `Link.made` makes one."""

    def __init__(self, number: int) -> None:
        self._namespaces = [f"zero{number}n{node}" for node in NODES]
        self.devices = [f"zb{number}v{node}" for node in NODES]
        """The node's end of the pair."""
        self.addresses = [f"{NETWORK}.{node + 1}" for node in NODES]

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Link]:
        """Make a link without limits, until the end of the context.

        Raises:
            LinkError: the system refuses it.
        """
        link = cls(os.getpid())
        keeper = subprocess.Popen(
            ["sh", "-c", REMOVAL, "keeper", *link._namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            link._make()
            yield link
        finally:
            keeper.communicate()

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """Return ``command`` as run in ``node``."""
        return ["ip", "netns", "exec", self._namespaces[node], *command]

    def limit(self, rate: int) -> None:
        """Limit both directions to ``rate`` Mbit/s."""
        for node in NODES:
            _do(self.command(node, limit_command(self.devices[node], rate)))

    def end_processes(self) -> None:
        """Kill whatever still runs in the nodes."""
        for namespace in self._namespaces:
            pids = _do(["ip", "netns", "pids", namespace]).split()
            _do(["sh", "-c", 'kill -KILL "$@" || true', "kill", *pids])

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
            _do([*own, "link", "set", device, "addrgenmode", "none"])  # no IPv6
            _do([*own, "address", "add", f"{address}/24", "dev", device])
            for up in ("lo", device):
                _do([*own, "link", "set", up, "up"])


def _do(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
    return done.stdout
