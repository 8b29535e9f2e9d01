"""Control group: small exchanges between ranks, separate from gathers and reductions.

On accelerators it uses the device's library, such as NCCL (`zero_core.comm.groups`), and on CPUs
direct messages (`zero_core.comm.host`).

[Note: communicators and lanes]
A **communicator** connects some ranks. NCCL runs a communicator's collectives in the order in which
each rank starts them. All ranks must start them in the same order. Gathers and reductions may
interleave differently on different ranks, so each of these two **lanes** has a separate
communicator. Control exchanges use the process group of the engine.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zero_core.comm.notices import write_error_file
from zero_core.comm.place import Place
from zero_core.comm.watch import OTHER_BLOCKS, Watch, count_ranks, join_few
from zero_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFailedError,
    CollectiveError,
    ConfigError,
)
from zero_core.protocols import Work

PIECE_BYTES = 64 << 20
"""Maximum bytes of a piece in `ControlGroup.gather_in_pieces`, with the values of all ranks."""
_KINDS = (CheckpointCorruptError, CheckpointError, CheckpointFailedError)
"""Errors that `Exchange.together` raises. If ranks' errors differ, the first in this tuple wins."""
_T = TypeVar("_T")
_Item = TypeVar("_Item")


class Lane(Enum):
    """Purpose of a communicator: see [Note: communicators and lanes]."""

    GATHERS = "gathers"
    REDUCTIONS = "reductions"


class ControlLibrary(Protocol):
    """Collectives of the control group. Every rank must start them in the same order.

    Tensors are contiguous, on the rank's device, and 1-D (any shape for `all_reduce` and
    `broadcast`). A collective runs after all work on the caller's current stream. ``wait`` of the
    result makes the current stream wait for the collective. Buffers may be reused only afterwards.
    """

    rank: int  # rank within the communicator
    world_size: int

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        """Start to gather every rank's ``shard`` (any dtype) into ``out``, in rank order.

        ``shard`` may be a view of this rank's slice of ``out``.
        """

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        """Start an all-to-all of slices of different sizes.

        ``parts`` has the slices ordered by target rank and ``out`` by source rank, without gaps.
        ``sent`` and ``received`` are the numbers of elements per rank.
        """

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum every rank's ``values`` in place. Results are bit-identical on all ranks."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Start to overwrite ``tensor`` (any dtype) with rank ``source``'s tensor."""


class DeviceLibrary(ControlLibrary, Protocol):
    """Collectives over one communicator of an accelerator's library."""

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Start to fill slice k of ``out`` with slice ``rank`` of rank k's ``parts``, any dtype."""

    def subgroup(self, ranks: Sequence[int], lane: Lane) -> DeviceLibrary:
        """Return the communicator of ``lane`` among ``ranks``, which are renumbered in that order.

        Every rank of this communicator must call it, with the same lane. ``ranks`` is the subgroup
        that contains the calling rank. The subgroups of all ranks form a partition.
        """

    def close(self) -> None:
        """Release the communicators of `subgroup` on this rank. No collective may be pending."""


class Exchange(Protocol):
    """Exchange of bytes and of errors between ranks."""

    rank: int  # rank within the group
    world_size: int
    place: Place

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in rank order, on every rank."""

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order. Tuples become lists, keys strings."""
        return [json.loads(row) for row in self.gather_bytes(json.dumps(value).encode())]

    def leave(self) -> None:
        """End a sequence of `gather_bytes` calls. May wait until other ranks have read the data."""
        return

    def together(self, what: str, act: Callable[[], _T]) -> _T:
        """Return the result of ``act()``. If ``act`` fails on any rank, raise on all ranks.

        The error is CheckpointCorruptError for a corrupt checkpoint, CheckpointError for mistakes
        that a retry would repeat (CheckpointError, ConfigError), and CheckpointFailedError
        otherwise.
        """
        failure: list[str] = []
        with self.place.during(what):
            try:
                found = act()
            except CollectiveError:
                raise  # no exchange is needed: the other ranks fail in the same collective
            except Exception as error:
                is_mistake = isinstance(error, CheckpointError | ConfigError)
                is_mistake &= not isinstance(error, CheckpointFailedError)
                kind = CheckpointError if is_mistake else CheckpointFailedError
                if isinstance(error, CheckpointCorruptError):
                    kind = CheckpointCorruptError
                said = str(error) if type(error) is kind else f"{type(error).__name__}: {error}"
                failure = [kind.__name__, said]
            rows = self.gather_json(failure)
        failed = [f"rank {r}: {row[1]}" for r, row in enumerate(rows) if row]
        if failed:
            names = {row[0] for row in rows if row}
            kind = next(kind for kind in _KINDS if kind.__name__ in names)
            if len(rows) == 1 and kind is CheckpointError:
                raise kind(failure[1])
            if len(rows) > 1 and all(row == failure for row in rows):  # as of a `together` in `act`
                raise kind(f"{what} failed on every rank: {failure[1]}")
            raise kind(f"{what} failed on {'; '.join(failed)}")
        return found

    def on_first_rank(
        self, what: str, items: Iterator[_Item], act: Callable[[Iterator[_Item]], _T]
    ) -> _T | None:
        """Return ``act(items)`` on rank 0, or raise its error on all ranks, as `together`.

        ``items`` runs collectives: every rank iterates to the end, even after an error of ``act``.
        Its own error is raised at once: other ranks are in its collective, or fail as well.
        """
        broken: list[Exception] = []

        def watched() -> Iterator[_Item]:
            try:
                yield from items
            except Exception as error:
                broken.append(error)
                raise

        stream = watched()
        found: _T | None = None
        failure: Exception | None = None
        try:
            found = act(stream) if self.rank == 0 else None
        except Exception as error:
            failure = error
        if broken:
            raise broken[0]
        for _ in stream:
            pass

        def report() -> _T | None:
            if failure is not None:
                raise failure
            return found

        return self.together(what, report)


class ControlGroup(Exchange):
    """Exchanges of small data, such as statistics of a step, names and checksums.

    Only bytes and numbers are sent, because object collectives would unpickle a peer's data.
    """

    def __init__(
        self,
        library: ControlLibrary,
        device: torch.device,
        place: Place | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.place = Place() if place is None else place
        self.watch = watch  # finds dead or late ranks; None if ranks are not watched
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
        """Gather equally long 1-D tensors on the device, by rank. One rank returns ``tensor``."""
        if self.world_size == 1:
            return tensor
        local = tensor.to(self._device)
        out = torch.empty(self.world_size * local.numel(), dtype=local.dtype, device=self._device)
        with self._named("gather", local):
            self._library.all_gather(out, local).wait()
        return out

    def exchange(self, parts: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange slices as in `ControlLibrary.exchange`. Return the slices for this rank."""
        if self.world_size == 1:
            return parts
        out = torch.empty(sum(received), dtype=parts.dtype, device=self._device)
        with self._named("exchange", parts):
            self._library.exchange(out, parts.to(self._device), sent, received).wait()
        return out

    def gather_in_pieces(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Gather a 1-D ``tensor`` in pieces. Yields each piece's (start, values [world_size, n]).

        With several ranks, values are on the device and take at most `PIECE_BYTES`. With one rank,
        there is one piece, a view of ``tensor``. Every rank must iterate to the end.
        """
        numel = max(tensor.numel(), 1)
        if self.world_size > 1:
            numel = max(PIECE_BYTES // (self.world_size * tensor.itemsize), 1)
        for start in range(0, tensor.numel(), numel):
            piece = self.gather_on_device(tensor[start : start + numel])
            yield start, piece.view(self.world_size, -1)

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's 1-D ``tensor`` of equal length, in rank order, on the CPU."""
        if self.world_size * tensor.nbytes <= PIECE_BYTES:
            return self.gather_on_device(tensor).cpu()
        whole = torch.empty(self.world_size, tensor.numel(), dtype=tensor.dtype, device="cpu")
        for start, piece in self.gather_in_pieces(tensor):
            whole[:, start : start + piece.shape[1]] = piece
        return whole.view(-1)

    def gather_into(self, out: Tensor, tensor: Tensor) -> None:
        """Gather every rank's 1-D ``tensor`` of equal length into ``out``, both on the CPU."""
        if self.world_size > 1 and self._device == out.device:
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
        """Describe the first few ``facts`` that differ between ranks. Every rank must call it."""
        rows = self.gather_json(dict(facts))
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
        """Broadcast ``tensor`` from rank 0. Skip this for CPU tensors with equal checksums."""
        if self.world_size > 1 and tensor.is_cpu:  # a checksum is cheaper than a broadcast
            content = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            sums = self.gather(torch.tensor([zlib.crc32(content)]))
            if bool((sums == sums[0]).all()):
                return
        self.broadcast(tensor)

    def barrier(self) -> None:
        self.gather_bytes(b"")

    def error(self, what: str, error: RuntimeError) -> CollectiveError:
        """Convert an error of collective ``what`` to a CollectiveError, with the cause if known."""
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
        """Report a wait to the watch in this context, and convert RuntimeErrors: see `error`."""
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
