"""Control group: small exchanges between ranks, beside the collectives of the data path.

On an accelerator they are collectives of its library (`zero_core.comm.groups`), among hosts direct
messages (`zero_core.comm.host`).

[Note: communicators and lanes]
A **communicator** is one connection of some ranks. A library (NCCL, say) runs the collectives of
one communicator one after another, in the order in which each rank starts them, which must be the
same on all of them. So what may interleave differently on different ranks has communicators of its
own: a **lane** each for gathers and for reductions, beside the caller's for control.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFailedError,
    CollectiveError,
    ConfigError,
)
from zero_core.protocols import Work
from zero_core.watch.notices import write_error_file
from zero_core.watch.place import Place
from zero_core.watch.watch import OTHER_BLOCKS, Watch, count_ranks, join_few

PIECE_BYTES = 64 << 20
"""Device memory that `ControlGroup.gather` takes at most, however much is gathered."""
_KINDS = (CheckpointCorruptError, CheckpointError, CheckpointFailedError)
"""Errors of `Exchange.together`: of those of several ranks the first here is raised."""
_T = TypeVar("_T")


class Lane(Enum):
    """Purpose of a communicator. Those of different lanes share no order."""

    GATHERS = "gathers"
    REDUCTIONS = "reductions"


class ControlLibrary(Protocol):
    """Collectives of the control group. Each is started by every rank, in the same order.

    Tensors are 1-D (for `all_reduce` and `broadcast`: of any shape), contiguous and on the rank's
    device. Collectives run after what is on the caller's current stream, and ``wait`` makes the
    current stream of its caller wait for them. Only then may the buffers be reused.
    """

    rank: int  # within the communicator
    world_size: int

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Start to fill ``out`` with every rank's ``shard`` (any dtype), in rank order.

        ``shard`` may be this rank's slice of ``out``.
        """

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        """Start to send slices: ``parts`` by target, ``out`` by source, without gaps.

        ``sent`` and ``received`` are their elements, by rank.
        """

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum every rank's ``values`` in place, to the same bits on every rank."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Start to overwrite ``tensor``, of any dtype, with rank ``source``'s."""


class DeviceLibrary(ControlLibrary, Protocol):
    """Collectives over one communicator of an accelerator's library."""

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``, any dtype."""

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> DeviceLibrary:
        """Return the communicator of ``lane`` among ``ranks``, renumbered in that order.

        Every rank of this communicator calls it equally often, in the same order and for the same
        lane, each with the subgroup that it is in: a partition of all ranks, or all of them.
        """

    def close(self) -> None:
        """End what `subgroup` has made, on this rank alone, with nothing under way on it."""


class Exchange(Protocol):
    """Bytes between ranks, and errors that all of them raise."""

    rank: int  # within the group
    world_size: int
    place: Place

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in rank order, on every rank."""

    def leave(self) -> None:
        """End a sequence of rounds: return once no rank needs this one to read the last of them."""
        return

    def together(self, what: str, act: Callable[[], _T]) -> _T:
        """Return ``act()`` on every rank. If it fails on one, raise on all, instead of a hang.

        A mistake that another attempt would repeat (CheckpointError, ConfigError) is raised as
        CheckpointError, a corrupt checkpoint as what it is, and the rest as CheckpointFailedError.
        """
        failure: list[str] = []
        with self.place.during(what):
            try:
                found = act()
            except CollectiveError:
                raise  # the others get one of their own
            except Exception as error:  # whatever it is, the other ranks must hear of it
                is_mistake = isinstance(error, CheckpointError | ConfigError)
                is_mistake &= not isinstance(error, CheckpointFailedError)
                kind = CheckpointError if is_mistake else CheckpointFailedError
                if isinstance(error, CheckpointCorruptError):
                    kind = CheckpointCorruptError
                failure = [kind.__name__, f"{type(error).__name__}: {error}"]
            rows = [json.loads(row) for row in self.gather_bytes(json.dumps(failure).encode())]
        failed = [f"rank {r}: {row[1]}" for r, row in enumerate(rows) if row]
        if failed:
            names = {row[0] for row in rows if row}
            kind = next(kind for kind in _KINDS if kind.__name__ in names)
            raise kind(f"{what} failed on {'; '.join(failed)}")
        return found


class ControlGroup(Exchange):
    """Small exchanges beside the data path: statistics of a step, names, checksums.

    Bytes and numbers only, because object collectives would unpickle a peer's data.
    """

    def __init__(
        self,
        library: ControlLibrary,
        device: torch.device,
        place: Place | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.place = Place() if place is None else place
        self.watch = watch  # what the other ranks say of their places; None if they cannot
        self.rank = library.rank
        self.world_size = library.world_size
        self._library = library
        self._device = device

    def sum(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            with self._named("sum", values):
                self._library.all_reduce(values).wait()
        return values

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        if self.world_size > 1:
            with self._named("broadcast", tensor):
                self._library.broadcast(tensor, source=source).wait()

    def gather_on_device(self, tensor: Tensor) -> Tensor:
        """Return every rank's 1-D ``tensor`` (equally long), in rank order, on the device."""
        if self.world_size == 1:
            return tensor
        local = tensor.to(self._device)
        out = torch.empty(self.world_size * local.numel(), dtype=local.dtype, device=self._device)
        with self._named("gather", local):
            self._library.all_gather(out, local).wait()
        return out

    def exchange(self, parts: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what arrives on the device: see `ControlLibrary.exchange`."""
        if self.world_size == 1:
            return parts
        out = torch.empty(sum(received), dtype=parts.dtype, device=self._device)
        with self._named("exchange", parts):
            self._library.exchange(out, parts.to(self._device), sent, received).wait()
        return out

    def gather_in_pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield start and values, [world_size, n] on the device, of pieces of a 1-D ``tensor``.

        A piece has at most `PIECE_BYTES`, and is copied if it is kept. Every rank must iterate to
        the end.
        """
        numel = max(tensor.numel(), 1)
        if self.world_size > 1:
            numel = max(PIECE_BYTES // (self.world_size * tensor.itemsize), 1)
        for start in range(0, tensor.numel(), numel):
            piece = self.gather_on_device(tensor[start : start + numel])
            yield start, piece.view(self.world_size, -1)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's 1-D ``tensor`` (equally long), in rank order, on the CPU."""
        if self.world_size * tensor.nbytes <= PIECE_BYTES:
            return self.gather_on_device(tensor).cpu()
        whole = torch.empty(self.world_size, tensor.numel(), dtype=tensor.dtype, device="cpu")
        for start, piece in self.gather_in_pieces(tensor):
            whole[:, start : start + piece.shape[1]] = piece
        return whole.view(-1)

    def gather_into(self, out: Tensor, tensor: Tensor) -> None:
        """Gather every rank's 1-D ``tensor`` (equally long) into ``out``, both on the CPU."""
        if self.world_size > 1 and self._device == out.device:  # without a copy in between
            with self._named("gather", tensor):
                self._library.all_gather(out, tensor).wait()
        else:
            out.copy_(self.gather_on_device(tensor))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [data]
        lengths = self.gather(torch.tensor([len(data)], dtype=torch.int64)).tolist()
        padded = bytearray(data.ljust(max(1, *lengths), b"\0"))
        rows = self.gather(torch.frombuffer(padded, dtype=torch.uint8)).view(self.world_size, -1)
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def differences(self, facts: Mapping[str, str]) -> str:
        """Say, alike on all ranks, which ``facts`` differ on which ranks: the first few."""
        rows = [json.loads(row) for row in self.gather_bytes(json.dumps(dict(facts)).encode())]
        said = []
        for name in dict.fromkeys(name for row in rows for name in row):
            ranks: dict[str, list[int]] = {}
            for rank, row in enumerate(rows):
                ranks.setdefault(row.get(name, "missing"), []).append(rank)
            if len(ranks) > 1:
                values = (f"{value} on {count_ranks(of)}" for value, of in ranks.items())
                said.append(f"{name}: {', '.join(values)}")
        return join_few(said)

    def equalize(self, tensor: Tensor) -> None:
        """Broadcast ``tensor`` from rank 0, unless every rank has the same values already."""
        if self.world_size > 1 and tensor.is_cpu:  # a checksum costs less than sending
            content = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            sums = self.gather(torch.tensor([zlib.crc32(content)]))
            if bool((sums == sums[0]).all()):
                return
        self.broadcast(tensor)

    def barrier(self) -> None:
        self.gather_bytes(b"")

    def error(self, what: str, error: RuntimeError) -> CollectiveError:
        """Return what ``error`` of the collective ``what`` is for the user, with its cause."""
        named = f"rank {self.rank}: {what} failed or timed out"
        is_explained = isinstance(error, CollectiveError)
        cause = "" if self.watch is None or is_explained else self.watch.explain()
        if cause:
            message = f"{named}: {cause} ({error})"
        else:
            message = (
                f"{named}: {error}. If the ranks took different branches or one of them died, the "
                "first rank to report another error is the cause. A rank without data for a "
                "forward of the others must call engine.idle_step() in its place, or "
                f"engine.idle_forward() without gradients. {OTHER_BLOCKS}"
            )
        write_error_file(CollectiveError.__name__, message)
        return CollectiveError(message)

    @contextmanager
    def _named(self, verb: str, tensor: Tensor) -> Iterator[None]:
        """Have others know of this wait, of the host or the device, and name what fails in it."""
        what = f"control exchange ({verb} of {tensor.nbytes} bytes) in {self.place.doing}"
        with self.place.waiting(what):
            try:
                yield
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self.error(what, error) from error
        if self.watch is not None and self.watch.device_waits is not None:
            self.watch.device_waits.note(what)
