"""A malformed configuration is refused with one line that names its key, by both readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from faults.configurations.malformed_configurations import (
    Malformed,
    malformed_configurations,
    write,
)
from zero_core import check_config
from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.reader import read

WORLD_SIZE = 2
MOST_CHARACTERS = 3000  # an unknown key's message lists the known ones


def _as_zero_core(source: Mapping[str, Any] | Path) -> None:
    check_config(source, world_size=WORLD_SIZE)


def _as_deepspeed(source: Mapping[str, Any] | Path) -> None:
    check_config(read(source).core, world_size=WORLD_SIZE)


def outcome(reader: Any, case: Malformed, folder: Path) -> str:
    """Return "refused", or what is wrong with what the reader did."""
    try:
        reader(write(case.content, folder))
    except ConfigError as error:
        said = str(error)
        if case.key not in said:
            return f"no key: {said[:200]}"
        if len(said.splitlines()) != 1 or len(said) > MOST_CHARACTERS:
            return f"not one line: {said[:300]}"
        return "refused"
    except BaseException as error:
        return f"raw {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


@pytest.mark.parametrize("reader", [_as_zero_core, _as_deepspeed])
def test_every_malformed_configuration_is_refused_with_its_key(
    reader: Any, tmp_path: Path, count_faults: Callable[[int, int], None]
) -> None:
    tried = [c for c in malformed_configurations() if reader is _as_zero_core or c.is_for_deepspeed]
    found = [(case, outcome(reader, case, tmp_path)) for case in tried]
    wrong = [f"{case.name} -> {what}" for case, what in found if what != "refused"]
    kinds = Counter(what.partition(":")[0].partition(" ")[0] for _, what in found)
    print(f"{reader.__name__}: {len(tried)} malformed configurations: {dict(kinds)}")
    count_faults(len(tried), len(tried) - len(wrong))
    assert not wrong, f"{len(wrong)} of {len(tried)}:\n" + "\n".join(wrong)
    assert len(tried) >= 400
