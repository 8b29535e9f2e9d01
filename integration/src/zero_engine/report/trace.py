"""A trace of recorded steps for Perfetto (ui.perfetto.dev), in Chrome's JSON format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_engine.report.run import Run

_LANES = {"compute": 0, "gather": 1, "reduce": 2, "copies": 3, "ranks": 4, "host": 5, "file": 6}


def write_trace(run: Run, path: Path) -> None:
    """Write the steps whose course was recorded: a process per rank, a thread per lane."""
    text = json.dumps({"traceEvents": list(_events(run)), "displayTimeUnit": "ms"})
    path.write_text(text, encoding="utf-8")


def _events(run: Run) -> Iterator[dict[str, Any]]:
    begin = min((d.started_at for rank in run.ranks for d in rank.details), default=0.0)
    for rank in run.ranks:
        pid = rank.run.rank
        yield _name("process_name", pid, 0, f"rank {pid}")
        for lane, tid in _LANES.items():
            yield _name("thread_name", pid, tid, lane)
        for detail in rank.details:
            offset = detail.started_at - begin
            for lane, name, start, stop, is_wait in detail.spans:
                yield {
                    "name": f"wait: {name}" if is_wait else name,
                    "cat": "wait" if is_wait else lane,
                    "ph": "X",
                    "pid": pid,
                    "tid": _LANES.get(lane, len(_LANES)),
                    "ts": round((offset + start) * 1e6, 3),
                    "dur": round((stop - start) * 1e6, 3),
                    "args": {"step": detail.step},
                    **({"cname": "terrible"} if is_wait else {}),
                }
            for at, held, _ in detail.memory:
                yield {
                    "name": "memory",
                    "ph": "C",
                    "pid": pid,
                    "ts": round((offset + at) * 1e6, 3),
                    "args": {"MiB": round(held / 2**20, 2)},
                }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
