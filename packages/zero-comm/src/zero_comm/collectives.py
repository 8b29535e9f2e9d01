"""Collectives for a sharded-training engine that send quantized weights (qwZ).

They wrap the engine's own collectives, which carry the bytes; the two protocols below say what is
asked of those, and the wrapper offers the same. Nothing here imports an engine.

[Note: what happens to a shard]
shard (the rank's weights, never written to) -> **part** (its quantized bytes) -> **gathered**
(all ranks' parts, in rank order) -> ``out`` (the unit, dequantized). A rank's own slice of ``out``
is dequantized as well, so that all ranks compute with the same weights; the shard, from which the
optimizer goes on, keeps every bit.

The part is kept per unit and sent again while the unit's version stands: the backward gather and
those of further accumulation steps don't quantize anew. That costs about a byte per element of
the rank's shards. Gathered bytes come from a pool and return to it in ``wait``.

A negative version marks values that are not a version of weights (an engine may gather reduced
gradients so); they are never quantized and never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_comm.block_format import DEFAULT_BLOCK_SIZE, BlockFormat
from zero_comm.buffers import BufferPool, follow, mark
from zero_comm.quantizer import quantize
from zero_comm.rank_parts import dequantize_parts, is_worth_quantizing
from zero_comm.settings import CommSettings

__all__ = ["NativeCollectives", "NativeWork", "QuantizedWeights", "create_collectives"]


class NativeWork(Protocol):
    """A collective under way; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the result may be read by the caller (on CUDA: by its current stream)."""
        ...


class NativeCollectives(Protocol):
    """Collectives over flat tensors of any dtype, bytes included.

    Every rank calls the same methods in the same order; buffers may be reused after ``wait``.
    """

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> NativeWork:
        """Start to fill ``out`` with every rank's ``shard``, in rank order."""
        ...

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> NativeWork:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``."""
        ...


def create_collectives(
    native: NativeCollectives, *, rank: int, world_size: int, config: Mapping[str, Any]
) -> NativeCollectives:
    """Make collectives that quantize what they gather and carry it over ``native``.

    The entry point ``quantized`` of the group ``zero_core.collectives``. ZeRO++ (arXiv
    2306.10209), qwZ.

    Args:
        native: carries the bytes; any object with these two methods.
        rank: this process's rank in ``native``'s group.
        world_size: size of that group; 1 quantizes too, so that the numbers don't depend on it.
        config: the resolved ``zero_optimization`` block. ``zero_quantized_weights: true`` gathers
            weights in ``zero_quantized_weights_bits`` (8 unless given) bits.

    Returns:
        A `QuantizedWeights`, or ``native`` itself when the config asks for nothing.

    Raises:
        ValueError: a setting that isn't served (gradients, secondary partitions), by key.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be within [0, {world_size}), got {rank}")
    settings = CommSettings.from_config(config)
    if settings.weight_bits is None:
        return native
    return QuantizedWeights(native, world_size=world_size, bits=settings.weight_bits)


class QuantizedWeights:
    """Gathers quantized weights over ``native`` (qwZ) and leaves all else to it.

    See [Note: what happens to a shard]. Several gathers may be under way at once; they may be
    waited for in any order. Not to be used by several threads at the same moment.

    Args:
        native: carries the bytes.
        world_size: size of its group.
        bits: 8 or 4.
        block_size: elements per block; None for the default of ``bits``.
    """

    def __init__(
        self,
        native: NativeCollectives,
        *,
        world_size: int,
        bits: int = 8,
        block_size: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be positive, got {world_size}")
        self._native = native
        self._world_size = world_size
        kind = f"int{bits}"
        self._format = BlockFormat(kind, block_size or DEFAULT_BLOCK_SIZE[kind])
        self._parts: dict[int, _Part] = {}
        self._pools: dict[torch.device, BufferPool] = {}

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> NativeWork:
        """Start to gather; ``wait`` of the result dequantizes into ``out``. A collective.

        A shard that isn't fp32, bf16, fp16 or fp64, or is too small to become shorter, or has no
        version, goes to ``native`` as it is. A block with NaN or Inf arrives as NaN on every rank.

        Args:
            out: 1-D, contiguous, ``world_size * shard.numel()`` elements of ``shard``'s dtype,
                on its device; filled by ``wait``.
            shard: 1-D, contiguous; read before the call returns, never written to.
            unit: whose shard it is; its quantized bytes are kept under this number.
            version: must grow whenever the values of ``shard`` may have changed; negative for
                what isn't weights.
            backward: whether the gather serves a backward pass; passed on.

        Raises:
            ValueError: ``out`` doesn't match ``shard``, or overlaps a shard to be quantized:
                dequantizing would overwrite the exact weights.
        """
        self._check(out, shard)
        is_quantized = version >= 0 and is_worth_quantizing(
            shard.dtype, shard.numel(), self._format
        )
        if not is_quantized:
            return self._native.all_gather(
                out, shard, unit=unit, version=version, backward=backward
            )
        if _overlap(out, shard):
            raise ValueError(
                "shard must not overlap out in a quantized all_gather: dequantizing into out "
                "would replace the exact weights by rounded ones; gather into a buffer of its own"
            )
        part = self._publish(shard, unit=unit, version=version)
        pool = self._pool(shard.device)
        nbytes = self._world_size * part.data.numel()
        buffer = pool.take(nbytes)
        gathered = buffer[:nbytes]
        work = self._native.all_gather(
            gathered, part.data, unit=unit, version=version, backward=backward
        )
        part.num_in_flight += 1

        def finish() -> torch.Event | None:
            dequantize_parts(gathered, out, world_size=self._world_size, fmt=self._format)
            event = mark(out.device)
            pool.give(buffer, event)
            part.num_in_flight -= 1
            part.last_read = event
            return event

        return _Gather(work, finish, out.device)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> NativeWork:
        """Sum over ``native``, unquantized. A collective; arguments and errors are its own."""
        return self._native.reduce_scatter(out, full, unit=unit)

    @property
    def has_retire(self) -> bool:
        """Whether works of reductions have ``retire``: they are those of ``native``."""
        return bool(getattr(self._native, "has_retire", False))

    @property
    def private_nbytes(self) -> int:
        """Bytes held between gathers: kept parts and free buffers."""
        parts = sum(part.data.numel() for part in self._parts.values())
        return parts + sum(pool.free_nbytes for pool in self._pools.values())

    def _publish(self, shard: Tensor, *, unit: int, version: int) -> _Part:
        """The unit's part, quantized anew unless it is of this very version."""
        source = _Source(version, shard.data_ptr(), shard.numel(), shard.dtype, shard.device)
        part = self._parts.get(unit)
        if part is not None and part.source == source:
            follow(part.written, shard.device)
            return part
        data = self._reusable_data(part, shard)
        if part is not None and data is part.data:
            follow(part.last_read, shard.device)
        fmt = self._format
        data = quantize(shard, fmt, out=data)
        part = _Part(source, data, written=mark(shard.device))
        self._parts[unit] = part
        return part

    def _reusable_data(self, part: _Part | None, shard: Tensor) -> Tensor | None:
        """The old part's memory, if it fits and no gather still reads it."""
        if part is None or part.num_in_flight or part.data.device != shard.device:
            return None
        return part.data if part.data.numel() == self._format.nbytes(shard.numel()) else None

    def _pool(self, device: torch.device) -> BufferPool:
        if device not in self._pools:
            self._pools[device] = BufferPool(device)
        return self._pools[device]

    def _check(self, out: Tensor, shard: Tensor) -> None:
        for name, tensor in (("out", out), ("shard", shard)):
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)}"
                )
        if out.dtype != shard.dtype or out.device != shard.device:
            raise ValueError(
                f"out must have shard's dtype and device, {shard.dtype} on {shard.device}, "
                f"got {out.dtype} on {out.device}"
            )
        if out.numel() != self._world_size * shard.numel():
            raise ValueError(
                f"out must have world_size * shard.numel() = {self._world_size} * "
                f"{shard.numel()} elements, got {out.numel()}"
            )


@dataclass(frozen=True, slots=True)
class _Source:
    """What a part was made of; the address guards against a caller that reuses a unit number."""

    version: int
    address: int
    numel: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class _Part:
    """A unit's quantized shard, and who still reads it."""

    source: _Source
    data: Tensor
    written: torch.Event | None
    num_in_flight: int = 0
    last_read: torch.Event | None = None


class _Gather:
    """A quantized gather under way: carry first, then dequantize, once."""

    def __init__(
        self,
        work: NativeWork,
        finish: Callable[[], torch.Event | None],
        device: torch.device,
    ) -> None:
        self._work = work
        self._finish: Callable[[], torch.Event | None] | None = finish
        self._device = device
        self._done: torch.Event | None = None

    def wait(self) -> None:
        """Block until ``out`` holds the unit (on CUDA: for the caller's current stream)."""
        if self._finish is None:
            follow(self._done, self._device)
            return
        self._work.wait()
        finish, self._finish = self._finish, None
        self._done = finish()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share a byte of memory."""
    return (
        a.device == b.device
        and a.data_ptr() < b.data_ptr() + b.nbytes
        and b.data_ptr() < a.data_ptr() + a.nbytes
    )
