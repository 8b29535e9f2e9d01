"""`ReportingShares`: what the tiers of a flat space have copied, computed and allocated so far."""

from __future__ import annotations

from collections import Counter

from zero_offload.memory.storage import BlockFile
from zero_offload.memory.streams import TimedCopy
from zero_offload.tiers.flat_tier import TierReport
from zero_offload.tiers.part import PartReport
from zero_offload.tiers.shares import Shares


class ReportingShares(Shares):
    """`Shares` with counters. Those of host tiers before a resplit count."""

    def report(self) -> tuple[PartReport, ...]:
        return tuple(part.report() for part in self._present)

    def _host_reports(self) -> list[TierReport]:
        host = self._host_part
        return self._replaced if host is None else [*self._replaced, host.tier.report()]

    @property
    def bytes_d2h(self) -> int:
        return self.copied_bytes()[0]

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes brought from the host so far. Complete after ``wait_params``."""
        return self.copied_bytes()[1]

    @property
    def stall_s(self) -> float:
        """Seconds that callers were blocked so far because the host was not done."""
        return sum(report.stall_s for report in self._host_reports())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of master weights and states, transfer buffers apart."""
        return sum(r.tier.host_bytes for r in self.report() if r.tier is not None)

    @property
    def undo_bytes(self) -> int:
        """Bytes of host memory of the undo log."""
        return self.host_memory_bytes().get("undo log", 0)

    @property
    def file(self) -> BlockFile | None:
        """The file of the host's master weights and state, if there is one, with its counters."""
        return None if self._host_part is None else self._host_part.tier.file

    def work_s(self) -> dict[str, float]:
        """Return seconds so far of the host's updates, of its file, and of waiting for that."""
        found = {"host": sum(report.update_s for report in self._host_reports())}
        if self.file is not None:
            found |= {"file": self.file.io_s, "file wait": self.file.waited_s}
        return found

    def copied_bytes(self) -> tuple[int, int]:
        """Return bytes copied so far from the device to the host, and back."""
        reports = self._host_reports()
        return sum(r.bytes_d2h for r in reports), sum(r.bytes_h2d for r in reports)

    def recent_updates(self) -> list[tuple[float, float]]:
        """Return start and end of the host's last updates, of `time.perf_counter`."""
        return [] if self._host_part is None else list(self._host_part.tier.worker.updates)

    def file_traffic(self) -> tuple[int, int]:
        """Return the bytes of states read from and written to the file since the last resplit.

        Waits for updates and transfers under way. See `BlockFile.traffic`.
        """
        if self._host_part is not None:
            self._host_part.drain()
        return (0, 0) if self.file is None else self.file.traffic()

    def time_copies(self, *, is_on: bool) -> None:
        """Time later copies between the device and the host, or no longer. None are on a CPU."""
        if self._host_part is not None:
            self._host_part.tier.mover.streams.is_timing = is_on

    def take_copies(self) -> list[TimedCopy]:
        """Return what was copied since the last call, and events before and after each copy."""
        host = self._host_part
        return [] if host is None else host.tier.mover.streams.take_copies()

    def host_memory_bytes(self) -> dict[str, int]:
        """Return bytes of host memory by kind, without parameter shards and their copies."""
        found: Counter[str] = Counter()
        for part in self.report():
            if part.tier is not None:
                kinds = dict(part.tier.memory)
                if part.is_host and self.file is not None:
                    kinds["NVMe buffers"] = kinds.pop("optimizer states")
                found.update(kinds)
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}
