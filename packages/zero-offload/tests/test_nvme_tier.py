"""State in a file: the host tier's numbers bit by bit, in little memory, and disks that fail."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    NamedLion,
    ReferenceAdam,
    ReferenceKernel,
    Space,
    assert_same,
    group_of,
    is_closed,
    make_tier,
    snapshot,
    train,
    wait_until,
)
from torch import optim

from zero_offload import OffloadError
from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.flat.geometry import Geometry
from zero_offload.flat.grads import GradLedger
from zero_offload.memory.block_pipeline import BlockPipeline
from zero_offload.memory.storage import BlockFile
from zero_offload.rules.plain import AdamRule
from zero_offload.rules.resolve import resolve_rule
from zero_offload.settings import NvmeSettings, OffloadSettings
from zero_offload.steppers.file_stepper import FileStepper
from zero_offload.steppers.rule_stepper import BlockLayout
from zero_offload.tiers.twin import TwinTier

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
TIMEOUT_S = 120.0
GROUPS = [group_of(optim.AdamW, lr=1e-2), group_of(optim.AdamW, lr=3e-3, weight_decay=0.1)]
BLOCK_NUMEL = 50  # the space's shards of 256 and 104 elements are 6 and 3 blocks


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_block_numel(monkeypatch, BLOCK_NUMEL)


def _set_block_numel(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr("zero_offload.steppers.file_stepper.BLOCK_NUMEL", numel)


def _make(space: Space, folder: Path, *, kernel: Any = None, **block: Any) -> TwinTier:
    block = {"device": "nvme", "nvme_path": str(folder), **block}
    kernel = ReferenceAdam() if kernel is None else kernel
    return make_tier(space, optim.AdamW, GROUPS, kernel=kernel, **block)


def _host(space: Space, **block: Any) -> TwinTier:
    return make_tier(space, optim.AdamW, GROUPS, kernel=ReferenceAdam(), **block)


def _file(tier: TwinTier) -> BlockFile:
    file = tier.file
    assert file is not None
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("block_numel", [1, 50, 1 << 20])
def test_the_file_gives_the_bits_of_host_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    ratio: float,
    block_numel: int,
) -> None:
    _set_block_numel(monkeypatch, block_numel)
    found, expected = (Space(dtype=dtype, num_groups=2) for _ in range(2))
    nvme, host = _make(found, tmp_path, ratio=ratio), _host(expected, ratio=ratio)
    for space, tier in ((found, nvme), (expected, host)):
        train(tier, space, GROUPS, range(2), grad_scale=0.5)
        train(tier, space, GROUPS, range(2, 4), active=[0, 3, 4])  # pieces 1 and 2 fall behind
        train(tier, space, GROUPS, range(4, 5), active=[1])
        train(tier, space, GROUPS, range(5, 7))
    _assert_same_pieces(snapshot(nvme, found), snapshot(host, expected), found)


def _assert_same_pieces(found: Any, expected: Any, space: Space) -> None:
    """Equal where there are pieces; what a tier holds for padding means nothing."""
    covered = space.covered()
    cut = {k: v[covered] if v.numel() == space.numel else v for k, v in found.items()}
    assert_same(
        cut, {k: v[covered] if v.numel() == space.numel else v for k, v in expected.items()}
    )


RULES: list[tuple[type[optim.Optimizer], dict[str, Any], str]] = [
    (optim.AdamW, {}, "int8"),
    (optim.AdamW, {}, "bfloat16"),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}, "float32"),
    (optim.SGD, {"momentum": 0.9}, "float32"),
    (optim.SGD, {}, "float32"),
    (NamedLion, {}, "float32"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "settings", "state_dtype"), RULES)
def test_every_rule_gives_the_bits_of_host_memory(
    tmp_path: Path,
    cls: type[optim.Optimizer],
    settings: dict[str, Any],
    state_dtype: str,
    dtype: torch.dtype,
) -> None:
    """And so does state that came from host memory after two steps, to its last code."""
    groups = [group_of(cls, lr=lr, **settings) for lr in (1e-2, 3e-3)]
    tiers, spaces = [], [Space(dtype=dtype, num_groups=2) for _ in range(3)]
    for space, device in zip(spaces, ("cpu", "nvme", "nvme"), strict=True):
        block = {"device": device, "nvme_path": str(tmp_path), "state_dtype": state_dtype}
        tiers.append(make_tier(space, cls, groups, kernel=ReferenceKernel(), **block))
    host, nvme, late = tiers
    for tier, space in ((host, spaces[0]), (nvme, spaces[1])):
        train(tier, space, groups, range(2))
    for i in range(len(spaces[2].pieces)):
        late.write_scalars(i, host.read_scalars(i))
    for name in host.state_names():
        late.write_state(name, 0, host.read_state(name, 0, 360))
    for tier, space in zip(tiers, spaces, strict=True):
        train(tier, space, groups, range(2, 4), active=[0, 2, 4])
        train(tier, space, groups, range(4, 5))
    expected = snapshot(host, spaces[0])
    _assert_same_pieces(snapshot(nvme, spaces[1]), expected, spaces[0])
    _assert_same_pieces(snapshot(late, spaces[2]), expected, spaces[0])


def test_compact_states_take_as_much_of_the_disk_as_they_would_of_memory() -> None:
    numel = 1 << 20
    shard = torch.empty(numel, dtype=torch.bfloat16)
    geometry = Geometry(numel, [(0, numel, 0)], [(0, shard)], 1)
    for state_dtype, num_bytes in (("float32", 12.0), ("bfloat16", 8.0), ("int8", 6.0625)):
        rule = resolve_rule(ReferenceKernel(), optim.AdamW, GROUPS, state_dtype)
        assert rule is not None
        layout = BlockLayout(geometry, [rule.for_params(torch.bfloat16)], numel)
        assert sum(layout.record_bytes) == num_bytes * numel


@pytest.mark.parametrize("buffer_count", [1, 2, 3, 9])
def test_any_number_of_buffers_gives_the_same_bits(tmp_path: Path, buffer_count: int) -> None:
    found, expected = Space(num_groups=2), Space(num_groups=2)
    tier = _make(found, tmp_path, buffer_count=buffer_count)
    train(tier, found, GROUPS)
    host = _host(expected)
    train(host, expected, GROUPS)
    _assert_same_pieces(snapshot(tier, found), snapshot(host, expected), found)


@pytest.mark.parametrize("to_nvme", [True, False])
def test_state_crosses_between_file_and_memory_by_any_ranges(tmp_path: Path, to_nvme: bool) -> None:
    spaces = Space(num_groups=2), Space(num_groups=2)
    tiers = _host(spaces[0]), _make(spaces[1], tmp_path)
    (old, new), (source, target) = (tiers, spaces) if to_nvme else (tiers[::-1], spaces[::-1])
    train(old, source, GROUPS, range(3))
    for i in range(len(source.pieces)):
        new.write_scalars(i, old.read_scalars(i))
    bounds = [0, 1, 49, 51, 100, 199, 256, 300, 336, 360]
    for name in old.state_names():
        for a, b in pairwise(bounds):
            new.write_state(name, a, old.read_state(name, a, b))
    for space, tier in ((source, old), (target, new)):
        train(tier, space, GROUPS, range(3, 5))
    _assert_same_pieces(snapshot(new, target), snapshot(old, source), source)


def test_state_is_read_by_any_range(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS)
    whole = tier.read_state("exp_avg", 0, space.numel)
    for a, b in ((0, 0), (3, 4), (49, 51), (0, 50), (50, 100), (255, 257), (120, 359)):
        assert torch.equal(tier.read_state("exp_avg", a, b), whole[a:b])
    with pytest.raises(KeyError, match="no state 'sum'"):
        tier.read_state("sum", 0, 1)


def test_unrounded_master_weights_reach_file_and_parameters(tmp_path: Path) -> None:
    space = Space(dtype=torch.bfloat16)
    tier = _make(space, tmp_path)
    values = torch.arange(40.0) / 7
    tier.write_state("master_weight", 240, values)
    assert torch.equal(tier.read_state("master_weight", 240, 280), values)
    assert torch.equal(space.flat_params()[240:280], values.to(torch.bfloat16))
    assert torch.equal(tier.read_state("master_weight", 0, 240), space.initial[:240])


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


def test_states_start_at_what_their_group_says(tmp_path: Path) -> None:
    groups = [
        group_of(optim.Adagrad, lr=0.1, initial_accumulator_value=value) for value in (0.5, 0.0)
    ]
    space, block = Space(num_groups=2), {"device": "nvme", "nvme_path": str(tmp_path)}
    tier = make_tier(space, optim.Adagrad, groups, kernel=ReferenceKernel(), **block)
    start = tier.read_state("sum", 0, space.numel)
    for a, b, group in space.pieces:
        assert start[a:b].eq(groups[group]["initial_accumulator_value"]).all()
    params = [torch.nn.Parameter(space.initial[a:b].clone()) for a, b, _ in space.pieces]
    members: list[list[torch.nn.Parameter]] = [[], []]
    for param, (a, b, group) in zip(params, space.pieces, strict=True):
        param.grad = space.grad(0)[a:b]
        members[group].append(param)
    for value, found in zip((0.5, 0.0), members, strict=True):
        optim.Adagrad(found, lr=0.1, initial_accumulator_value=value).step()
    train(tier, space, groups, range(1))
    for param, (a, b, _) in zip(params, space.pieces, strict=True):
        torch.testing.assert_close(space.flat_params()[a:b], param.detach())


def test_memory_is_that_of_the_buffers(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path, buffer_count=4)
    train(tier, space, GROUPS, range(1))
    assert tier.host_bytes == 4 * BLOCK_NUMEL * 3 * 4  # 4 buffers, 3 fp32 parts
    (part,) = tier.report()
    assert part.tier is not None
    assert part.tier.memory["master weights"] == 0  # beside them
    assert part.tier.memory["optimizer states"] == tier.host_bytes
    assert _file(tier).num_bytes >= 360 * 12


def test_bytes_moved_per_step_are_those_of_the_touched_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPipeline, "prefetch", lambda self: None)  # of the next step
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(1))
    file = _file(tier)
    tier.read_scalars(0)
    before = file.bytes_read, file.bytes_written
    train(tier, space, GROUPS, range(1, 2), active=[3])  # element 260, in one block of 50
    tier.read_scalars(0)  # the step is over
    moved = file.bytes_read - before[0], file.bytes_written - before[1]
    assert moved == (50 * 12, 50 * 12)


def test_steps_that_queue_up_are_one_stream_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are planned before the first is run; only the last one waits for the file."""
    flushes: list[list[int]] = []
    flush = BlockPipeline.flush

    def noted(pipeline: BlockPipeline) -> None:
        flushes.append(pipeline.reading)
        flush(pipeline)

    space = Space()
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    rule = AdamRule.of(ReferenceAdam(), optim.AdamW)
    stepper = FileStepper(geometry, rule, GROUPS, folder=tmp_path, buffer_count=16)
    grads = GradLedger()
    stepper.write("master_weight", 0, space.initial)
    monkeypatch.setattr(BlockPipeline, "flush", noted)
    grads.add(0, space.numel, space.grad(0), 0)
    steps = [stepper.plan(active, GROUPS, grads) for active in ([0, 1, 2], [3, 4])]
    for number, chunks in enumerate(steps):
        for chunk in chunks:
            stepper.update(chunk, grads, 1.0, space_view(space))
        stepper.settle()
        assert len(flushes) == number
    host = _host(expected := Space())
    train(host, expected, GROUPS, range(1))
    assert torch.equal(space.flat_params(), expected.flat_params())


def space_view(space: Space) -> Callable[[int, int], torch.Tensor]:
    (_, first), (base, second) = space.params
    return lambda a, b: first[a:b] if b <= base else second[a - base : b - base]


class _WatchingAdam(ReferenceAdam):
    """Before block ``i`` is updated, waits until ``i + 1`` is read and ``i - 2`` is written."""

    def __init__(self) -> None:
        super().__init__()
        self.done: set[str] = set()
        self.changed = threading.Condition()
        self.in_time: list[bool] = []
        self.is_watching = False

    def note(self, what: str, record: int) -> None:
        with self.changed:
            self.done.add(f"{what} {record}")
            self.changed.notify_all()

    def adam_step(self, *args: Any, **kwargs: Any) -> None:
        block = len(self.calls)
        wanted = {f"read {3 * (block + 1) + part}" for part in range(3)} if block < 5 else set()
        wanted |= {f"write {3 * (block - 2) + part}" for part in range(3)} if block > 1 else set()
        with self.changed:
            if self.is_watching:
                self.in_time.append(self.changed.wait_for(lambda: wanted <= self.done, TIMEOUT_S))
        super().adam_step(*args, **kwargs)


def test_next_block_is_read_and_last_one_written_during_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of each block waits for its neighbours' transfers: without overlap, for ever."""
    space, kernel = Space(), _WatchingAdam()
    tier = _make(space, tmp_path, kernel=kernel)
    train(tier, space, GROUPS, range(1))  # moments never written are not read
    tier.read_scalars(0)
    read, write = BlockFile.read_block, BlockFile.write_block
    kernel.calls.clear()
    kernel.is_watching = True

    def noted_read(file: BlockFile, record: int, tensor: torch.Tensor) -> None:
        read(file, record, tensor)
        kernel.note("read", record)

    def noted_write(file: BlockFile, record: int, tensor: torch.Tensor) -> None:
        write(file, record, tensor)
        kernel.note("write", record)

    waits: list[float] = []
    monkeypatch.setattr(BlockFile, "read_block", noted_read)
    monkeypatch.setattr(BlockFile, "write_block", noted_write)
    monkeypatch.setattr(BlockFile, "waited", lambda _, seconds: waits.append(seconds))
    train(tier, space, GROUPS, range(1, 2), active=[0, 1, 2])
    tier.read_scalars(0)
    assert kernel.calls == [50, 50, 50, 50, 50, 3]
    assert kernel.in_time == [True] * 6
    # The first read and the last two writes are in the open, of three records each.
    assert len(waits) <= 9


def _damage(tier: TwinTier, record: int) -> str:
    """Write garbage over a record's bytes; the path that messages name."""
    file = _file(tier)
    plain = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
    os.pwrite(plain, b"garbage", file.offset(record))
    os.fsync(plain)
    os.close(plain)
    return file.path


def _assert_dead(tier: TwinTier, space: Space, kind: type[StorageError], match: str) -> None:
    for call in (
        # First what waits for the step's end: its last writes go on when weights are published.
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


def test_damaged_state_stops_the_step(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(2))
    tier.read_state("exp_avg", 0, space.numel)  # what is being written would mend the damage
    path = _damage(tier, 3 * 4 + 1)  # exp_avg of the fifth block
    before = space.flat_params()[200:253].clone()
    _offer_and_step(tier, space, 2)
    _assert_dead(tier, space, StorageCorruptError, f"{path}.*checksum")
    assert torch.equal(space.flat_params()[200:253], before)  # nothing was made of the garbage


def test_damaged_state_is_not_saved(tmp_path: Path) -> None:
    space = Space(num_groups=2)
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(2))
    tier.read_state("exp_avg", 0, space.numel)  # what is being written would mend the damage
    _damage(tier, 3 * 4 + 1)
    for _ in range(2):
        with pytest.raises(StorageCorruptError, match="block 13"):
            tier.read_state("exp_avg", 0, space.numel)
    assert tier.read_state("exp_avg_sq", 0, space.numel).any()  # what is whole can be read


def test_a_full_disk_stops_the_step_and_the_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, other = Space(num_groups=2), Space(num_groups=2)
    tier, host = _make(space, tmp_path), _host(other)
    train(tier, space, GROUPS, range(2))
    saved = {name: tier.read_state(name, 0, space.numel) for name in tier.state_names()}
    scalars = [tier.read_scalars(i) for i in range(5)]

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("zero_offload.memory.direct_io.os.pwritev", full)
        _offer_and_step(tier, space, 2)
        path = _file(tier).path
        _assert_dead(tier, space, StorageError, f"{path}: No space left on device: writing")
    _assert_dead(tier, space, StorageError, "No space left")  # though there is room again
    again = _make(other, tmp_path)
    for new in (again, host):
        for i, found in enumerate(scalars):
            new.write_scalars(i, found)
        for name, values in saved.items():
            new.write_state(name, 0, values)
        train(new, other, GROUPS, range(2, 4))
    _assert_same_pieces(snapshot(again, other), snapshot(host, other), other)


def test_the_last_write_of_a_step_is_heard_of_without_a_further_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space()
    tier = _make(space, tmp_path)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("zero_offload.memory.direct_io.os.pwritev", broken)
    tier.offer_grad(0, space.grad(0))
    tier.step(GROUPS, [4], grad_scale=1.0)  # one block: nothing comes after it
    with pytest.raises(OffloadError, match="Input/output error"):
        tier.read_scalars(4)


def test_nothing_is_left_in_the_folder_and_the_file_closes_with_its_tier(tmp_path: Path) -> None:
    space = Space()
    tier = _make(space, tmp_path)
    train(tier, space, GROUPS, range(1))
    assert list(tmp_path.iterdir()) == []
    fd = _file(tier).fileno()
    del tier
    gc.collect()
    wait_until(lambda: is_closed(fd))


def test_the_device_part_alone_makes_no_file(tmp_path: Path) -> None:
    space = Space()
    tier = _make(space, tmp_path / "never made", ratio=0.0)
    train(tier, space, GROUPS, range(1))


@pytest.mark.parametrize(
    ("cls", "settings", "kernel"),
    [
        (optim.AdamW, {"amsgrad": True}, ReferenceAdam()),
        (optim.AdamW, {}, None),
        (optim.SGD, {}, ReferenceAdam()),
        (optim.RMSprop, {}, None),
    ],
)
def test_an_update_without_a_rule_is_refused_by_name(
    tmp_path: Path, cls: Any, settings: dict[str, Any], kernel: Any
) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError, match=rf'"nvme" does not serve {cls.__name__}.*cpu-adam'):
        make_tier(Space(), cls, [group_of(cls, **settings)], kernel=kernel, **block)


def test_float64_parameters_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"nvme" does not serve AdamW .* float64'):
        _make(Space(dtype=torch.float64), tmp_path)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({}, r"needs offload_optimizer\.nvme_path"),
        ({"nvme_path": ""}, r"needs offload_optimizer\.nvme_path"),
        ({"nvme_path": "/no/such/folder"}, "'/no/such/folder' does not exist"),
        ({"nvme_path": os.devnull}, "not a folder"),
        ({"nvme_path": "/tmp", "buffer_count": 0}, r"offload_optimizer\.buffer_count"),
        ({"nvme_path": "/tmp", "buffer_count": True}, r"offload_optimizer\.buffer_count"),
    ],
)
def test_settings_that_do_not_serve_are_refused_by_name(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_tier(Space(), optim.AdamW, GROUPS, kernel=ReferenceAdam(), device="nvme", **keys)


def test_deepspeeds_nvme_block_is_read() -> None:
    block = {
        "device": "nvme",
        "nvme_path": "/local_nvme",
        "pin_memory": True,
        "buffer_count": 5,
        "fast_init": True,
        "pipeline_read": True,
        "pipeline_write": False,
    }
    settings = OffloadSettings.from_config({"offload_optimizer": block})
    assert settings.nvme == NvmeSettings("/local_nvme", 5)
    assert OffloadSettings.from_config({"offload_optimizer": {"device": "cpu"}}).nvme is None
