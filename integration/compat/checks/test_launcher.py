"""Host files and filters are read as by DeepSpeed's own launcher, which is installed here."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import deepspeed.launcher.runner as theirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from zero_core.errors import ConfigError
from zero_engine.script.deepspeed_options import add_options
from zero_engine.script.hosts import Hosts, filtered, read_host_file

LINES = st.lists(
    st.sampled_from(["a slots=2", "b  slots=3 x", "c\tslots=1", "# a", "", "b", "c slots=", "d 4"])
)
PARTS = st.sampled_from(["a", "b", "c", "d", "a:0", "a:1,0", "b:2,2", "b:3", "c:0", "d:0"])
FILTERS = st.one_of(st.just(""), st.lists(PARTS, min_size=1, max_size=3).map("@".join))


def test_every_option_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        theirs.parse_args(["--help"])
    options = re.findall(r"^ +(-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    names = {
        name for line in options for name in re.findall(r"(?:^|(?<=[ ,]))--?[a-zA-Z][\w-]*", line)
    }
    parser = get_args_parser()
    add_options(parser)
    assert {"--num_gpus", "-H", "--bind_core_list"} <= names
    names.remove("--no_local_rank")  # an option of zero_engine.script.run
    assert names <= {name for action in parser._actions for name in action.option_strings}


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
