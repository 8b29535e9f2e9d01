"""Host files and filters are read as by DeepSpeed's own launcher, which is installed here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import deepspeed.launcher.runner as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_core.errors import ConfigError
from zero_engine.script.hosts import Hosts, filtered, read_host_file

LINES = st.lists(
    st.sampled_from(["a slots=2", "b  slots=3 x", "c\tslots=1", "# a", "", "b", "c slots=", "d 4"])
)
PARTS = st.sampled_from(["a", "b", "c", "d", "a:0", "a:1,0", "b:2,2", "b:3", "c:0", "d:0"])
FILTERS = st.one_of(st.just(""), st.lists(PARTS, min_size=1, max_size=3).map("@".join))


@settings(deadline=None)
@given(LINES, FILTERS, FILTERS)
def test_the_same_slots_are_chosen(lines: list[str], include: str, exclude: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write("\n".join(lines))
        file.flush()
        ours: Hosts | None
        try:
            ours = filtered(read_host_file(Path(file.name)), include=include, exclude=exclude)
        except ConfigError:
            ours = None
    try:
        pool = theirs._parse_hostfile(lines)
        expected = dict(theirs.parse_inclusion_exclusion(pool, include, exclude))
    except ValueError:
        expected = {}
    assert (ours or {}) == {host: tuple(slots) for host, slots in expected.items()}
