"""Offloaded parameter shards in host memory and in a file, read ahead and written back."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam, ReferenceKernel
from support.tiers import ADAM, BF16, CPU, FP32, Space, make_tier
from torch import Tensor

from zero_offload import OffloadError, create_param_tier, param_tier
from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.footprint import param_footprint
from zero_offload.memory.streams import Copy, start_copy
from zero_offload.param_tier import OffloadedParams

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
SHARDS = [(7, 96, BF16), (3, 4128, FP32), (4, 65, torch.float16)]
SHARDS += [(index, 4128, FP32) for index in (8, 9, 10)]
SEGMENTS = [segment for segment, _, _ in SHARDS]


def _make(folder: Path | None, **block: Any) -> OffloadedParams:
    block = {"device": "cpu"} if folder is None else _on_file(folder, **block)
    return create_param_tier(shards=SHARDS, device=CPU, config={"offload_param": block})


def _on_file(folder: Path, **block: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **block}


def _values(segment: int, version: int = 0) -> Tensor:
    numel, dtype = next((n, d) for s, n, d in SHARDS if s == segment)
    generator = torch.Generator().manual_seed(100 * version + segment)
    return torch.randn(numel, generator=generator).to(dtype)


def _fill(tier: OffloadedParams, segments: Sequence[int]) -> None:
    for segment in segments:
        tier.write(segment, 0, _values(segment))


def _fetch(tier: OffloadedParams, segment: int) -> Tensor:
    out = torch.full_like(_values(segment), float("nan"))
    tier.fetch(segment, out).wait()
    return out


KINDS: list[dict[str, Any] | None] = [
    None,
    {},
    {"buffer_count": 1},
    {"buffer_count": 2, "max_in_cpu": 96 + 4128},
]


@pytest.fixture(params=KINDS, ids=["cpu", "nvme", "one-buffer", "some-in-cpu"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadedParams:
    return _make(None if request.param is None else tmp_path, **(request.param or {}))


def test_what_is_written_is_fetched_whatever_was_expected(tier: OffloadedParams) -> None:
    _fill(tier, SEGMENTS)
    for expected in ([], SEGMENTS, SEGMENTS[::-1], [9, 9, 3]):
        tier.expect(expected)
        for segment in SEGMENTS:
            assert torch.equal(_fetch(tier, segment), _values(segment))
    for segment in SEGMENTS:  # writes make read-ahead shards stale
        tier.expect(SEGMENTS)
        tier.write(segment, 0, _values(segment, 1).double())
        assert torch.equal(_fetch(tier, segment), _values(segment, 1))
    assert tier.bytes_fetched == 5 * sum(n * d.itemsize for _, n, d in SHARDS)


def test_parts_of_a_shard_join_what_it_held(tier: OffloadedParams) -> None:
    _fill(tier, SEGMENTS)
    for segment, numel, _ in SHARDS:
        new, expected = _values(segment, 1), _values(segment)
        for start, stop in ((5, 40), (40, 41), (50, numel - 3)):
            tier.write(segment, start, new[start:stop])
            expected[start:stop] = new[start:stop]
        assert torch.equal(_fetch(tier, segment), expected)


def test_what_updates_leave_out_is_read_once(tmp_path: Path) -> None:
    tier = _make(tmp_path)
    tier.write(3, 0, _values(3))
    expected = _values(3).clone()
    read, written = tier.file_traffic()
    for version in range(1, 4):
        new = _values(3, version)
        for start, stop in ((0, 2000), (2000, 4000)):  # an update skips the last 128 elements
            tier.write(3, start, new[start:stop])
        expected[:4000] = new[:4000]
        if version == 1:
            assert torch.equal(_fetch(tier, 3), expected)
        # One read for the skipped elements and one for the fetch. Later writes read nothing.
        nbytes = expected.nbytes
        assert tier.file_traffic() == (read + 2 * nbytes, written + version * nbytes)
    assert torch.equal(_fetch(tier, 3), expected)
    # Each of these writes skips other elements than the one before.
    for start, stop, version in ((4000, 4128, 4), (0, 4000, 5), (0, 4128, 9), (0, 4000, 6)):
        expected[start:stop] = _values(3, version)[start:stop]
        tier.write(3, start, expected[start:stop])
        if version != 9:
            assert torch.equal(_fetch(tier, 3), expected)


def test_large_parts_that_updates_leave_out_are_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(param_tier, "_MAX_KEPT", 100)
    tier = _make(tmp_path)
    tier.write(3, 0, _values(3))
    read, _ = tier.file_traffic()
    expected = _values(3).clone()
    for version in range(1, 4):
        tier.write(3, 0, _values(3, version)[:4000])
        expected[:4000] = _values(3, version)[:4000]
        assert torch.equal(_fetch(tier, 3), expected)
    # one read before each write and one per fetch
    assert tier.file_traffic()[0] == read + 6 * expected.nbytes


def test_the_first_elements_rest_in_host_memory_the_rest_in_the_file(tmp_path: Path) -> None:
    tier = _make(tmp_path, max_in_cpu=96 + 4128 + 64)
    assert [s for s, _, _ in SHARDS if tier.home(s) is not None] == [7, 3]
    assert tier.report()["host parameters"] == 2 * 96 + 4 * 4128
    assert tier.report()["file parameters"] >= 2 * 65 + 3 * 4 * 4128
    home = tier.home(3)
    assert home is not None
    home.copy_(_values(3))
    assert torch.equal(_fetch(tier, 3), _values(3))
    everything = _make(tmp_path, max_in_cpu=10**9)
    assert everything.file is None
    assert list(tmp_path.iterdir()) == []


def test_reads_ahead_take_as_many_buffers_as_are_configured(tmp_path: Path) -> None:
    segments = [3, 8, 9, 10]
    for count in (1, 2, 3):
        tier = _make(tmp_path, buffer_count=count)
        assert tier.file is not None
        writes = tier.file.num_buffer_bytes
        for segment in segments:
            tier.write(segment, 0, _values(segment))
            _fetch(tier, segment)  # waits for the write, which would prevent a read ahead
        read = tier.file.blocks.bytes_read
        for _ in range(3):
            for at, segment in enumerate(segments):
                tier.expect(segments[at:])
                assert list(tier.file.read_ahead) == segments[at : at + count]
                _fetch(tier, segment)
        assert tier.file.num_buffer_bytes == writes + count * 4 * 4128
        read = tier.file.blocks.bytes_read - read
        assert read == 3 * 4 * 4 * 4128  # each shard is read once per pass


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("horizon", [0, 1, 100])
def test_a_shard_is_read_if_no_buffer_can_have_kept_it(
    count: int, horizon: int, tmp_path: Path
) -> None:
    """Forward and backward alternate, so a pass first fetches the most recent shards.

    The number of reads does not depend on what is read ahead.
    """
    tier = _make(tmp_path, buffer_count=count)
    assert tier.file is not None
    segments = [3, 8, 9, 10, 4]
    _fill(tier, segments)
    order = 3 * [*segments, *segments[3:0:-1]]
    expected, last_at = 0, {}
    for at, segment in enumerate(order):
        since = order[last_at.get(segment, -1) + 1 : at]
        if segment not in last_at or len({*since}) >= count:
            expected += _values(segment).nbytes
        last_at[segment] = at
    read, _ = tier.file_traffic()
    for at, segment in enumerate(order):
        assert torch.equal(_fetch(tier, segment), _values(segment))
        tier.expect(order[at + 1 : at + 1 + horizon])
    assert tier.file_traffic()[0] - read == expected
    tier.write(9, 0, _values(9, 1))
    assert torch.equal(_fetch(tier, 9), _values(9, 1))


def test_a_write_beside_a_fetch_makes_its_values_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = _make(tmp_path)
    tier.write(3, 0, _values(3))

    def copy_and_write(out: Tensor, source: Tensor) -> Copy:
        copy = start_copy(out, source)
        tier.write(3, 0, _values(3, 1))  # as the thread of updates may
        return copy

    monkeypatch.setattr(param_tier, "start_copy", copy_and_write)
    assert torch.equal(_fetch(tier, 3), _values(3))
    monkeypatch.undo()
    assert torch.equal(_fetch(tier, 3), _values(3, 1))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_reads_no_longer_expected_free_their_buffers(count: int, tmp_path: Path) -> None:
    tier = _make(tmp_path, buffer_count=count)
    assert tier.file is not None
    _fill(tier, (3, 8, 9, 10))
    tier.file_traffic()  # waits for all writes
    tier.expect([3, 8])
    tier.expect([9, 10])
    assert list(tier.file.read_ahead) == [9, 10][:count]
    for segment in (9, 10, 3, 8):
        assert torch.equal(_fetch(tier, segment), _values(segment))


def test_an_update_in_another_thread_writes_while_shards_are_read(tmp_path: Path) -> None:
    tier = _make(tmp_path, buffer_count=2)
    segments = [3, 8, 9, 10]
    _fill(tier, segments)
    for version in range(1, 15):
        done = {segment: threading.Event() for segment in segments}

        def update(version: int = version, done: dict[int, threading.Event] = done) -> None:
            for segment in segments:
                new = _values(segment, version)
                for start in range(0, 4128, 1000):
                    tier.write(segment, start, new[start : start + 1000])
                done[segment].set()

        worker = threading.Thread(target=update)
        worker.start()
        for at, segment in enumerate(segments):
            tier.expect(segments[at:])
            assert done[segment].wait(20)
            assert torch.equal(_fetch(tier, segment), _values(segment, version))
        worker.join()


def _damage(tier: OffloadedParams, segment: int) -> None:
    assert tier.file is not None
    blocks = tier.file.blocks
    offset = blocks.offset(tier.file.block_of(segment))
    path = f"/proc/self/fd/{blocks.fileno()}"
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, b"\xff" * 8, offset + 16)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_damaged_file_fails_the_fetch_and_is_named(tmp_path: Path, is_expected: bool) -> None:
    tier = _make(tmp_path, buffer_count=2)
    _fill(tier, SEGMENTS)
    for segment in SEGMENTS:
        _fetch(tier, segment)
    _damage(tier, 8)
    tier.expect([8, 9] if is_expected else [])
    with pytest.raises(StorageCorruptError, match=str(tmp_path)):
        _fetch(tier, 8)
    assert torch.equal(_fetch(tier, 9), _values(9))
    tier.write(8, 0, _values(8, 1))  # a complete write makes the shard valid again
    assert torch.equal(_fetch(tier, 8), _values(8, 1))


def test_a_disk_that_fails_stops_the_update_or_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    tier = _make(tmp_path)
    tier.write(3, 0, _values(3))
    _fetch(tier, 3)
    monkeypatch.setattr("zero_offload.memory.storage.os.pwritev", fail)
    tier.write(3, 0, _values(3, 1))
    with pytest.raises(StorageError, match="No space left"):
        _fetch(tier, 3)
    tier.write(8, 0, _values(8, 1))
    with pytest.raises(StorageError, match="No space left"):
        [tier.write(segment, 0, _values(segment, 1)) for segment in (9, 10, 3)]
    for _ in range(8):  # The lost shard keeps raising.
        with pytest.raises(StorageError, match="No space left"):
            _fetch(tier, 3)


@pytest.mark.parametrize(
    ("block", "match"),
    [
        ({"device": "disk"}, "offload_param.device"),
        ({"device": "nvme"}, "offload_param.nvme_path"),
        ({"device": "nvme", "nvme_path": "/nowhere/at/all"}, "does not exist"),
        ({"buffer_count": 0}, "offload_param.buffer_count"),
        ({"max_in_cpu": -1}, "offload_param.max_in_cpu"),
        ({"speed": 3}, "offload_param.speed"),
    ],
)
def test_what_is_not_served_is_refused_by_name(block: dict[str, Any], match: str) -> None:
    if block.get("device") == "nvme":
        block = {"max_in_cpu": 0, **block}
    with pytest.raises(ValueError, match=match):
        create_param_tier(shards=SHARDS, device=CPU, config={"offload_param": block})


def test_a_shard_larger_than_a_buffer_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload_param.buffer_size = 4127 .* 4128"):
        _make(tmp_path, buffer_size=4127)
    place = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_size": 4127}
    with pytest.raises(ValueError, match=r"offload_param.buffer_size = 4127 .* 4128"):
        param_footprint(shards=SHARDS, config={"offload_param": place})
    _make(tmp_path, buffer_size=4128)


class _Store:
    """`ParamStore` that writes to ordinary memory."""

    def __init__(self, space: Space) -> None:
        self.flat = torch.zeros(space.numel, dtype=space.dtype)
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def write(self, start: int, values: Tensor) -> None:
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread().name.split("_")[0])
        self.flat[start : start + values.numel()] = values


def test_a_store_that_fails_fails_the_step() -> None:
    space = Space()
    store = _Store(space)
    space.params = [(start, shard.to("meta")) for start, shard in space.params]
    with pytest.raises(ValueError, match="pass param_store"):
        make_tier(space, kernel=ReferenceAdam())
    tier = make_tier(space, kernel=ReferenceAdam(), param_store=store)
    store.error = OSError(5, "the disk is gone")
    tier.offer_grad(0, space.grad(0))
    tier.step(ADAM, space.every, grad_scale=1.0)
    with pytest.raises(OffloadError, match="the disk is gone"):
        tier.wait_params(0, space.numel)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_padding_of_shards_elsewhere_is_written_as_it_is_given(
    state_dtype: str, tmp_path: Path
) -> None:
    space = Space(BF16)
    store = _Store(space)
    store.flat.fill_(torch.nan)
    space.params = [(start, shard.to("meta")) for start, shard in space.params]
    space.initial.masked_fill_(~space.covered(), 0.0)
    place = {"device": "nvme", "nvme_path": str(tmp_path), "state_dtype": state_dtype}
    make_tier(space, kernel=ReferenceKernel(), param_store=store, **place)
    assert torch.equal(store.flat, space.initial.to(BF16))
