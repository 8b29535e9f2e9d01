"""The process that reads a checkpoint of DeepSpeed's: ``python -m ...child JSON``.

It prints its progress on stderr and one line of JSON on stdout: the new checkpoint's folder, or
what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zero_engine.deepspeed_import.isolation import leave_network, limit_memory


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Import ``directory`` into ``output``, and return the answer."""
    # Before torch starts threads, which would keep the network.
    if not leave_network():
        print(
            "note: this system permits no network namespace: files are read with the network there",
            file=sys.stderr,
        )
    from zero_core.errors import ZeroError
    from zero_engine.deepspeed_import.reading import find_place, read_source
    from zero_engine.deepspeed_import.writing import write_source

    try:
        place = find_place(Path(request["directory"]), request["tag"])
        sizes = [path.stat().st_size for path in place.rglob("*.pt") if path.is_file()]
        limit_memory(sum(sizes))
        print(f"reading {place} ({sum(sizes) / 1e9:.2f} GB)", file=sys.stderr, flush=True)
        source = read_source(place, request["frozen"])
        tag = place.resolve().name
        written = write_source(source, Path(request["output"]), tag, request["optimizer"])
        return {
            "place": str(written),
            "params": len(source.params),
            "steps": source.model.get("global_steps"),
        }
    except ZeroError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except (OSError, MemoryError) as error:
        return {"error": f"{request['directory']}: {error!r}", "kind": "CheckpointError"}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
