"""The same faults beside torch.distributed.checkpoint and DeepSpeed: no other state is loaded."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from checkpoint_faults import FULL_OVER, KILLED_BESIDE, KILLED_OVER, faults, files_of
from checkpoint_sides import SIDES
from rank_pairs import Answer, RankPair

OURS = "zero-core"
TAG = "step-2"
MOMENTS = 12
Rows = dict[str, dict[str, int]]
"""By what is done: how often what came of it."""


def attempt(name: str, faults_of: str, folder: Path) -> Rows:
    """Try the faults of one kind on a side, in a process of its own."""
    preload(name)
    pair = RankPair(name)
    try:
        found: dict[str, Counter[str]] = {}
        for row, outcomes in KINDS[faults_of](pair, folder):
            found.setdefault(row, Counter()).update(outcomes)
        return {row: dict(counts) for row, counts in found.items()}
    finally:
        pair.close()


def preload(name: str) -> None:
    """Import what the ranks of a side take, before they are forked."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    if name == "DeepSpeed":
        import deepspeed  # noqa: F401
    else:
        import zero_core  # noqa: F401


def _digests(answers: list[Answer | None]) -> list[str]:
    assert all(answer and not answer.error for answer in answers), answers
    return [answer.digest for answer in answers if answer]


def _changed(pair: RankPair, root: Path) -> Iterator[tuple[str, list[str]]]:
    saved, other, copy, marker = (root / n for n in ("saved", "other", "copy", "marker"))
    before = _digests(pair.ask("save", other, TAG))
    _digests(pair.ask("train"))
    wanted = _digests(pair.ask("save", saved, TAG))
    for fault in faults(saved, other, marker):
        assert _digests(pair.ask("load", other, TAG)) == before
        shutil.copytree(saved, copy)
        fault.change(copy)
        answers = pair.ask("load", copy, TAG)
        outcomes = [outcome(answers, [wanted], (*fault.files, str(copy)))]
        if marker.exists():
            marker.rmdir()
            outcomes = ["wrong"]
        elif any(a and a.error and a.digest != old for a, old in zip(answers, before, strict=True)):
            outcomes.append("written")
        yield fault.row, outcomes
        shutil.rmtree(copy)


def _unfinished(pair: RankPair, root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what can be loaded after a save that did not come to its end."""
    saved, copy = root / "saved", root / "copy"
    _digests(pair.ask("save", saved, TAG))
    size = max(saved.joinpath(file).stat().st_size for file in files_of(saved))
    for row, tag, is_killed in (
        (KILLED_OVER, TAG, True),
        (KILLED_BESIDE, "step-3", True),
        (FULL_OVER, TAG, False),
    ):
        for moment in range(MOMENTS):
            shutil.copytree(saved, copy)
            old = _digests(pair.ask("load", copy, TAG))
            new = _digests(pair.ask("train"))
            nbytes = moment * size // MOMENTS
            pair.ask("save_within", copy, tag, nbytes, is_killed)
            answers = pair.ask("load", copy, tag)
            yield row, [outcome(answers, [old, new], (tag, str(copy)))]
            shutil.rmtree(copy)


def outcome(answers: list[Answer | None], wanted: list[list[str]], names: tuple[str, ...]) -> str:
    """Return what came of a load, over both ranks.

    "refused": an error that says which file or checkpoint. "error": one that does not. "wrong":
    loaded, but the state is none of ``wanted``.
    """
    errors = [answer.error for answer in answers if answer and answer.error]
    if any(name and name in error for error in errors for name in names):
        return "refused"
    if errors:
        return "error"
    if None in answers:
        return "hangs"
    return "harmless" if _digests(answers) in wanted else "wrong"


KINDS = {"files": _changed, "saves": _unfinished}


def measured(name: str, faults_of: str, folder: Path) -> Rows:
    """Return what came of each fault on a side."""
    # Each side's libraries are imported by a process that runs nothing else.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(attempt, name, faults_of, folder).result()


@pytest.mark.parametrize("faults_of", KINDS)
def test_damaged_checkpoint_is_refused_or_loads_what_was_saved(faults_of, tmp_path, count_faults):
    rows = measured(OURS, faults_of, tmp_path)
    ours = sum((Counter(counts) for counts in rows.values()), Counter[str]())
    count_faults(sum(ours.values()) - ours["written"], ours["refused"] + ours["harmless"])
    assert set(ours) <= {"refused", "harmless"}, rows


@pytest.mark.parametrize("faults_of", KINDS)
@pytest.mark.parametrize("name", sorted(set(SIDES) - {OURS}))
def test_peers_are_given_the_same_checkpoints(name, faults_of, tmp_path, count_faults):
    assert measured(name, faults_of, tmp_path)
    count_faults(0, 0)  # what others do is measured, not held to anything
