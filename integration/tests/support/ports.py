import random
import socket

FIRST, BEHIND_LAST = 10_000, 32_768
"""Range of ports, below those that Linux assigns to outgoing connections."""


def free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(FIRST, BEHIND_LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
