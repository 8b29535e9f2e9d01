"""``offload_optimizer`` of a DeepSpeed-style config, as far as this package serves it.

Keys that only concern NVMe (``buffer_count``, ``pipeline_read``, ...) are accepted without effect
on ``"device": "cpu"``, as in DeepSpeed. ``update_in_backward`` is served by the engine. A key that
is switched on and not served is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_offload.rules import STATE_DTYPES

__all__ = ["OffloadSettings", "check_limit", "check_ratio", "check_state_dtype"]

_BLOCK = "offload_optimizer"
_SERVED = frozenset(
    {
        "device",
        "numa",
        "pin_memory",
        "pin_memory_bytes",
        "ratio",
        "state_dtype",
        "update_in_backward",
    }
)
_WITHOUT_EFFECT = frozenset(
    {"nvme_path", "buffer_count", "pipeline", "pipeline_read", "pipeline_write", "fast_init"}
)


def check_ratio(value: Any, name: str = "ratio") -> float:
    """``value`` as a float in [0, 1]; ValueError naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{name} is the share of elements updated on the host and must be a number from 0 to "
            f"1, got {value!r}"
        )
    return float(value)


def check_limit(value: Any, name: str = "pin_memory_bytes") -> int | None:
    """``value`` as a number of bytes, or None for no limit; ValueError naming it otherwise."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a number of bytes, got {value!r}")
    return value


def check_state_dtype(value: Any, name: str = "state_dtype") -> str:
    """``value`` if optimizer state can be kept in it; ValueError naming it otherwise."""
    if value not in STATE_DTYPES:
        raise ValueError(f"{name} must be one of {STATE_DTYPES}, got {value!r}")
    return str(value)


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """What the block asks for.

    Attributes:
        ratio: share of the elements, from the first on, that the host updates.
        pin_memory: page-lock the host's transfer buffers.
        pin_memory_bytes: most bytes to lock on this rank; None for no limit.
        state_dtype: what the host keeps Adam's moments in: one of `STATE_DTYPES`.
        numa: keep the host's thread and memory on the device's NUMA node.
    """

    ratio: float = 1.0
    pin_memory: bool = True
    pin_memory_bytes: int | None = None
    state_dtype: str = "float32"
    numa: bool = True

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
        return cls(
            ratio=check_ratio(block.get("ratio", 1.0), f"{_BLOCK}.ratio"),
            pin_memory=_boolean(block, "pin_memory"),
            numa=_boolean(block, "numa"),
            pin_memory_bytes=check_limit(
                block.get("pin_memory_bytes"), f"{_BLOCK}.pin_memory_bytes"
            ),
            state_dtype=check_state_dtype(
                block.get("state_dtype", "float32"), f"{_BLOCK}.state_dtype"
            ),
        )


def _boolean(block: Mapping[str, Any], key: str) -> bool:
    value = block.get(key, True)
    if not isinstance(value, bool):
        raise ValueError(f"{_BLOCK}.{key} must be true or false, got {value!r}")
    return value


def _check_device(device: Any) -> None:
    if device not in (None, "none", "cpu"):
        raise ValueError(
            f"{_BLOCK}.device = {device!r} is not served by zero-offload, which keeps optimizer "
            f'state in host memory: use "cpu"'
        )
