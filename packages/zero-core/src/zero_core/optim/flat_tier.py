"""Base of the engine's own state tiers: master weights, offered gradients, and publishing.

[Note: master weights here]
Where a parameter shard is fp32 (or float64) it is its own master weight: the optimizer updates it
in place. Where it is 16-bit, an fp32 master weight lies beside it and is rounded into it after a
step; and so for a shard of any dtype that is on another device than the update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from zero_core.config import master_dtype
from zero_core.protocols import ParamStore

MASTER = "master_weight"
_STORED_NUMEL = 1 << 18  # rounded at a time for a store: they stay in the cache


class Chunked:
    """Flat space ``[0, numel)`` made of consecutive tensors."""

    def __init__(self, chunks: Sequence[tuple[int, Tensor]]) -> None:
        self.chunks = list(chunks)
        self._starts = [start for start, _ in chunks]

    def parts(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """Return the views that cover ``[start, stop)``, each with its start."""
        found: list[tuple[int, Tensor]] = []
        index = self.index_of(start)
        while start < stop:
            low, tensor = self.chunks[index]
            end = min(stop, low + tensor.numel())
            found.append((start, tensor[start - low : end - low]))
            start, index = end, index + 1
        return found

    def index_of(self, start: int) -> int:
        """Return the number of the tensor that has element ``start``."""
        return bisect_right(self._starts, start) - 1

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of ``[start, stop)`` on the CPU."""
        parts = [part.detach().cpu() for _, part in self.parts(start, stop)]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def write(self, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on."""
        for low, part in self.parts(start, start + values.numel()):
            part.copy_(values[low - start : low - start + part.numel()])

    def one(self, start: int, stop: int) -> Tensor:
        """Return the view of ``[start, stop)``, which must be in one chunk."""
        ((_, view),) = self.parts(start, stop)
        return view


class FlatTier:
    """Master weights of a local flat space, on the device that updates them."""

    owns_grads = False

    def __init__(
        self,
        *,
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        param_store: ParamStore | None,
        own_masters: Collection[torch.dtype],
    ) -> None:
        """Allocate masters on ``device``. Shards of the dtypes ``own_masters`` are their own."""
        self._device = device
        self._published = Chunked(params)
        self._store = param_store
        masters = []
        for start, shard in params:
            dtype = master_dtype(shard.dtype, own_masters)
            if shard.is_meta:
                masters.append((start, torch.zeros(shard.numel(), dtype=dtype, device=device)))
            else:
                masters.append((start, shard.to(device, dtype)))
        self._masters = Chunked(masters)
        self._grads: dict[int, Tensor] = {}
        self._scaled: set[int] = set()  # starts of offers that were multiplied in place
        # Copies of updated shards to the host, on a stream of their own: the stop and the event of
        # each, by its start. They wait for the update, the readers of a shard for its copy, and the
        # next update for all copies of master weights that it overwrites. The host never waits.
        self._downloads: dict[int, tuple[int, torch.Event]] = {}
        self._download_stream: torch.Stream | None = None

    def offer_grad(self, start: int, grad: Tensor) -> None:
        self._grads[start] = grad
        self._scaled.discard(start)

    def discard_grads(self) -> None:
        self._grads.clear()
        self._scaled.clear()

    def _starts_of(self, firsts: Iterable[int]) -> list[int]:
        """Return the starts of the offers that hold the gradients of the elements ``firsts``."""
        offered = sorted(self._grads)
        return sorted({offered[bisect_right(offered, first) - 1] for first in firsts})

    def _scale(self, starts: Sequence[int], factor: Tensor | float) -> None:
        """Multiply the offers that are not widened, each once."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for start in starts:
            grad = self._grads[start]
            if start not in self._scaled and grad.dtype == self._master_dtype(start):
                grad.mul_(factor)
                self._scaled.add(start)

    def read_grad(self, start: int, stop: int) -> Tensor:
        grads = Chunked([(s, self._grads[s]) for s in sorted(self._grads)])
        return torch.cat([part.cpu() for _, part in grads.parts(start, stop)])

    def wait_params(self, start: int, stop: int) -> None:
        """Make the current stream wait for shards that are on their way to the host."""
        for low, (high, event) in self._downloads.items():
            if low < stop and high > start:
                torch.accelerator.current_stream(self._device).wait_event(event)

    def are_params_ready(self, start: int, stop: int) -> bool:
        downloads = self._downloads.items()
        return all(e.query() for low, (high, e) in downloads if low < stop and high > start)

    def _wait_for_downloads(self) -> None:
        """Make the current stream wait for all copies to the host."""
        if self._downloads:
            assert self._download_stream is not None
            torch.accelerator.current_stream(self._device).wait_stream(self._download_stream)

    def _master_dtype(self, start: int) -> torch.dtype:
        return self._masters.chunks[self._masters.index_of(start)][1].dtype

    def _copies(self, start: int, stop: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return start, master weights and shard of each part of a range, where they are apart."""
        masters, shards = self._masters.parts(start, stop), self._published.parts(start, stop)
        return [
            (low, master, shard)
            for (low, master), (_, shard) in zip(masters, shards, strict=True)
            if shard.is_meta or shard.data_ptr() != master.data_ptr()
        ]

    def _write_master(self, start: int, values: Tensor) -> None:
        """Overwrite master weights from element ``start`` on, and publish them."""
        self._wait_for_downloads()
        self._masters.write(start, values)
        self._publish(self._copies(start, start + values.numel()))
        if self._download_stream is not None:
            self._download_stream.synchronize()
            self._downloads.clear()

    @torch.no_grad()
    def _publish(self, copies: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Round master weights into the parameter shards."""
        away: list[tuple[int, Tensor, Tensor]] = []
        for start, master, shard in copies:
            if shard.is_meta:
                assert self._store is not None, "whoever gives meta shards gives a store"
                at_once = _STORED_NUMEL if master.is_cpu else master.numel()
                for low in range(0, master.numel(), max(at_once, 1)):
                    part = master[low : low + at_once]
                    self._store.write(start + low, part.to(shard.dtype))
            elif shard.device == master.device or master.is_cpu:
                shard.copy_(master)
            else:
                away.append((start, master, shard))
        if not away:
            return
        if self._download_stream is None:
            self._download_stream = torch.Stream(self._device)
        stream = self._download_stream
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for start, master, shard in away:
                shard.copy_(master.to(shard.dtype), non_blocking=True)
                self._downloads[start] = start + shard.numel(), stream.record_event()
