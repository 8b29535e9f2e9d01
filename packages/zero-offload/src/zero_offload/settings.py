"""``offload_optimizer`` of a DeepSpeed-style config, as far as this package serves it.

Keys that only concern NVMe (``buffer_count``, ``nvme_path``) are accepted without effect on
``"device": "cpu"``, as in DeepSpeed. Three more of DeepSpeed's keys say what holds anyway, whatever
their value: ``pipeline_read`` and ``pipeline_write``, because reads and writes always overlap with
the update, and ``fast_init``, because states that start at zero are never written before their
first update. A key that is switched on and not served is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_offload.rules import STATE_DTYPES

__all__ = ["NvmeSettings", "OffloadSettings", "check_ratio", "check_state_dtype"]

_BLOCK = "offload_optimizer"
_SERVED = frozenset({"device", "ratio", "pin_memory", "state_dtype", "nvme_path", "buffer_count"})
_WITHOUT_EFFECT = frozenset({"pipeline", "pipeline_read", "pipeline_write", "fast_init"})


def check_ratio(value: Any, name: str = "ratio") -> float:
    """``value`` as a float in [0, 1]; ValueError naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{name} is the share of elements updated on the host and must be a number from 0 to "
            f"1, got {value!r}"
        )
    return float(value)


def check_state_dtype(value: Any, name: str = "state_dtype") -> str:
    """``value`` if optimizer state can be kept in it; ValueError naming it otherwise."""
    if value not in STATE_DTYPES:
        raise ValueError(f"{name} must be one of {STATE_DTYPES}, got {value!r}")
    return str(value)


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """Where the host's part of the state lies if not in memory.

    Attributes:
        path: a folder on the NVMe disk; the ranks of a host may share it.
        buffer_count: blocks of state in host memory at once; from 3 on, reading, updating and
            writing overlap.
    """

    path: str
    buffer_count: int = 4

    @classmethod
    def from_block(cls, block: Mapping[str, Any]) -> NvmeSettings:
        """Read ``nvme_path`` and ``buffer_count``; ValueError naming the one that is wrong."""
        path, count = block.get("nvme_path"), block.get("buffer_count", 4)
        if not isinstance(path, str) or not path:
            raise ValueError(
                f'{_BLOCK}.device = "nvme" needs {_BLOCK}.nvme_path, a folder on the NVMe disk; '
                f"got {path!r}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{_BLOCK}.buffer_count must be a whole number >= 1, got {count!r}")
        return cls(path, count)


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """What the block asks for.

    Attributes:
        ratio: share of the elements, from the first on, that the host updates.
        pin_memory: page-lock the host's transfer buffers.
        nvme: keep the host's part of the state in a file; None keeps it in host memory.
        state_dtype: what the host keeps Adam's moments in: one of `STATE_DTYPES`.
    """

    ratio: float = 1.0
    pin_memory: bool = True
    nvme: NvmeSettings | None = None
    state_dtype: str = "float32"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OffloadSettings:
        """Read the block from a resolved ``zero_optimization`` config.

        Whoever calls has chosen this tier, so a missing block means its defaults, and so does
        ``"device": "none"``, which is what configs resolve to that leave the block out.

        Raises:
            ValueError: a key has a value that is not served.
        """
        block = config.get(_BLOCK) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"zero_optimization.{_BLOCK} must be a block of keys, got {block!r}")
        _check_device(block.get("device"))
        for key in sorted(set(block) - _SERVED - _WITHOUT_EFFECT):
            if block[key]:
                raise ValueError(f"{_BLOCK}.{key} = {block[key]!r} is not served by zero-offload")
        pin_memory = block.get("pin_memory", True)
        if not isinstance(pin_memory, bool):
            raise ValueError(f"{_BLOCK}.pin_memory must be true or false, got {pin_memory!r}")
        return cls(
            ratio=check_ratio(block.get("ratio", 1.0), f"{_BLOCK}.ratio"),
            pin_memory=pin_memory,
            nvme=NvmeSettings.from_block(block) if block.get("device") == "nvme" else None,
            state_dtype=check_state_dtype(
                block.get("state_dtype", "float32"), f"{_BLOCK}.state_dtype"
            ),
        )


def _check_device(device: Any) -> None:
    if device not in (None, "none", "cpu", "nvme"):
        raise ValueError(
            f"{_BLOCK}.device = {device!r} is not served by zero-offload, which keeps optimizer "
            f'state in host memory or on NVMe: use "cpu" or "nvme"'
        )
