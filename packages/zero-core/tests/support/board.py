"""An in-memory table of heartbeats."""

from __future__ import annotations

from collections.abc import Sequence


class Board:
    """Stand-in for `zero_core.comm.watch.ThreadedBoard` on one rank. All ranks share ``table``."""

    host = "the table"
    is_lost = False

    def __init__(self, table: dict[int, str], rank: int) -> None:
        self.table = table
        self.num_read = 0
        self._rank = rank
        self._found: dict[int, str] = {}

    def publish(self, beat: str) -> None:
        self.table[self._rank] = beat

    def request(self, ranks: Sequence[int]) -> None:
        self.num_read += len(ranks)
        self._found = {rank: self.table[rank] for rank in ranks if rank in self.table}

    def take(self) -> dict[int, str]:
        found, self._found = self._found, {}
        return found

    def unanswered_s(self) -> float:
        return 0.0

    def flush(self, limit_s: float) -> None:
        pass

    def close(self) -> None:
        pass
