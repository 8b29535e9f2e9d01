"""The process that reads a checkpoint of DeepSpeed's: ``python -m ...child``.

It reads a request, JSON, from stdin. It prints its progress on stderr and one line of JSON on
stdout: empty, or what is wrong. It is killed when its parent dies.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from zero_engine.deepspeed_import.isolation import (
    die_with_parent,
    leave_network,
    limit_memory,
    limit_processor_time,
    printable,
)


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Import the checkpoint ``place`` into ``output``, and return the answer."""
    # Before torch starts threads, which would keep the network.
    if not leave_network():
        print(
            "note: this system permits no network namespace: files are read with the network there",
            file=sys.stderr,
        )
    die_with_parent(request["parent"])  # not before: new credentials may clear it
    from zero_core.errors import ZeroError
    from zero_engine.deepspeed_import.reading import read_source, size_of
    from zero_engine.deepspeed_import.writing import write_source

    place = Path(request["place"])
    try:
        size = size_of(place)
        limit_memory(size)
        limit_processor_time(size)
        print(f"reading {place} ({size / 1e9:.2f} GB)", file=sys.stderr, flush=True)
        source = read_source(place, request["frozen"])
        write_source(source, Path(request["output"]), request["tag"], request["optimizer"])
    except ZeroError as error:
        return {"error": printable(str(error)), "kind": type(error).__name__}
    except (OSError, MemoryError) as error:
        return {"error": printable(f"{place}: {error!r}"), "kind": "CheckpointError"}
    except Exception as error:  # whatever values of an attacker's make the program raise
        text = f"{place} is not as DeepSpeed writes its checkpoints: {type(error).__name__} {error}"
        return {"error": printable(text), "kind": "CheckpointCorruptError"}
    return {}


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is the answer alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write(json.dumps(main(json.load(sys.stdin))))
    answers.close()
