"""What releases of DeepSpeed did wrong in silence, done by this engine as by plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scars import NUMBERS, run_all

from zero_core.testing import spawn
from zero_engine import deepspeed


def _run(rank: int, world_size: int, folder: str) -> None:
    found = run_all(deepspeed, NUMBERS, rank, world_size, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found wrong, by number."""
    folder = tmp_path_factory.mktemp("scars")
    spawn(_run, 2, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("number", NUMBERS)
def test_engine_does_right_what_deepspeed_did_wrong(
    found: list[dict[str, str]], number: int
) -> None:
    assert [rank[str(number)] for rank in found] == ["", ""]
