import random
import socket

FIRST, BEHIND_LAST = 10_000, 32_768
"""Below those that Linux gives to connections by itself: such a one may be taken before its use."""


def free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(FIRST, BEHIND_LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
