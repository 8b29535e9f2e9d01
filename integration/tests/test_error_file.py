"""``zero-engine run`` names the exception that ended a script: it is in torchrun's error file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import own_lines, run_program
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zero_engine.launch.torchrun import _exit_code

SCRIPT = """
import os, pathlib, subprocess, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)  # torchrun ends it
subprocess.run([sys.executable, "-c", "raise KeyError('of a child')"], check=False)
assert not pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).exists(), "a child wrote it"
raise ValueError("batch 7 is empty\\nof 9")
"""


def test_exception_of_one_rank_is_named_in_the_last_line(tmp_path: Path) -> None:
    script, error_file = tmp_path / "script.py", tmp_path / "error.json"
    script.write_text(SCRIPT, encoding="utf-8")
    done = run_program(
        *("run", "--nproc-per-node=2", str(script)),
        expected_code=1,
        more={"TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    lines = own_lines(done.stderr)
    assert lines[-1] == "rank 1 failed first, see above: ValueError: batch 7 is empty"
    assert sum("failed first" in line for line in lines) == 1
    assert lines.count("ValueError: batch 7 is empty") == 1, "the traceback is printed once"
    message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "ValueError: batch 7 is empty\nof 9"
    assert message["errorCode"] == 1
    assert f'File "{script}", line 7' in message["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("first", [0, 1])
def test_error_of_a_rank_goes_before_what_its_peers_say_in_the_same_second(first, tmp_path, capsys):
    failures = {}
    for rank in (0, 1):
        line = "OSError: disk" if rank == first else "CollectiveError: rank 0 is gone"
        path = tmp_path / f"{rank}.json"
        details = {"py_callstack": "...", "timestamp": "7"}
        path.write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
        failures[rank] = ProcessFailure(rank, 10 + rank, 1, str(path))
    assert _exit_code(ChildFailedError("script.py", failures)) == 1
    assert capsys.readouterr().err == f"rank {first} failed first, see above: OSError: disk\n"


def test_signal_is_named_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    failure = ProcessFailure(0, 10, -9, "no file")
    assert _exit_code(ChildFailedError("script.py", {0: failure})) == 137
    assert capsys.readouterr().err == "rank 0 was killed by SIGKILL\n"
