"""An accelerator made of threads: device ``"late"`` (torch's PrivateUse1), for tests without a GPU.

`load` compiles and registers the device. Then ``torch.device("late:1")``, `torch.Stream`,
`torch.Event` and `torch.accelerator` work like on CUDA, with the same hazards:

- An operator is a **job** on the current stream: a thread runs the CPU kernel later, with the
  CPU's bits. A job holds addresses, not tensors. The host waits only for operators whose result it
  needs (``item``, ``nonzero``, ...) and for copies, unless they are ``non_blocking`` and pinned.
- The host cannot access device memory. An access ends the process with SIGSEGV and a message.
- Freed memory returns to its allocating stream, like in CUDA's caching allocator. That stream then
  overwrites it with NaN, which reveals a missing ``wait_event`` or ``record_stream``. New memory is
  NaN too, pinned memory included.
- Pinned memory is reused after the copies that were enqueued with it are done.
- A new thread's device is 0. `contexts` returns the devices that were used.
- An error in a job is raised by the next synchronisation with its device.
- `set_delays` delays every job by a random time, and `held` blocks jobs within a context. The order
  within a stream is preserved.

After `load` the process has no other accelerator, so tests must run in separate processes: see
`zero_core.testing.run_alone`. Random numbers differ from the CPU's. They depend only on the seed
and the order of calls. `reset_counters` and `counters` count launches and synchronisations.
`start_trace` and `stop_trace` record host calls, in order, as `TraceRecord` objects.
"""

from __future__ import annotations

import atexit
import json
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration

from support.late_device.build import built_library

NAME = "late"
_loaded: list[int] = []  # the number of devices, after load()


def load(num_devices: int = 4) -> None:
    """Register ``num_devices`` devices. A second call with the same number does nothing."""
    if _loaded:
        if _loaded[0] != num_devices:
            raise RuntimeError(
                f"the late device was loaded with {_loaded[0]} devices, {num_devices} were asked "
                "for: load it once per process"
            )
        return
    torch.ops.load_library(str(built_library()))  # type: ignore[no-untyped-call]
    torch.ops.late.start(num_devices)
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    _loaded.append(num_devices)
    atexit.register(torch.ops.late.drain)  # waits for all jobs before torch is torn down


def _module() -> types.ModuleType:
    """Return the ``torch.late`` module that torch requires of a device."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    def get_rng_state(device: Any = NAME) -> Tensor:
        state: Tensor = torch.ops.late.get_rng_state(index_of(device))
        return state

    def set_rng_state(state: Tensor, device: Any = NAME) -> None:
        torch.ops.late.set_rng_state(index_of(device), state)

    def manual_seed_all(seed: int) -> None:
        for index in range(_loaded[0]):
            torch.ops.late.manual_seed(index, seed)

    def manual_seed(seed: int) -> None:
        torch.ops.late.manual_seed(accelerator.current_device_index(), seed)

    members: dict[str, Any] = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_is_in_bad_fork": lambda: False,
        # torch 2.10 synchronises only with devices that were initialised by this function.
        "_lazy_init": lambda: None,
        "current_device": accelerator.current_device_index,
        "current_stream": accelerator.current_stream,
        "device_count": lambda: _loaded[0],
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": get_rng_state,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "set_device": accelerator.set_device_index,
        "set_rng_state": set_rng_state,
        "synchronize": accelerator.synchronize,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def set_delays(*, seed: int = 0, kernel_s: float = 0.0, copy_s: float = 0.0) -> None:
    """Delay each job by a random time up to ``kernel_s``, each copy by up to ``copy_s`` (seconds).

    The delay of a stream's n-th job depends on ``seed``, device, stream and n.
    """
    torch.ops.late.set_delays(seed, int(kernel_s * 1e6), int(copy_s * 1e6))


@contextmanager
def held(kind: Literal["kernels", "copies"]) -> Iterator[None]:
    """Within the context, block every kernel or every copy that has not started."""
    torch.ops.late.hold(kind == "copies", True)
    try:
        yield
    finally:
        torch.ops.late.hold(kind == "copies", False)


def set_capacity(num_bytes: int) -> None:
    """Limit each device's memory (default 8 GiB). Beyond it, `torch.OutOfMemoryError` is raised."""
    torch.ops.late.set_capacity(num_bytes)


def contexts() -> list[int]:
    """Return the devices that were used, or that were some thread's current device."""
    return list(torch.ops.late.contexts())


def forget_contexts() -> None:
    """Mark all devices as unused."""
    torch.ops.late.forget_contexts()


@dataclass(frozen=True)
class Counters:
    """Work of a device since `reset_counters`."""

    launches: int  # jobs other than events, waits and overwriting of freed memory
    by_op: dict[str, int]  # by operator, such as ``"aten::mm"``, ``"copy up"`` or ``"copy down"``
    bytes_read: int  # bytes of tensors that jobs only read
    bytes_written: int  # bytes of tensors that jobs write, including tensors updated in place
    # Host waits by kind: ``"event"``, ``"stream"``, ``"device"``, ``"item"`` (a value or shape that
    # the host needs) and ``"copy"`` (unpinned, not ``non_blocking``, converted or not contiguous).
    syncs: dict[str, int]
    stacks: list[tuple[str, str]]  # kind and Python stack, innermost frame first


def reset_counters(*, with_stacks: bool = False) -> None:
    """Reset the counters of all devices to zero."""
    torch.ops.late.reset_counters(with_stacks)


def counters(device: int = 0) -> Counters:
    """Return the work of ``device`` since `reset_counters`."""
    values = json.loads(torch.ops.late.read_counters(device))
    values["stacks"] = [tuple(stack) for stack in values["stacks"]]
    return Counters(**values)


class TraceRecord(NamedTuple):
    """One call of the host, or one job.

    Attributes:
        kind: one of

            - ``"stream"``: the first use of a stream; ``name`` is its priority
            - ``"launch"``: a job; ``name`` is its operator
            - ``"event_record"``, ``"event_wait"``: on ``stream``, of ``version`` of ``event``. A
              wait for version 0 returns at once, because the event was never recorded
            - ``"event_synchronize"``, ``"event_query"`` of a completed event: by the host thread
            - ``"stream_synchronize"``, ``"stream_query"`` of an idle stream, and
              ``"device_synchronize"``: by the host thread; ``name`` is ``"copy"`` or ``"item"``
              if an operator waited implicitly
            - ``"alloc"``, ``"free"``: ``writes`` is the block, ``stream`` its allocating stream
            - ``"record_stream"``: ``reads`` is the block, ``stream`` its user
            - ``"pinned_alloc"``, ``"pinned_free"``: ``writes`` is the block of host memory
            - ``"host_access"``: by the host thread, see `note_host_access`
            - ``"send"``, ``"receive"``: see `note_handover`; ``event`` is the ``what`` argument

        device: device index, or -1.
        stream: stream id within the device. 0 is the default stream, -1 means none.
        name: see ``kind``.
        event: number of the event, or 0.
        version: how often the event had been recorded.
        reads: address ranges (first byte, last byte + 1) of tensors that are only read, including
            the host memory of a copy.
        writes: address ranges of tensors that are written.
        thread: number of the calling host thread.
        stack: for a wait, query, synchronisation or ``record_stream``: the calling Python frames as
            ``file:line function`` lines, innermost first.
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
    """Start recording, with an empty list."""
    torch.ops.late.set_tracing(True)


def stop_trace() -> list[TraceRecord]:
    """Stop recording and return the records since `start_trace`, in the order of the calls."""
    torch.ops.late.set_tracing(False)
    found = []
    for kind, device, stream, name, event, version, *ranges, thread, stack in json.loads(
        torch.ops.late.read_trace()
    ):
        reads, writes = ([tuple(pair) for pair in pairs] for pairs in ranges)
        found.append(
            TraceRecord(kind, device, stream, name, event, version, reads, writes, thread, stack)
        )
    return found


def note_host_access(
    name: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
) -> None:
    """Record that this host thread accesses host memory without a torch operator."""
    torch.ops.late.note_host("host_access", name, 0, _bounds(reads), _bounds(writes))


def note_handover(kind: Literal["send", "receive"], what: int) -> None:
    """Record that this host thread sends ``what`` to another thread, or has received it."""
    torch.ops.late.note_host(kind, "", what, [], [])


def _bounds(tensors: Sequence[Tensor]) -> list[int]:
    return [b for t in tensors for b in (t.data_ptr(), t.data_ptr() + t.nbytes)]
