"""Blocks in a file: exact contents, and disk errors."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import PRELOADED
from support.tiers import wait_until
from torch import Tensor

from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.memory.storage import ALIGNMENT, BlockFile, aligned_empty, bytes_of

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
TIMEOUT_S = 120.0
ODD_SIZES = (1, 511, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT + 17, (5 << 20) + 3)


def _random(num_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def _aligned(values: Tensor, shift: int = 0) -> Tensor:
    """Copy the values to memory that starts ``shift`` bytes after an aligned address."""
    memory = aligned_empty(values.numel() + shift)[shift:]
    return memory.copy_(values)


def _is_closed(fd: int) -> bool:
    return not Path(f"/proc/self/fd/{fd}").is_symlink()


def _check(file: BlockFile, block: int, expected: Tensor) -> None:
    found = torch.full_like(expected, 7)
    file.read(block, found).wait()
    assert torch.equal(found, expected)


def _fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(f"zero_offload.memory.storage.os.{call}", fail)


def _gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay writes until the event is set."""
    gate, real = threading.Event(), os.pwritev

    def gated(fd: int, views: list[memoryview], at: int) -> int:
        assert gate.wait(TIMEOUT_S)
        return real(fd, views, at)

    monkeypatch.setattr("zero_offload.memory.storage.os.pwritev", gated)
    return gate


def _refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def fcntl_without_direct(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr("zero_offload.memory.storage.fcntl.fcntl", fcntl_without_direct)


@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_of_any_length_and_alignment_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool, shift: int
) -> None:
    if not is_direct:
        _refuse_direct(monkeypatch)
    file = BlockFile(tmp_path, ODD_SIZES)
    blocks = [_random(n, seed=n) for n in ODD_SIZES]
    for transfer in [file.write(i, _aligned(b, shift)) for i, b in enumerate(blocks)]:
        transfer.wait()
    found = [_aligned(torch.zeros_like(block), shift) for block in blocks]
    for transfer in [file.read(i, into) for i, into in enumerate(found)]:
        transfer.wait()
    for i, block in enumerate(blocks):
        assert torch.equal(found[i], block), ODD_SIZES[i]
    assert file.bytes_read == file.bytes_written == sum(ODD_SIZES)
    file.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3 * ALIGNMENT), min_size=1, max_size=5), st.data())
def test_any_order_of_writes_and_reads_behaves_like_memory(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    file = BlockFile(tmp_path_factory.getbasetemp(), sizes)
    expected = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    for seed in range(data.draw(st.integers(1, 8))):
        block = data.draw(st.integers(0, len(sizes) - 1))
        if data.draw(st.booleans()):
            expected[block] = _random(sizes[block], seed)
            file.write(block, expected[block]).wait()
        _check(file, block, expected[block])
    file.close()


def test_a_read_leaves_the_memory_beside_its_tensor_alone(tmp_path: Path) -> None:
    memory, file = aligned_empty(3 * ALIGNMENT).fill_(9), BlockFile(tmp_path, [100, 40])
    before, inside, after = memory.split([ALIGNMENT, 100, 2 * ALIGNMENT - 100])
    file.write(0, _random(100)).wait()
    file.read(0, inside).wait()
    assert torch.equal(inside, _random(100))
    assert before.eq(9).all()
    assert after.eq(9).all()
    read = file.bytes_read
    _check(file, 1, torch.zeros(10))  # reads zeros without a transfer
    assert file.bytes_read == read


def test_direct_io_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder has no direct I/O")
    file = BlockFile(tmp_path, [10])
    assert file.is_direct
    assert fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT


def test_a_file_system_without_direct_io_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_direct(monkeypatch)
    with pytest.warns(RuntimeWarning, match="no direct I/O.*page cache") as caught:
        file = BlockFile(tmp_path, [10])
    assert len(caught) == 1
    assert not file.is_direct


def test_the_file_has_no_name_and_its_room_is_given_back(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, [5000, 3000])
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file.fileno())
    assert file.num_bytes == status.st_size == 3 * ALIGNMENT
    assert status.st_blocks * 512 >= file.num_bytes
    fd = file.fileno()
    file.close()
    file.close()
    assert _is_closed(fd)
    dropped = BlockFile(tmp_path, [100])
    dropped.write(0, _random(100)).wait()
    fd = dropped.fileno()
    del dropped
    wait_until(lambda: _is_closed(fd))


def _write_and_be_killed(folder: Path) -> None:
    file = BlockFile(folder, [1 << 20])
    file.write(0, torch.ones(1 << 18)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    # The server of `support.ranks` has already imported torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    killed = context.Process(target=_write_and_be_killed, args=(tmp_path,), daemon=True)
    killed.start()
    killed.join(timeout=600)
    assert killed.exitcode == -9
    assert list(tmp_path.iterdir()) == []


def test_files_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    files = [BlockFile(tmp_path, [100], name="state") for _ in range(3)]
    assert len({file.path for file in files}) == 3
    for seed, file in enumerate(files):
        file.write(0, _random(100, seed)).wait()
    for seed, file in enumerate(files):
        _check(file, 0, _random(100, seed))


def test_damage_on_the_disk_is_found(tmp_path: Path) -> None:
    sizes = [1000, 5 << 20]
    file = BlockFile(tmp_path, sizes)
    for block, size in enumerate(sizes):
        file.write(block, _random(size)).wait()
    at = ALIGNMENT + (4 << 20) + 5  # in the second system call of block 1
    plain = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
    byte = os.pread(plain, 1, at)
    os.pwrite(plain, bytes([byte[0] ^ 1]), at)
    os.fsync(plain)
    os.close(plain)
    file.read(0, torch.empty(1000, dtype=torch.uint8)).wait()
    with pytest.raises(StorageCorruptError, match=r"block 1 at offset 4096.*other disk") as caught:
        file.read(1, torch.empty(5 << 20, dtype=torch.uint8)).wait()
    assert caught.value.path == file.path
    assert file.path in repr(caught.value)


def test_a_write_that_the_kernel_refuses_names_file_operation_and_offset(tmp_path: Path) -> None:
    """A limit on file sizes makes the operating system refuse the write."""
    file = BlockFile(tmp_path, [ALIGNMENT, 16 << 20])
    before = _random(16 << 20)
    file.write(1, before).wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        transfer = file.write(1, before)
        with pytest.raises(StorageError, match=r"writing block 1.*offset 4096.*Mak") as caught:
            transfer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.path == file.path
    assert file.path in repr(caught.value)
    with pytest.raises(StorageError, match="writing block 1"):  # the block is partly written
        file.read(1, torch.empty(16 << 20, dtype=torch.uint8)).wait()
    file.write(1, before).wait()  # a complete write makes the block valid again
    file.read(1, torch.empty(16 << 20, dtype=torch.uint8)).wait()


@pytest.mark.parametrize(
    ("call", "code"), [("preadv", errno.EIO), ("pwritev", errno.ENOSPC)], ids=["read", "write"]
)
def test_errors_of_the_disk_surface_at_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    file = BlockFile(tmp_path, [100])
    file.write(0, _random(100)).wait()
    _fail(monkeypatch, call, code)
    start = file.read if call == "preadv" else file.write
    transfer = start(0, _random(100))
    for _ in range(2):
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            transfer.wait()
    assert caught.value.errno == code
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("most", [ALIGNMENT, 3 * ALIGNMENT + 100])
def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each system call transfers at most ``most`` bytes."""
    counts: dict[str, int] = {"preadv": 0, "pwritev": 0}

    def limited(name: str) -> Callable[[int, list[memoryview], int], int]:
        real = getattr(os, name)

        def call(fd: int, views: list[memoryview], at: int) -> int:
            counts[name] += 1
            wanted = len(views[0])
            moved: int = real(fd, [views[0][: min(wanted, most - most % ALIGNMENT)]], at)
            return moved if moved == wanted else min(moved, most)

        return call

    file = BlockFile(tmp_path, [40_000])
    for name in counts:
        monkeypatch.setattr(f"zero_offload.memory.storage.os.{name}", limited(name))
    file.write(0, _aligned(_random(40_000))).wait()
    found = _aligned(torch.zeros(40_000, dtype=torch.uint8))
    file.read(0, found).wait()
    assert torch.equal(found, _random(40_000))
    assert min(counts.values()) > 2


def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, [3 * ALIGNMENT])
    file.write(0, _random(3 * ALIGNMENT)).wait()
    os.truncate(file.fileno(), ALIGNMENT)
    with pytest.raises(StorageError, match="before all bytes were moved: reading block 0"):
        file.read(0, torch.empty(3 * ALIGNMENT, dtype=torch.uint8)).wait()


def test_a_disk_without_the_room_is_found_at_construction(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"bytes where \d+ are free.*nvme_path") as caught:
        BlockFile(tmp_path, [1 << 60])
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    open_files = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert not [path for path in open_files if tmp_path in path.parents]


def test_a_folder_that_does_not_serve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, match in (("missing", "does not exist"), ("file", "not a folder")):
        with pytest.raises(ValueError, match=match):
            BlockFile(tmp_path / folder, [10])
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may write anywhere, so access() is replaced
        monkeypatch.setattr("zero_offload.memory.storage.os.access", lambda *_: False)
    with pytest.raises(ValueError, match="not writable"):
        BlockFile(tmp_path, [10])
    tmp_path.chmod(0o700)


def test_a_tensor_of_another_length_or_place_is_refused(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, [40])
    with pytest.raises(ValueError, match="has 40 bytes, the tensor has 44"):
        file.read(0, torch.empty(11))
    with pytest.raises(ValueError, match="contiguous host memory"):
        file.write(0, torch.empty(20)[::2]).wait()
    with pytest.raises(ValueError, match="contiguous host memory"):
        bytes_of(torch.empty(10, device="meta"))


def test_one_block_has_one_transfer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, gate = BlockFile(tmp_path, [100, 100]), _gate(monkeypatch)
    first = file.write(0, _random(100))
    other = file.write(1, _random(100))
    assert not first.is_done
    with pytest.raises(ValueError, match="is under way"):
        file.read(0, _random(100))
    gate.set()
    first.wait()
    other.wait()
    file.read(0, _random(100)).wait()


def test_running_time_is_counted_once_however_many_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 7.0])  # one call when the first transfer starts and one when the last ends
    monkeypatch.setattr("zero_offload.memory.storage.time.perf_counter", lambda: next(times))
    file = BlockFile(tmp_path, [])
    with file.running():
        with file.running():
            pass
        assert file.io_s == 0
    assert file.io_s == 6.0


def test_only_who_has_to_wait_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, gate = BlockFile(tmp_path, [100]), _gate(monkeypatch)

    def clock() -> float:
        """Count calls as seconds, and open the gate when the main thread waits."""
        if threading.current_thread() is threading.main_thread():
            gate.set()
        return float(next(seconds))

    seconds = itertools.count()
    monkeypatch.setattr("zero_offload.memory.storage.time.perf_counter", clock)
    transfer = file.write(0, _random(100))
    transfer.wait()
    waited = file.waited_s
    assert waited > 0
    assert transfer.is_done
    transfer.wait()
    assert file.waited_s == waited
    assert file.io_s > 0
