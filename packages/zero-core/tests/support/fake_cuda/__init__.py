"""A fake CUDA runtime, with which torch's CUDA build runs on a machine without a GPU.

`support.fake_cuda.build` installs the libraries into torch's folder. Every program that imports
this torch then sees 8 fake H100 devices. torch's allocator, streams, autograd threads and
``ProcessGroupNCCL`` are the real ones. Many mistakes fail as on a GPU:

- An operator is a **job** of the current stream, whose thread runs the CPU's kernel later. A job
  holds addresses, not tensors. An operator without a CPU kernel raises an error.
- The host cannot access device memory: it gets SIGSEGV, and stderr names the device.
- A block freed to torch's allocator is overwritten with NaN in the order of its stream. Without a
  ``wait_event`` or ``record_stream``, reads can then give NaN. New memory is NaN, also if pinned.
- Copies to and from pinned memory run later. A copy from pageable memory stages its data at once.
  The host waits for a copy to pageable memory.
- A collective is a job that exchanges data with its peers over shared memory. While a peer is dead
  or in another collective, the job waits until the communicator is aborted.
- After a job has failed, every call that uses the device reports the job's error.
- If a job touches memory after ``cudaFree``, the process dies by SIGSEGV.

The environment variable ``FAKE_CUDA_DEVICES`` sets the number of devices, 8 by default.
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
    library.fake_set_delays.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
    return library


def set_delays(*, seed: int = 0, kernel_s: float = 0.0, copy_s: float = 0.0) -> None:
    """Delay each kernel by a random time up to ``kernel_s``, each copy up to ``copy_s`` (seconds).

    Collectives count as copies. The delay of a stream's n-th job depends on ``seed``, the device,
    the stream and n.
    """
    _library().fake_set_delays(seed, int(kernel_s * 1e6), int(copy_s * 1e6))


def set_one_collective_at_a_time(is_on: bool) -> None:
    """Run one collective of a device at a time, in the order of launches, as a full GPU does.

    Ranks that launch collectives of two communicators in different orders then hang.
    """
    nccl().fake_nccl_one_at_a_time(is_on)


@functools.cache
def nccl() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libnccl.so.2"))
    library.fake_nccl_set_limit.argtypes = [ctypes.c_double]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


@contextmanager
def held(kind: Literal["kernels", "copies"]) -> Iterator[None]:
    """Delay all kernels, or all copies, that have not begun, until the context ends."""
    _library().fake_hold(kind == "copies", 1)
    try:
        yield
    finally:
        _library().fake_hold(kind == "copies", 0)


def contexts() -> list[int]:
    """Return the devices that were used or made current since the last `forget_contexts`."""
    bits = _library().fake_contexts()
    return [index for index in range(64) if bits >> index & 1]


def forget_contexts() -> None:
    """Empty the list that `contexts` returns."""
    _library().fake_forget_contexts()


@dataclass(frozen=True)
class Counters:
    """Work of a device since the last `reset_counters`."""

    by_name: dict[str, int]  # "aten::mm", "copy up", "copy down", "nccl all_gather", ...
    # Synchronizations of the host by kind. "event", "stream", "device": explicit ones. "item": an
    # operator needs a value or shape on the host. "copy": a blocking copy, or one to pageable
    # memory. "staged copy": a non-blocking copy from pageable memory, for which the host does not
    # wait.
    syncs: dict[str, int]
    stacks: list[tuple[str, str]]  # of each wait: kind, and Python stack, innermost frame first


def reset_counters(*, with_stacks: bool = False) -> None:
    """Reset the counters of all devices. ``with_stacks`` fills `Counters.stacks` from now on."""
    _library().fake_reset_counters(with_stacks)


def counters(device: int = 0) -> Counters:
    values = json.loads(_library().fake_counters(device))
    values["stacks"] = [tuple(stack) for stack in values["stacks"]]
    return Counters(**values)


class TraceRecord(NamedTuple):
    """One traced call of the host, or one launched job.

    Attributes:
        kind: one of

            - ``"launch"``: a job was launched. ``name`` is its operator
            - ``"event_record"``, ``"event_wait"``: ``stream`` records or awaits ``version`` of
              ``event``. Waiting for version 0 has no effect: the event was not recorded yet
            - ``"event_synchronize"``, and ``"event_query"`` if the event had completed
            - ``"stream_synchronize"``, ``"device_synchronize"``, and ``"stream_query"`` if the
              stream was idle. ``name`` is ``"copy"`` or ``"item"`` if an operator synchronized
            - ``"free"``: ``writes`` is the block, ``stream`` its owner
            - ``"pinned_alloc"``: ``writes`` is pinned memory that torch's allocator requested
            - ``"record_stream"``: ``reads`` is the block, ``stream`` its user
            - ``"host_access"``: see `note_host_access`
            - ``"send"``, ``"receive"``: see `note_handover`. ``event`` is the object's number

        device: index of the device, -1 if none.
        stream: id of the stream within its device, 0 for the default stream, -1 if none.
        name: see ``kind``.
        event: number of the event, 0 if none.
        version: number of times the event had been recorded.
        reads: (begin, end) addresses of each tensor or host buffer that is read but not written.
        writes: (begin, end) addresses of each tensor or host buffer that is written.
        thread: number of the calling host thread.
        stack: Python stack of a wait, query, synchronization or ``record_stream``, as lines
            ``file:line function``, innermost frame first. Empty for other kinds.
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
    """Start recording into an empty trace."""
    _library().fake_set_tracing(1)


def stop_trace() -> list[TraceRecord]:
    """Stop recording and return the records in call order."""
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
    """Record that this thread accesses the host memory of tensors without using torch."""
    _note_host("host_access", name, 0, reads, writes)


def note_handover(kind: Literal["send", "receive"], what: int) -> None:
    """Record that this thread sends object number ``what`` to another thread, or receives it."""
    _note_host(kind, "", what, (), ())


def _note_host(
    kind: str, name: str, what: int, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> None:
    bounds = [b for t in (*reads, *writes) for b in (t.data_ptr(), t.data_ptr() + t.nbytes)]
    array: Any = (ctypes.c_size_t * len(bounds))(*bounds)
    _library().fake_note_host(
        kind.encode(), name.encode(), ctypes.c_uint64(what), array, len(reads), len(writes)
    )
