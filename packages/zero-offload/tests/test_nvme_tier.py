"""State in a file: the same bits as in host memory, the bytes moved, and failing disks."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import NamedLion, ReferenceAdam, ReferenceKernel
from support.tiers import (
    BF16,
    FP16,
    FP32,
    Space,
    assert_same,
    copy_state,
    group_of,
    make_tier,
    snapshot,
    train,
    wait_until,
)
from torch import optim

from zero_offload import OffloadError
from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.memory.storage import BlockFile
from zero_offload.steppers.file_stepper import BlockPipeline
from zero_offload.tiers.twin import TwinTier

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
GROUPS = [group_of(optim.AdamW, lr=1e-2), group_of(optim.AdamW, lr=3e-3, weight_decay=0.1)]
BLOCK_NUMEL = 50  # The shards of 256 and 104 elements have 6 and 3 blocks.


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_block_numel(monkeypatch, BLOCK_NUMEL)


def _set_block_numel(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr("zero_offload.steppers.file_stepper.BLOCK_NUMEL", numel)


def _make(
    space: Space, folder: Path | None = None, *, kernel: Any = None, **block: Any
) -> TwinTier:
    """Create a tier whose state is in a file in ``folder``, or in host memory."""
    if folder is not None:
        block = {"device": "nvme", "nvme_path": str(folder), **block}
    return make_tier(space, optim.AdamW, GROUPS, kernel=kernel or ReferenceAdam(), **block)


def _file(tier: TwinTier) -> BlockFile:
    file = tier.file
    assert file is not None
    return file


INITIAL = "initial_accumulator_value"
RULES: list[tuple[type[optim.Optimizer], dict[str, Any], str]] = [
    (optim.AdamW, {}, "float32"),
    (optim.AdamW, {}, "int8"),
    (optim.AdamW, {}, "bfloat16"),
    (optim.Adagrad, {INITIAL: 0.1}, "float32"),
    (optim.SGD, {"momentum": 0.9}, "float32"),
    (optim.SGD, {}, "float32"),
    (NamedLion, {}, "float32"),
]
# Columns: dtype, ratio, block length, buffer count.
BLOCKS = [(FP32, 1.0, 50, 2), (BF16, 0.3, 1 << 20, 1), (FP16, 0.3, 7, 4), (BF16, 1.0, 17, 9)]


@pytest.mark.parametrize(
    ("rule", "dtype", "ratio", "block_numel", "buffer_count"),
    [(RULES[0], BF16, 0.3, 1, 9), *((rule, *blocks) for rule in RULES for blocks in BLOCKS)],
)
def test_every_rule_gives_the_bits_of_host_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: tuple[Any, dict[str, Any], str],
    dtype: torch.dtype,
    ratio: float,
    block_numel: int,
    buffer_count: int,
) -> None:
    """The third tier gets its state from the first, in host memory, after two steps."""
    _set_block_numel(monkeypatch, block_numel)
    cls, settings, state_dtype = rule
    groups = [group_of(cls, lr=lr, **settings) for lr in (1e-2, 3e-3)]
    if INITIAL in settings:
        groups[1][INITIAL] = 0.5
    tiers, spaces = [], [Space(dtype, num_groups=2) for _ in range(3)]
    for space, device in zip(spaces, ("cpu", "nvme", "nvme"), strict=True):
        block = {"device": device, "nvme_path": str(tmp_path), "buffer_count": buffer_count}
        block |= {"ratio": ratio, "state_dtype": state_dtype}
        tiers.append(make_tier(space, cls, groups, kernel=ReferenceKernel(), **block))
        start = tiers[-1].read_state("sum", 0, 360) if INITIAL in settings else space.initial
        assert INITIAL not in settings or start[40] == groups[1][INITIAL] != start[41 + 1]
    for tier, space in zip(tiers[:2], spaces, strict=False):
        train(tier, space, groups, range(2))
    copy_state(tiers[0], tiers[2], spaces[0])
    for tier, space in zip(tiers, spaces, strict=True):
        train(tier, space, groups, range(2, 4), active=[0, 2, 4])
        train(tier, space, groups, range(4, 5))
    expected, *found = (snapshot(t, s, padding=False) for t, s in zip(tiers, spaces, strict=True))
    for result in found:
        assert_same(result, expected)


@pytest.mark.parametrize("to_nvme", [True, False])
def test_state_crosses_between_file_and_memory_by_any_ranges(tmp_path: Path, to_nvme: bool) -> None:
    source, target = Space(num_groups=2), Space(num_groups=2)
    folders = (None, tmp_path) if to_nvme else (tmp_path, None)
    old, new = _make(source, folders[0]), _make(target, folders[1])
    train(old, source, GROUPS, range(3), active=[0, 1, 2, 4])
    copy_state(old, new, source, [1, 49, 51, 100, 199, 256, 300, 336])
    for space, tier in ((source, old), (target, new)):
        train(tier, space, GROUPS, range(3, 5))
    assert_same(snapshot(new, target, padding=False), snapshot(old, source, padding=False))
    values = torch.arange(40.0) / 7
    new.write_state("master_weight", 240, values)
    assert torch.equal(new.read_state("master_weight", 240, 280), values)
    assert torch.equal(target.flat_params()[240:280], values.to(target.dtype))
    whole = old.read_state("exp_avg", 0, source.numel)
    for tier in (old, new):
        for a, b in ((0, 0), (3, 4), (49, 51), (0, 50), (50, 100), (120, 251)):
            assert torch.equal(tier.read_state("exp_avg", a, b), whole[a:b])
        with pytest.raises(KeyError, match="no state 'sum'"):
            tier.read_state("sum", 0, 1)


def test_a_cleared_piece_starts_again_and_its_neighbours_stay(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS)
    before = tier.read_state("exp_avg_sq", 0, space.numel)
    tier.write_scalars(1, {"num_steps": 0})
    after = tier.read_state("exp_avg_sq", 0, space.numel)
    assert not after[37:42].any()
    assert before[37:42].all()
    after[37:42] = before[37:42]
    assert torch.equal(after, before)
    assert tier.read_scalars(1) == {"num_steps": 0}
    assert tier.read_scalars(0) == {"num_steps": 4, "step": 4.0}
    with pytest.raises(ValueError, match=r"scalars \['mu_product'\]"):
        tier.write_scalars(0, {"num_steps": 1, "mu_product": 0.5})


def test_bytes_moved_per_step_are_those_of_the_touched_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise, reads ahead for the next step would count.
    monkeypatch.setattr(BlockPipeline, "prefetch", lambda self: None)
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(1))
    file = _file(tier)
    tier.read_scalars(0)
    before = file.bytes_read, file.bytes_written
    train(tier, space, GROUPS, range(1, 2), active=[3])  # piece 3 is element 260, in a block of 50
    tier.read_scalars(0)  # waits for the step
    moved = file.bytes_read - before[0], file.bytes_written - before[1]
    assert moved == (50 * 12, 50 * 12)


def test_next_block_is_read_and_last_one_written_during_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits until the next block is read, and the block two before is written."""
    done: set[tuple[str, int]] = set()

    class Watch(ReferenceAdam):
        def adam_step(self, *args: Any, **kwargs: Any) -> None:
            block = len(self.calls)
            wanted = {("read", 3 * block + 3 + part) for part in range(3) if block < 5}
            wanted |= {("write", 3 * block - 6 + part) for part in range(3) if block > 1}
            wait_until(lambda: not is_watching or wanted <= done)
            super().adam_step(*args, **kwargs)

    def note(what: str) -> None:
        call = getattr(BlockFile, f"{what}_block")

        def noted(file: BlockFile, record: int, tensor: torch.Tensor) -> None:
            call(file, record, tensor)
            done.add((what, record))

        monkeypatch.setattr(BlockFile, f"{what}_block", noted)

    space, kernel, is_watching = Space(), Watch(), False
    tier = _make(space, tmp_path, kernel=kernel)
    train(tier, space, GROUPS, range(1))  # reads no moments, because none were written
    tier.read_scalars(0)
    kernel.calls.clear()
    is_watching = True
    waits: list[float] = []
    note("read")
    note("write")
    monkeypatch.setattr(BlockFile, "waited", lambda _, seconds: waits.append(seconds))
    train(tier, space, GROUPS, range(1, 2), active=[0, 1, 2])
    tier.read_scalars(0)
    assert kernel.calls == [50, 50, 50, 50, 50, 3]
    # Only the first read and the last two writes, of three records each, do not overlap.
    assert len(waits) <= 9


def _damage(tier: TwinTier, record: int) -> str:
    """Overwrite a record's bytes, and return the path that messages contain."""
    file = _file(tier)
    plain = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
    os.pwrite(plain, b"garbage", file.offset(record))
    os.fsync(plain)
    os.close(plain)
    return file.path


def _assert_dead(tier: TwinTier, space: Space, kind: type[StorageError], match: str) -> None:
    for call in (
        # This call waits for the step's last writes, which follow the publication of weights.
        lambda: tier.read_state("master_weight", 0, 1),
        lambda: tier.wait_params(0, space.numel),
        lambda: tier.step(GROUPS, [], grad_scale=1.0),
        lambda: tier.offer_grad(0, space.grad(0)),
        lambda: tier.read_scalars(0),
    ):
        with pytest.raises(OffloadError, match=match) as caught:
            call()
        assert isinstance(caught.value.__cause__, kind)


def _offer_and_step(tier: TwinTier, space: Space, step: int) -> None:
    tier.offer_grad(0, space.grad(step))
    tier.step(GROUPS, range(5), grad_scale=1.0)


def _fail_writes(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("zero_offload.memory.storage.os.pwritev", fail)


def test_damaged_state_is_neither_saved_nor_used_by_a_step(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(2))
    tier.read_state("exp_avg", 0, space.numel)  # waits for writes, which would repair the damage
    path = _damage(tier, 3 * 4 + 1)  # exp_avg of block 4
    for _ in range(2):
        with pytest.raises(StorageCorruptError, match="block 13"):
            tier.read_state("exp_avg", 0, space.numel)
    assert tier.read_state("exp_avg_sq", 0, space.numel).any()  # undamaged states can be read
    before = space.flat_params()[200:253].clone()
    _offer_and_step(tier, space, 2)
    _assert_dead(tier, space, StorageCorruptError, f"{path}.*checksum")
    assert torch.equal(space.flat_params()[200:253], before)  # corrupt data was not used


def test_a_full_disk_stops_the_step_and_the_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, other = Space(num_groups=2), Space(num_groups=2)
    tier, host = _make(space, tmp_path), _make(other)
    train(tier, space, GROUPS, range(2))
    copy_state(tier, host, space)
    with monkeypatch.context() as patch:
        _fail_writes(patch, errno.ENOSPC)
        _offer_and_step(tier, space, 2)
        path = _file(tier).path
        _assert_dead(tier, space, StorageError, f"{path}: No space left on device: writing")
    _assert_dead(tier, space, StorageError, "No space left")  # even if the disk has room again
    again = _make(restored := Space(num_groups=2), tmp_path)
    copy_state(host, again, other)
    train(host, other, GROUPS, range(2, 4))
    train(again, restored, GROUPS, range(2, 4))
    assert_same(snapshot(again, restored, padding=False), snapshot(host, other, padding=False))


def test_the_last_write_of_a_step_is_heard_of_without_a_further_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space()
    tier = _make(space, tmp_path)
    _fail_writes(monkeypatch, errno.EIO)
    tier.offer_grad(0, space.grad(0))
    tier.step(GROUPS, [4], grad_scale=1.0)  # piece 4 is in one block
    with pytest.raises(OffloadError, match="Input/output error"):
        tier.read_scalars(4)


def test_nothing_is_left_in_the_folder_and_the_file_closes_with_its_tier(tmp_path: Path) -> None:
    space = Space()
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(1))
    assert list(tmp_path.iterdir()) == []
    # With ratio 0 no file is created.
    train(_make(space, tmp_path / "never made", ratio=0.0), space, GROUPS, range(1))
    fd = _file(tier).fileno()
    del tier
    gc.collect()
    wait_until(lambda: not Path(f"/proc/self/fd/{fd}").is_symlink())


@pytest.mark.parametrize(
    ("cls", "settings", "kernel", "dtype"),
    [
        (optim.AdamW, {"amsgrad": True}, ReferenceAdam(), FP32),
        (optim.AdamW, {}, None, FP32),
        (optim.SGD, {}, ReferenceAdam(), FP32),
        (optim.RMSprop, {}, None, FP32),
        (optim.AdamW, {}, ReferenceAdam(), torch.float64),
    ],
)
def test_an_update_without_a_rule_is_refused_by_name(
    tmp_path: Path, cls: Any, settings: dict[str, Any], kernel: Any, dtype: torch.dtype
) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    groups = [group_of(cls, **settings)]
    with pytest.raises(ValueError, match=rf'"nvme" does not serve {cls.__name__}.*cpu-adam'):
        make_tier(Space(dtype), cls, groups, kernel=kernel, **block)
