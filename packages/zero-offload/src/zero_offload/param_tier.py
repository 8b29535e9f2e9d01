"""Factory of parameter tiers: the entry point ``host`` of ``zero_core.param_tiers``.

ZeRO-Infinity (arXiv 2104.07857), section 5.1: a parameter shard is on the device only while its
unit is computed. Host memory holds the first ``max_in_cpu`` elements in the order of use, and a
file the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import start_copy
from zero_offload.params.param_file import FileShards
from zero_offload.protocols import Work

_BLOCK = "offload_param"

Shards = Sequence[tuple[int, int, torch.dtype]]


@dataclass(frozen=True, slots=True)
class ParamSettings:
    """Settings of the block ``offload_param``.

    Attributes:
        nvme_path: folder of the file; None keeps everything in host memory.
        max_in_cpu: elements that stay in host memory although there is a file.
        buffer_count: host buffers for reads ahead of use.
        buffer_size: most elements of a shard in such a buffer.
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
) -> OffloadedParams:
    """Create the memory of offloaded parameter shards.

    Args:
        shards: ``(segment, numel, dtype)`` of each, in the order in which they are used.
        device: the compute device.
        config: the resolved ``zero_optimization`` block.

    Raises:
        ValueError: a setting that it cannot serve, by name.
    """
    settings = ParamSettings.from_config(config)
    num_host = num_in_host_memory(shards, settings)
    should_pin = settings.pin_memory and device.type != "cpu"
    memory = HostMemory(should_pin=should_pin)
    tensors = memory.tensors([(numel, dtype) for _, numel, dtype in shards[:num_host]])
    host = {segment: t for (segment, _, _), t in zip(shards, tensors, strict=False)}
    file = None
    if num_host < len(shards):
        assert settings.nvme_path is not None, "without a file all are in host memory"
        _check_buffer_size(shards[num_host:], settings)
        file = FileShards(
            shards[num_host:],
            settings.nvme_path,
            num_buffers=settings.buffer_count,
            pin_memory=should_pin,
        )
    return OffloadedParams(host, file)


def num_in_host_memory(shards: Shards, settings: ParamSettings) -> int:
    """Return how many of the first shards are in host memory. The others are in the file."""
    if settings.nvme_path is None:
        return len(shards)
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
            f"is kept in the file has {largest}: raise it to that"
        )


class OffloadedParams:
    """Parameter shards off the device, each in host memory or in a file.

    Args:
        host: the shards in host memory by segment, which a state tier may write itself.
        file: the shards in the file, if there is one.

    Attributes:
        bytes_fetched: bytes of shards copied to their buffers so far.
    """

    def __init__(self, host: Mapping[int, Tensor], file: FileShards | None) -> None:
        self.bytes_fetched = 0
        self.file = file
        self._host = host

    def expect(self, segments: Sequence[int]) -> None:
        """Announce the shards that are fetched next. Those in the file are read ahead."""
        if self.file is not None:
            self.file.expect([s for s in segments if s not in self._host])

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Start to copy a shard to ``out`` (1-D, of its length and dtype) on the current stream.

        Raises:
            StorageError: it could not be read from the file, or was not written to it.
        """
        self.bytes_fetched += out.numel() * out.element_size()
        if segment in self._host:
            return start_copy(out, self._host[segment])
        assert self.file is not None, "a segment that the tier was not made for"
        return self.file.fetch(segment, out)

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on. ``values`` may be reused when it returns."""
        if segment in self._host:
            self._host[segment][start : start + values.numel()].copy_(values)
        else:
            assert self.file is not None, "a segment that the tier was not made for"
            self.file.write(segment, start, values)

    def home(self, segment: int) -> Tensor | None:
        """Return the shard's host memory, or None if it is in the file."""
        return self._host.get(segment)

    def report(self) -> Mapping[str, int]:
        """Return the bytes off the device by kind. Those in the file are on the disk."""
        found = {"host parameters": sum(t.nbytes for t in self._host.values())}
        if self.file is not None:
            found["host buffers of parameters"] = self.file.num_buffer_bytes
            found["file parameters"] = self.file.blocks.num_bytes
        return found
