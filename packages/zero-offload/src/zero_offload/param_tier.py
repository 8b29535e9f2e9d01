"""Parameter shards in host memory or in a file: the entry point ``host`` of
``zero_core.param_tiers``.

ZeRO-Infinity (arXiv 2104.07857), section 5.1: a parameter shard is on the device only while its
unit is computed. Host memory holds the first ``max_in_cpu`` elements in the order of use, a file
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.copying import start_copy
from zero_offload.host_arena import HostArena
from zero_offload.param_file import FileShards
from zero_offload.protocols import Work

__all__ = ["HostShards", "ParamSettings", "RestingParams", "create_param_tier"]

_BLOCK = "offload_param"

Shards = Sequence[tuple[int, int, torch.dtype]]


@dataclass(frozen=True, slots=True)
class ParamSettings:
    """What the block ``offload_param`` asks for.

    Attributes:
        nvme_path: folder of the file; None keeps everything in host memory.
        max_in_cpu: elements that rest in host memory though there is a file.
        buffer_count: host buffers that shards are read into ahead of use.
        buffer_size: elements of the largest shard that such a buffer may have to hold.
        pin_memory: page-lock host memory if the device is an accelerator.
    """

    nvme_path: str | None = None
    max_in_cpu: int = 1_000_000_000
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    pin_memory: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ParamSettings:
        """Read the block from a resolved ``zero_optimization`` config.

        Raises:
            ValueError: a key has a value that is not served.
        """
        block = {k: v for k, v in (config.get(_BLOCK) or {}).items() if v is not None}
        device = block.pop("device", "cpu")
        unknown = sorted(set(block) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"{_BLOCK}.{unknown[0]} is not served by zero-offload")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f'{_BLOCK}.device = {device!r} is not served: use "cpu" or "nvme"')
        if device == "nvme" and "nvme_path" not in block:
            raise ValueError(f'{_BLOCK}.device = "nvme" needs {_BLOCK}.nvme_path, a folder')
        for key in ("max_in_cpu", "buffer_count", "buffer_size"):
            least = 0 if key == "max_in_cpu" else 1
            if key in block and (isinstance(block[key], bool) or block[key] < least):
                raise ValueError(f"{_BLOCK}.{key} must be at least {least}, got {block[key]!r}")
        if device != "nvme":
            block["nvme_path"] = None
        return cls(**block)


def create_param_tier(
    *, shards: Shards, device: torch.device, config: Mapping[str, Any]
) -> RestingParams:
    """Make the memory that parameter shards rest in.

    Args:
        shards: ``(segment, numel, dtype)`` of each, in the order in which they are used.
        device: the compute device.
        config: the resolved ``zero_optimization`` block.

    Raises:
        ValueError: a setting that it cannot serve, by name.
    """
    settings = ParamSettings.from_config(config)
    num_host = len(shards) if settings.nvme_path is None else _num_within(shards, settings)
    arena = HostArena(pin_memory=settings.pin_memory and device.type != "cpu")
    host = HostShards(shards[:num_host], arena)
    file = None
    if num_host < len(shards):
        assert settings.nvme_path is not None, "without a file all rest in host memory"
        _check_buffer_size(shards[num_host:], settings)
        file = FileShards(
            shards[num_host:],
            settings.nvme_path,
            num_buffers=settings.buffer_count,
            pin_memory=settings.pin_memory and device.type != "cpu",
        )
    return RestingParams(host, file)


def _num_within(shards: Shards, settings: ParamSettings) -> int:
    """How many of the first shards are within ``max_in_cpu``."""
    total = 0
    for count, (_, numel, _) in enumerate(shards):
        total += numel
        if total > settings.max_in_cpu:
            return count
    return len(shards)


def _check_buffer_size(shards: Shards, settings: ParamSettings) -> None:
    largest = max(numel for _, numel, _ in shards)
    if largest > settings.buffer_size:
        raise ValueError(
            f"{_BLOCK}.buffer_size = {settings.buffer_size} elements, but the largest shard that "
            f"rests in the file has {largest}: raise it to that"
        )


class HostShards:
    """Shards in host memory, where a state tier may write them itself.

    Args:
        shards: see `create_param_tier`.
        arena: gives the memory.
    """

    def __init__(self, shards: Shards, arena: HostArena) -> None:
        memory = arena.tensors([(numel, dtype) for _, numel, dtype in shards])
        self.tensors = {s: t for (s, _, _), t in zip(shards, memory, strict=True)}

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(t.nbytes for t in self.tensors.values())

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Enqueue the copy on the current stream."""
        return start_copy(out, self.tensors[segment])


class RestingParams:
    """Each shard in one of the two: host memory or a file.

    Attributes:
        bytes_fetched: bytes of shards copied to their buffers so far.
    """

    def __init__(self, host: HostShards, file: FileShards | None) -> None:
        self.bytes_fetched = 0
        self._host = host
        self._file = file

    @property
    def file(self) -> FileShards | None:
        """The part in the file, if there is one."""
        return self._file

    def expect(self, segments: Sequence[int]) -> None:
        """These are going to be fetched next: the file's are read into host buffers ahead."""
        if self._file is not None:
            self._file.expect([s for s in segments if s not in self._host.tensors])

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Start to copy a shard to ``out`` (1-D, its length and dtype) on the current stream.

        Raises:
            StorageError: it could not be read from the file, or never reached it.
        """
        self.bytes_fetched += out.numel() * out.element_size()
        if segment in self._host.tensors:
            return self._host.fetch(segment, out)
        assert self._file is not None, "a segment that the tier was not made for"
        return self._file.fetch(segment, out)

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on; ``values`` is free when it returns."""
        if segment in self._host.tensors:
            self._host.tensors[segment][start : start + values.numel()].copy_(values)
        else:
            assert self._file is not None, "a segment that the tier was not made for"
            self._file.write(segment, start, values)

    def home(self, segment: int) -> Tensor | None:
        """The shard's host memory; None if it rests in the file."""
        return self._host.tensors.get(segment)

    def report(self) -> Mapping[str, int]:
        """Bytes off the device by kind; those in the file are on the disk."""
        found = {"host parameters": self._host.num_bytes}
        if self._file is not None:
            found["host buffers of parameters"] = self._file.num_buffer_bytes
            found["file parameters"] = self._file.num_bytes
        return found
