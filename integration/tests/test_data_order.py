"""The order of training windows, which depends on seed, step and rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_engine.train.data import Corpus, prepare_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    text = "\n".join(f"line {i} of a text with {i * i} words" for i in range(2000))
    prepare_corpus(text, root, vocab_size=300, context=16)
    return root


def rows(corpus: Corpus, micro_steps: range, *, world_size: int, size: int) -> torch.Tensor:
    """Return the windows of these micro-steps, in the order of the ranks."""
    batches = [
        corpus.batch(step, rank=rank, world_size=world_size, micro_batch_size=size)
        for step in micro_steps
        for rank in range(world_size)
    ]
    return torch.cat(batches)


def test_batch_depends_on_nothing_before_it(folder: Path) -> None:
    one, other = Corpus.open(folder, seed=3), Corpus.open(folder, seed=3)
    for step in range(5):
        one.batch(step, rank=0, world_size=2, micro_batch_size=4)
    expected = one.batch(5, rank=1, world_size=2, micro_batch_size=4)
    assert torch.equal(other.batch(5, rank=1, world_size=2, micro_batch_size=4), expected)


def test_world_size_does_not_change_the_order(folder: Path) -> None:
    corpus = Corpus.open(folder, seed=0)
    alone = rows(corpus, range(6), world_size=1, size=4)
    assert torch.equal(rows(corpus, range(3), world_size=2, size=4), alone)


def test_epoch_visits_every_window_once_and_the_next_in_another_order(folder: Path) -> None:
    corpus = Corpus.open(folder, seed=0)
    num_windows = len(corpus.train)
    two = rows(corpus, range(2 * num_windows), world_size=1, size=1)
    first, second = two[:num_windows], two[num_windows:]
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(corpus.train.tolist())


def test_seed_changes_the_order(folder: Path) -> None:
    batches = [
        Corpus.open(folder, seed=seed).batch(0, rank=0, world_size=1, micro_batch_size=8)
        for seed in (0, 1)
    ]
    assert not torch.equal(*batches)


def test_held_out_text_is_not_trained_on(folder: Path) -> None:
    corpus = Corpus.open(folder, seed=0)
    trained = {tuple(row) for row in corpus.train.tolist()}
    assert not trained & {tuple(row) for row in corpus.held_out.tolist()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_evaluates_equally_often(folder: Path, world_size: int) -> None:
    corpus = Corpus.open(folder, seed=0)
    counts = {
        len(list(corpus.held_out_batches(7, rank=rank, world_size=world_size, micro_batch_size=2)))
        for rank in range(world_size)
    }
    assert len(counts) == 1
