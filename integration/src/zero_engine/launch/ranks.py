"""Operations on the ranks of a job: joining, actions of rank 0, and stops after the same step.

A **stop request** is a signal: SIGINT of Ctrl-C, or a scheduler's SIGTERM or SIGUSR1. One rank may
receive it a step earlier than another. Ranks therefore exchange the received signals at the end of
each step, and all stop after the same step.

[Note: a fresh store]
torchrun keeps one store for all its restarts (torch 2.5 and later: pytorch issues 135712 and
167288), and torch uses the same keys each time. A restarted rank may then read the address of a
rank that has ended. Therefore the ranks of each start agree on a new prefix for their keys.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch

# The first torch optimizer imports torch._dynamo. If a process group exists at that time, the
# import keeps the group alive past destroy_process_group (torch 2.13), and threads of the group may
# abort the process at exit.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zero_core.adapters import write_error_file
from zero_core.errors import CollectiveError, ZeroError
from zero_engine.launch.started_ranks import device_index, end_with_launcher
from zero_engine.terminal import exit_code

_INTERVAL_S = 0.02
_LIMIT_S = 300.0


def is_under_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_ranks() -> torch.device:
    """Join the process group that the launcher's variables describe. Returns this rank's device.

    Uses NCCL and one GPU per rank if there are GPUs, otherwise gloo and the CPU. Without a launcher
    there is one rank and no group. Every rank must call it. The rank ends when torchrun does.
    """
    end_with_launcher()
    has_gpu = torch.cuda.is_available()
    device: torch.device | None = None
    if has_gpu:
        index = device_index(os.environ, num_visible=torch.cuda.device_count())
        device = torch.device("cuda", index or 0)
        torch.cuda.set_device(device)
    if is_under_launcher():
        # Without device_id= torch connects at the first collective. With device_id=, a rank that
        # fails before joining would leave the other ranks waiting here.
        backend = "nccl" if has_gpu else "gloo"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            dist.init_process_group(backend)
        else:  # see [Note: a fresh store] above
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            kept = TCPStore(address, port, is_master=False)
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = PrefixStore(agree_on_prefix(kept, rank, world_size), kept)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return device or torch.device("cpu")


def agree_on_prefix(store: Store, rank: int, world_size: int) -> str:
    """Return a new prefix, the same on all ranks that start now. See [Note: a fresh store].

    Rank 0 makes the prefix. Another rank may at first read the prefix of an earlier start. Each
    rank therefore writes a random number under the prefix that it reads, and uses the prefix when
    rank 0 has confirmed the number.
    """
    if rank == 0:
        prefix = f"zero_engine/{uuid.uuid4().hex}"
        store.set("zero_engine/prefix", prefix)
        numbers = [store.get(f"{prefix}/number/{other}").decode() for other in range(1, world_size)]
        store.set(f"{prefix}/confirmed", json.dumps(numbers))
        return prefix
    own = uuid.uuid4().hex
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit:
        prefix = store.get("zero_engine/prefix").decode()
        store.set(f"{prefix}/number/{rank}", own)
        while store.get("zero_engine/prefix").decode() == prefix and time.monotonic() < limit:
            confirmed = f"{prefix}/confirmed"
            if store.check([confirmed]) and own in json.loads(store.get(confirmed)):
                return prefix
            time.sleep(_INTERVAL_S)
    raise CollectiveError(
        f"rank {rank} of {world_size}: rank 0 has not confirmed this start within "
        f"{_LIMIT_S:.0f} s: is a rank of an earlier start still running?"
    )


def leave_ranks() -> None:
    """Destroy the process group. Every rank must call it, after it has dropped its engine."""
    gc.collect()  # an object that refers to the group would keep its threads until exit
    if dist.is_initialized():
        dist.destroy_process_group()


def on_first_rank(action: Callable[[], None], device: torch.device) -> None:
    """Run ``action`` on rank 0 while the other ranks wait. Every rank must call it.

    If ``action`` fails, rank 0 raises its exception and the other ranks exit without a message.
    """
    error: Exception | None = None
    if _rank() == 0:
        try:
            action()
        except Exception as caught:
            error = caught
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.broadcast(failed, src=0)
    if error is not None:
        raise error
    if failed.item():
        _let_first_rank_speak()
        sys.exit(2)


def from_first_rank(text: str, device: torch.device) -> str:
    """Return rank 0's ``text``. Every rank must call it."""
    found = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0, device=device)
    return found[0]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum ``values`` over all ranks, in place. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def ranks_where(is_so: bool, device: torch.device) -> list[int]:
    """Return the ranks on which ``is_so`` is true. Every rank must call it."""
    flags = torch.zeros(dist.get_world_size() if dist.is_initialized() else 1, device=device)
    flags[_rank()] = is_so
    return [rank for rank, flag in enumerate(sum_over_ranks(flags).tolist()) if flag]


def fail(error: ZeroError) -> NoReturn:
    """Print an error and exit, with code 2 for a mistake of the user's and 1 otherwise.

    Several ranks may hit the same mistake. Ranks other than 0 wait before they print, so that the
    launcher ends them if rank 0 prints the mistake. The rank's error file informs torchrun.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        _let_first_rank_speak()
    print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
    write_error_file(type(error).__name__, str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():  # the process group's threads may abort the process during sys.exit
        os._exit(exit_code(error))
    sys.exit(exit_code(error))


class StopRequest:
    """Handler of stop signals. Stores the first signal, which ranks exchange as summed flags."""

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._received: int | None = None
        for signum in self.HANDLED:
            signal.signal(signum, self._remember)

    def _remember(self, signum: int, _frame: FrameType | None) -> None:
        self._received = self._received or signum

    def as_flags(self) -> list[float]:
        return [float(self._received == signum) for signum in self.HANDLED]

    @classmethod
    def from_flags(cls, sums: list[float]) -> signal.Signals | None:
        return next((s for s, total in zip(cls.HANDLED, sums, strict=True) if total > 0), None)


def _let_first_rank_speak() -> None:
    """Wait 3 s for the launcher to end this rank, as it does when rank 0 has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(3)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
