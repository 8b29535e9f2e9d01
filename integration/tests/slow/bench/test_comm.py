"""The benchmark over a slow link: who is measured, what of it is held against what, and that
nothing of the link stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.experiments.comm import link as links
from benchmarks.experiments.comm import race
from benchmarks.experiments.comm.link import Link, LinkError, missing_for_link
from benchmarks.experiments.comm.race import (
    rows_of,
    section,
    summed_up,
    verdict,
    verdict_to_plain,
)
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row, own_environment

pytestmark = pytest.mark.usefixtures("forked_ranks")
RATE = 200
AT_BAR: Row = {"rate_mbit": RATE, "ranks_per_node": 2, "job": {"lr": 3e-4}}
PYTHON = sys.executable
KEEP_A_LINK = (
    "import sys\n"
    "from benchmarks.experiments.comm.link import Link\n"
    "with Link.made():\n"
    "    print('made', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def _can_link() -> None:
    reason = missing_for_link()
    if not reason:
        try:
            with Link.made():
                pass
        except LinkError as error:
            reason = str(error)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def link(_can_link: None) -> Iterator[Link]:
    with Link.made() as made:
        yield made


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"zero{pid}n")]


def test_contender_that_nobody_knows_is_refused() -> None:
    done = CliRunner().invoke(command("comm"), ["--only=zero-4"])
    assert done.exit_code == 2
    assert "unknown 'zero-4'" in done.output


def test_bench_without_the_tools_says_what_to_install(tmp_path: Path) -> None:
    without = {"PATH": str(tmp_path)}
    done = CliRunner().invoke(command("comm"), [f"--output={tmp_path}"], env=without)
    assert done.exit_code == 0
    assert done.stdout == "skipped: needs 'ip', which is not on the PATH: apt install iproute2\n"
    assert not list(tmp_path.iterdir())


def test_bench_without_root_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.sys, "platform", "linux")
    monkeypatch.setattr(links.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000, raising=False)
    assert missing_for_link().startswith("needs root")
    monkeypatch.setattr(links.sys, "platform", "darwin")
    assert missing_for_link() == "needs network namespaces of Linux, found darwin"


def test_link_that_the_system_refuses_is_an_error_that_says_which_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "REMOVAL", "cat >/dev/null")
    monkeypatch.setattr(Link, "_make", lambda _: links._do(["ls", "/nonexistent"]))
    with pytest.raises(LinkError, match=r"'ls /nonexistent' failed: .*No such file"), Link.made():
        pass


def found(*times_s: float, sent: float = 1e6, loss: float = 5.0, planned: int | None = None) -> Row:
    return {
        "times_s": list(times_s),
        "cpu_s": 0.5,
        "sent_bytes": [sent, sent * 0.9],
        "planned_bytes": planned,
        "counted_bytes": [None, None],
        "first_loss": 6.0,
        "last_loss": loss,
    }


def test_rounds_are_summed_up_by_node_and_rate() -> None:
    def rank(*times_s: float, sent: int, loss: float) -> Row:
        at_rate = {"times_s": list(times_s), "sent_bytes": sent, "cpu_s": 1.0}
        return {"rates": [{}, at_rate | {"losses": [9.0, loss], "counted_bytes": 10}]}

    first = [rank(1.0, 2.0, sent=100, loss=5.0), rank(7.0, 7.0, sent=300, loss=6.0)]
    second = [rank(3.0, 4.0, sent=200, loss=3.0), rank(7.0, 7.0, sent=500, loss=4.0)]
    row = summed_up([{"ranks": first}, {"ranks": second}], 1, 1, 77)
    assert row == {
        "times_s": [1.0, 2.0, 3.0, 4.0],
        "cpu_s": 1.0,
        "sent_bytes": [75.0, 200.0],
        "planned_bytes": 77,
        "counted_bytes": [10, 10],
        "first_loss": 9.0,
        "last_loss": 3.5,
    }
    assert summed_up([{"ranks": first}, {"failure": "no"}], 1, 1, None) == {"failure": "no"}


def test_each_is_held_against_the_faster_peer_and_its_own_plan() -> None:
    rows = rows_of(
        {
            "bare": found(0.5, 0.4, 0.6, sent=0.0, loss=6.0),
            "fsdp2": found(5.0),
            "deepspeed-3": found(4.5, loss=5.2),
            "zero-3-all": found(1.5, planned=990_000),
            "zero-3-4bit": found(1.6, sent=1.03e6, loss=5.04, planned=1_000_000),
            "zero-3-qgz": {"failure": "failed: out of memory"},
        },
        rate=200,
    )
    assert rows["zero-3-all"]["comm_s"] == pytest.approx(1.0)
    assert rows["zero-3-all"]["to_peer"] == pytest.approx(4.0)
    assert rows["fsdp2"]["to_peer"] == pytest.approx(4.0 / 4.5)
    assert rows["bare"]["comm_s"] is None
    # The direction that differs more: nine tenths of a million, where 990,000 were planned.
    assert rows["zero-3-all"]["deviation"] == pytest.approx(0.9e6 / 0.99e6 - 1)
    assert rows["zero-3-all"]["link_s"] == pytest.approx(0.04)  # a megabyte, 200 Mbit/s
    assert rows["fsdp2"]["deviation"] is None
    is_close = {name: row.get("is_loss_close") for name, row in rows.items()}
    assert is_close == {
        "bare": None,  # it updates nothing
        "fsdp2": True,
        "deepspeed-3": False,
        "zero-3-all": True,
        "zero-3-4bit": True,
        "zero-3-qgz": None,
    }
    assert rows["zero-3-qgz"] == {"failure": "failed: out of memory"}
    run = {"title": "t", **AT_BAR, "contenders": rows}
    assert section(run).table.row_count == 5


def test_bars_are_given_where_they_hold() -> None:
    assert verdict("zero-3-all", 3.3, run=AT_BAR) == "3.3 met"
    assert verdict("zero-3-4bit", 4.4, run=AT_BAR) == "4.5 missed"
    assert verdict("zero-3-qwz", 9.9, run=AT_BAR) == ""
    assert verdict("zero-3-all", 9.9, run={**AT_BAR, "rate_mbit": 1000}) == ""


def test_fine_tuning_has_bars_of_its_own_at_any_rate() -> None:
    run = {"rate_mbit": 1000, "ranks_per_node": 2, "job": {"lr": 1e-5}}
    assert verdict("zero-3-lossless", 3.1, run=run) == "3 met"
    assert verdict("zero-3-lossless-4bit", 8.0, run=run) == "9 missed"
    assert verdict("zero-3-all", 9.9, run=run) == ""
    assert verdict_to_plain("zero-3-lossless", 0.5, run=run) == "0.45 missed"
    assert verdict_to_plain("zero-3-lossless", 0.5, run={**run, "ranks_per_node": 1}) == ""


def test_link_limits_what_nodes_send_each_other_and_not_what_ranks_of_a_node_do(
    link: Link,
) -> None:
    link.limit(RATE)
    across = link.plain_rates(8 * 2**20)
    # A busy machine may reach less, but none may reach more than the burst allows.
    assert all(0 < reached * 8 <= 1.1 * RATE * 1e6 for reached in across)
    assert link.plain_rate_within(64 * 2**20) * 8 > 2 * RATE * 1e6


@pytest.mark.usefixtures("_can_link")
def test_nodes_are_gone_when_the_bench_is_killed() -> None:
    with subprocess.Popen(
        [PYTHON, "-c", KEEP_A_LINK],
        env=own_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as keeping:
        assert keeping.stdout is not None
        assert keeping.stdout.readline() == "made\n"
        assert len(namespaces_of(keeping.pid)) == len(links.NODES)
        keeping.kill()
    limit = time.monotonic() + 120
    while namespaces_of(keeping.pid):
        assert time.monotonic() < limit, "the namespaces stay"
        time.sleep(0.1)


@pytest.mark.usefixtures("_can_link")
def test_bench_counts_on_the_link_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a plain connection reaches is tested above.
    monkeypatch.setattr(Link, "plain_rates", lambda *_: [1.0, 1.0])
    monkeypatch.setattr(Link, "plain_rate_within", lambda *_: 1.0)
    shape = GptShape(layers=2, width=256, heads=4, vocab=128, context=16)
    jobs = race.jobs_of(["zero-3"], shape, 2, steps=2, warmup=1, lr=3e-4)
    race.compare({2: jobs}, [1000], rounds=1, output=tmp_path)
    report = json.loads((tmp_path / "comm.json").read_text())
    (run,) = report["runs"]
    zero = run["contenders"]["zero-3"]
    assert zero["last_loss"] < zero["first_loss"]
    assert zero["comm_s"] is None  # the bare model was not asked for
    assert zero["counted_bytes"] == [zero["planned_bytes"]] * 2
    assert abs(zero["deviation"]) <= report["bars"]["deviation"]
    assert (tmp_path / "comm.png").stat().st_size > 0
    assert namespaces_of(os.getpid()) == []
