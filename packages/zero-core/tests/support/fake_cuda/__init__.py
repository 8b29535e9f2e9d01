"""torch's own CUDA build on a machine without a GPU: what runs, and how tests look at it.

`support.fake_cuda.build` puts the libraries into an environment. Every program there then has 8
"H100", above which torch's allocator, streams, autograd threads and ``ProcessGroupNCCL`` are the
real ones. What is wrong on a GPU goes wrong here:

- An operator is a **job** of the current stream: a thread runs the CPU's kernel later, with the
  CPU's bits. A job holds addresses, no tensors. A kernel that the CPU doesn't have is an error.
- Device memory is the device's own. A host that reads it dies of SIGSEGV, with a line that says so.
- A block that torch's allocator takes back is overwritten with NaN in the order of its stream: a
  missing ``wait_event`` or ``record_stream`` shows. New memory is NaN, too, pinned memory included.
- Copies to and from pinned memory happen later; pageable memory is staged on the way up, and the
  host waits on the way down.
- A collective is a job that meets its peers' over shared memory. A peer that is in another one, or
  dead, makes it wait until the communicator is aborted.
- An error in a job is raised by the next call that touches the device.

Environment: ``FAKE_CUDA_DEVICES``, ``FAKE_CUDA_CAPACITY`` (bytes of each), ``FAKE_CUDA_SEED``,
``FAKE_CUDA_KERNEL_US`` and ``FAKE_CUDA_COPY_US`` (the most that a job is delayed).
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@functools.cache
def _library() -> ctypes.CDLL:
    path = next((Path(torch.__file__).parent / "lib").glob("libcudart.so.*"))
    library = ctypes.CDLL(str(path))
    library.fake_counters.restype = library.fake_trace.restype = ctypes.c_char_p
    library.fake_contexts.restype = ctypes.c_uint64
    library.fake_drain.argtypes = [ctypes.c_double]
    library.fake_set_delays.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
    library.fake_set_capacity.argtypes = [ctypes.c_int64]
    return library


def set_delays(*, seed: int = 0, kernel_s: float = 0.0, copy_s: float = 0.0) -> None:
    """Delay each kernel by a random time up to ``kernel_s``, each copy up to ``copy_s`` (seconds).

    Collectives count as copies. The delay of a stream's n-th job depends on ``seed``, the device,
    the stream and n.
    """
    _library().fake_set_delays(seed, int(kernel_s * 1e6), int(copy_s * 1e6))


@contextmanager
def held(kind: Literal["kernels", "copies"]) -> Iterator[None]:
    """Hold back every kernel, or every copy, that has not begun, until the end of the context."""
    _library().fake_hold(kind == "copies", 1)
    try:
        yield
    finally:
        _library().fake_hold(kind == "copies", 0)


def set_capacity(num_bytes: int) -> None:
    """Limit the memory of each device (at first 8 GiB). Beyond: `torch.OutOfMemoryError`."""
    _library().fake_set_capacity(num_bytes)


def contexts() -> list[int]:
    """Return the devices that were used, or were made a thread's current device."""
    bits = _library().fake_contexts()
    return [index for index in range(64) if bits >> index & 1]


def forget_contexts() -> None:
    """Consider all devices unused until they are used again."""
    _library().fake_forget_contexts()


def drain(limit_s: float = 10.0) -> None:
    """Wait until every stream has run its jobs, at most ``limit_s`` seconds each."""
    _library().fake_drain(limit_s)


@dataclass(frozen=True)
class Counters:
    """Work of a device since `reset_counters`."""

    launches: int  # jobs other than events, waits and overwritten free memory
    by_name: dict[str, int]  # "aten::mm", "copy up", "copy down", "nccl all_gather", ...
    bytes_read: int  # of the tensors that jobs read
    bytes_written: int  # of the tensors that jobs wrote; what is updated in place counts here alone
    # How often the host waited, by kind: "event", "stream" and "device" (synchronizations), "item"
    # (a value or shape that the host needs) and "copy" (blocking, or down to memory that is not
    # pinned). "staged copy": not blocking, of memory that is not pinned, which the host copies.
    syncs: dict[str, int]
    stacks: list[tuple[str, str]]  # kind and Python stack, innermost frame first


def reset_counters(*, with_stacks: bool = False) -> None:
    """Count from zero on all devices."""
    _library().fake_reset_counters(with_stacks)


def counters(device: int = 0) -> Counters:
    """Return what ``device`` did since `reset_counters`."""
    values = json.loads(_library().fake_counters(device))
    values["stacks"] = [tuple(stack) for stack in values["stacks"]]
    return Counters(**values)


class TraceRecord(NamedTuple):
    """One call of the host, or one job.

    Attributes:
        kind: one of

            - ``"stream"``: a stream was made; ``name`` is its priority
            - ``"launch"``: a job; ``name`` is its operator
            - ``"event_record"``, ``"event_wait"``: on ``stream``, of ``version`` of ``event``. A
              wait for version 0 waits for nothing: the event was not recorded yet
            - ``"event_synchronize"``, and ``"event_query"`` that found it done: by the host thread
            - ``"stream_synchronize"``, ``"stream_query"`` that found it idle, and
              ``"device_synchronize"``: by the host thread; ``name`` is ``"copy"`` or ``"item"``
              where an operator waited by itself
            - ``"alloc"``, ``"free"``: ``writes`` is the block, ``stream`` the one that owns it
            - ``"pinned_alloc"``: ``writes`` is host memory that torch's allocator asked for
            - ``"record_stream"``: ``reads`` is the block, ``stream`` its user
            - ``"host_access"``: by the host thread, see `note_host_access`
            - ``"send"``, ``"receive"``: see `note_handover`; ``event`` is what is handed over

        device: its index, -1 where there is none.
        stream: its id within the device: 0 is the default stream; -1 where there is none.
        name: see ``kind``.
        event: a number of the event, 0 where there is none.
        version: how often the event was recorded by then.
        reads: addresses from the first to behind the last byte of each tensor that is only read;
            of a copy between host and device, the host's memory, too.
        writes: the same of each tensor that is written.
        thread: a number of the host thread that called.
        stack: of a wait, a query, a synchronization or ``record_stream``: the Python frames that
            called, as ``file:line function`` lines, the innermost first.
    """

    kind: str
    device: int
    stream: int
    name: str
    event: int
    version: int
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    thread: int
    stack: str


def start_trace() -> None:
    """Record from now on, from an empty list."""
    _library().fake_set_tracing(1)


def stop_trace() -> list[TraceRecord]:
    """Stop recording and return what happened since `start_trace`, in the order of the calls."""
    _library().fake_set_tracing(0)
    found = []
    for kind, device, stream, name, event, version, *ranges, thread, stack in json.loads(
        _library().fake_trace()
    ):
        reads, writes = ([tuple(pair) for pair in pairs] for pairs in ranges)
        found.append(
            TraceRecord(kind, device, stream, name, event, version, reads, writes, thread, stack)
        )
    return found


def note_host_access(
    name: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
) -> None:
    """Record that this host thread reads and writes host memory by other means than torch's."""
    _note_host("host_access", name, 0, reads, writes)


def note_handover(kind: Literal["send", "receive"], what: int) -> None:
    """Record that this host thread sends something to another thread, or has received it."""
    _note_host(kind, "", what, (), ())


def _note_host(
    kind: str, name: str, what: int, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> None:
    bounds = [b for t in (*reads, *writes) for b in (t.data_ptr(), t.data_ptr() + t.nbytes)]
    array: Any = (ctypes.c_size_t * len(bounds))(*bounds)
    _library().fake_note_host(
        kind.encode(), name.encode(), ctypes.c_uint64(what), array, len(reads), len(writes)
    )
