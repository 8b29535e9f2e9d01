"""An accelerator made of threads: device ``"late"`` (torch's PrivateUse1), for tests without a GPU.

`load` compiles and registers it. Then ``torch.device("late:1")``, `torch.Stream`, `torch.Event` and
`torch.accelerator` work as on CUDA, and what is wrong on a GPU goes wrong here:

- An operator is a **job** on the current stream: a thread runs the CPU's kernel later, with the
  CPU's bits. A job holds addresses, no tensors. Only operators whose result the host needs
  (``item``, ``nonzero``, ...) and copies other than ``non_blocking`` ones of pinned memory wait.
- Device memory is the device's own. A host that reads it dies of SIGSEGV, with a line that says so.
- Freed memory goes back to the stream that it was allocated on, as in CUDA's caching allocator, and
  is overwritten with NaN in that stream's order: a missing ``wait_event`` or ``record_stream``
  shows. New memory is NaN, too, pinned memory included.
- Pinned memory is reused when the copies that were enqueued with it are done.
- A new thread's device is 0. `contexts` says which devices were touched.
- An error in a job is raised by the next synchronization with its device.
- `set_delays` makes every job wait for a random time first, `held` until a test goes on; the order
  within a stream stays.

The process has no other accelerator from then on, so tests that load it run in a process of their
own: `zero_core.testing.run_alone`. Random numbers differ from the CPU's; they depend on the seed
and the order of the calls only. `reset_counters` and `counters` count launches and
synchronisations; `start_trace` and `stop_trace` record what happened in the order of the host's
calls, as `TraceRecord` s.
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
_loaded: list[int] = []  # the number of devices, once they are there


def load(num_devices: int = 4) -> None:
    """Register ``num_devices`` devices. Again with the same number: nothing."""
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
    atexit.register(torch.ops.late.drain)  # waits for all jobs: torch is torn down after this


def _module() -> types.ModuleType:
    """``torch.late``: what torch asks of a device's module."""
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
        # torch 2.10 synchronizes only with devices that it has initialized by this.
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
    """Hold back every kernel, or every copy, that has not begun, until the end of the context."""
    torch.ops.late.hold(kind == "copies", True)
    try:
        yield
    finally:
        torch.ops.late.hold(kind == "copies", False)


def set_capacity(num_bytes: int) -> None:
    """Limit the memory of each device (at first 8 GiB). Beyond: `torch.OutOfMemoryError`."""
    torch.ops.late.set_capacity(num_bytes)


def contexts() -> list[int]:
    """Return the devices that were used, or were made a thread's current device."""
    return list(torch.ops.late.contexts())


def forget_contexts() -> None:
    """Take all devices for unused until they are used again."""
    torch.ops.late.forget_contexts()


@dataclass(frozen=True)
class Counters:
    """Work of a device since `reset_counters`."""

    launches: int  # jobs other than events, waits and overwritten free memory
    by_op: dict[str, int]  # by operator, ``"aten::mm"`` say, or ``"copy up"``, ``"copy down"``
    bytes_read: int  # of the tensors that the jobs read
    bytes_written: int  # of the tensors that they wrote. What is updated in place counts once, here
    # how often the host waited, by kind: ``"event"``, ``"stream"``, ``"device"``, ``"item"`` (a
    # value or shape that the host needs) and ``"copy"`` (not of pinned memory, not
    # ``non_blocking``, or not of the same dtype and contiguous)
    syncs: dict[str, int]
    stacks: list[tuple[str, str]]  # kind and Python stack, innermost frame first


def reset_counters(*, with_stacks: bool = False) -> None:
    """Count from zero on all devices."""
    torch.ops.late.reset_counters(with_stacks)


def counters(device: int = 0) -> Counters:
    """Return what ``device`` did since `reset_counters`."""
    values = json.loads(torch.ops.late.read_counters(device))
    values["stacks"] = [tuple(stack) for stack in values["stacks"]]
    return Counters(**values)


class TraceRecord(NamedTuple):
    """One call of the host, or one job.

    Attributes:
        kind: one of

            - ``"stream"``: a stream is used for the first time; ``name`` is its priority
            - ``"launch"``: a job; ``name`` is its operator
            - ``"event_record"``, ``"event_wait"``: on ``stream``, of ``version`` of ``event``. A
              wait for version 0 waits for nothing: the event was not recorded yet
            - ``"event_synchronize"``, and ``"event_query"`` that found it done: by the host thread
            - ``"stream_synchronize"``, ``"stream_query"`` that found it idle, and
              ``"device_synchronize"``: by the host thread; ``name`` is ``"copy"`` or ``"item"``
              where an operator waited by itself
            - ``"alloc"``, ``"free"``: ``writes`` is the block, ``stream`` the one that owns it
            - ``"record_stream"``: ``reads`` is the block, ``stream`` its user
            - ``"pinned_alloc"``, ``"pinned_free"``: ``writes`` is the block of host memory
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
    torch.ops.late.set_tracing(True)


def stop_trace() -> list[TraceRecord]:
    """Stop recording and return what happened since `start_trace`, in the order of the calls."""
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
    """Record that this host thread reads and writes host memory by other means than torch's."""
    torch.ops.late.note_host("host_access", name, 0, _bounds(reads), _bounds(writes))


def note_handover(kind: Literal["send", "receive"], what: int) -> None:
    """Record that this host thread sends something to another thread, or has received it."""
    torch.ops.late.note_host(kind, "", what, [], [])


def _bounds(tensors: Sequence[Tensor]) -> list[int]:
    return [b for t in tensors for b in (t.data_ptr(), t.data_ptr() + t.nbytes)]
