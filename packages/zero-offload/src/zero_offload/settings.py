"""Settings of the block ``offload_optimizer`` of a DeepSpeed-style config.

Keys that only concern NVMe (``buffer_count``, ``nvme_path``) are accepted without effect on
``"device": "cpu"``, as in DeepSpeed. The engine serves ``update_in_backward``. Four more of
DeepSpeed's keys have no effect: ``pipeline_read`` and ``pipeline_write``, because reads and writes
always overlap with the update, ``fast_init``, because states that start at zero are never written
before their first update, and ``cpuadam_cores_perc``, which belongs to ``super_offload``. A key
that is switched on and not served is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zero_offload.numa import ADVICE

STATE_DTYPES = ("float32", "bfloat16", "int8")
"""What ``offload_optimizer.state_dtype`` may be."""

_BLOCK = "offload_optimizer"
_SERVED = frozenset(
    {
        "buffer_count",
        "device",
        "device_budget",
        "nvme_path",
        "parameters",
        "pin_memory",
        "pin_memory_bytes",
        "ratio",
        "state_dtype",
        "update_in_backward",
    }
)
_NO_LONGER_SERVED = {"numa": ADVICE}
"""Switches of an earlier release and what to use instead of one that is on."""
_SHARES = ("ratio", "parameters", "device_budget")
_WITHOUT_EFFECT = frozenset(
    {"cpuadam_cores_perc", "fast_init", "pipeline", "pipeline_read", "pipeline_write"}
)


def check_ratio(value: Any, name: str = "ratio") -> float | Literal["auto"]:
    """Return ``value`` as a float in [0, 1], or "auto", or raise ValueError."""
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{name} is the share of elements updated on the host and must be a number from 0 to "
            f'1, or "auto"; got {value!r}'
        )
    return float(value)


def check_state_dtype(value: Any, name: str = "state_dtype") -> str:
    """Return ``value`` if it is one of `STATE_DTYPES`, or raise ValueError."""
    if value not in STATE_DTYPES:
        raise ValueError(f"{name} must be one of {STATE_DTYPES}, got {value!r}")
    return str(value)


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """File for the host's part of the state.

    Attributes:
        path: a folder on the NVMe disk; the ranks of a host may share it.
        buffer_count: blocks of state in host memory at once; from 3 on, reading, updating and
            writing overlap.
    """

    path: str
    buffer_count: int = 16

    @classmethod
    def from_block(cls, block: Mapping[str, Any]) -> NvmeSettings:
        """Read ``nvme_path`` and ``buffer_count``, or raise ValueError that names a wrong one."""
        path, count = block.get("nvme_path"), block.get("buffer_count", 16)
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
    """Settings of the host's part, with at most one of the keys that select its elements.

    Attributes:
        ratio: share of the elements, from the first on, that the host updates, or "auto" for the
            fastest; 1 where another key says which elements.
        pin_memory: page-lock the host's transfer buffers.
        pin_memory_bytes: most bytes to lock on this rank; None for no limit.
        nvme: keep the host's part of the state in a file; None keeps it in host memory.
        state_dtype: of Adam's moments on the host, one of `STATE_DTYPES`.
        parameters: the host updates the parameters whose names match one of these patterns.
        device_budget: the host updates the elements beyond this many bytes of state in device
            memory.
    """

    ratio: float | Literal["auto"] = 1.0
    pin_memory: bool = True
    pin_memory_bytes: int | None = None
    nvme: NvmeSettings | None = None
    state_dtype: str = "float32"
    parameters: tuple[str, ...] | None = None
    device_budget: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OffloadSettings:
        """Read the block from a resolved ``zero_optimization`` config.

        The caller has chosen this tier, so a missing block means the defaults. So does ``"device":
        "none"``, to which configs without the block resolve.

        Raises:
            ValueError: a key has a value that is not served.
        """
        block = config.get(_BLOCK) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"zero_optimization.{_BLOCK} must be a block of keys, got {block!r}")
        _check_device(block.get("device"))
        for key in sorted(set(block) - _SERVED - _WITHOUT_EFFECT - set(_NO_LONGER_SERVED)):
            if block[key]:
                raise ValueError(f"{_BLOCK}.{key} = {block[key]!r} is not served by zero-offload")
        keys = (*_SERVED, *_NO_LONGER_SERVED)
        settings = cls.check({key: block.get(key) for key in keys}, f"{_BLOCK}.")
        if block.get("device") != "nvme":
            return settings
        return replace(settings, nvme=NvmeSettings.from_block(block))

    @classmethod
    def check(cls, keys: Mapping[str, Any], prefix: str = "") -> OffloadSettings:
        """Check keys and return the settings. A key of None counts as missing.

        Raises:
            ValueError: two keys say which elements, or one has a value that is not served.
        """
        given = {key: value for key, value in keys.items() if value is not None}
        for key, advice in _NO_LONGER_SERVED.items():
            if _boolean(given, key, prefix, default=False):
                message = f"{prefix}{key} has no effect: {advice}"
                warnings.warn(message, DeprecationWarning, stacklevel=3)
        shares = [f"{prefix}{key}" for key in _SHARES if key in given]
        if len(shares) > 1:
            raise ValueError(f"{' and '.join(shares)} each say what the host updates: give one")
        names, budget = f"{prefix}parameters", f"{prefix}device_budget"
        return cls(
            ratio=check_ratio(given.get("ratio", 1.0), f"{prefix}ratio"),
            pin_memory=_boolean(given, "pin_memory", prefix, default=True),
            pin_memory_bytes=_check_bytes(
                given.get("pin_memory_bytes"), f"{prefix}pin_memory_bytes"
            ),
            state_dtype=check_state_dtype(
                given.get("state_dtype", "float32"), f"{prefix}state_dtype"
            ),
            parameters=_check_names(given.get("parameters"), names),
            device_budget=_check_bytes(given.get("device_budget"), budget),
        )


def _boolean(given: Mapping[str, Any], key: str, prefix: str, *, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{prefix}{key} must be true or false, got {value!r}")
    return value


def _check_device(device: Any) -> None:
    if device not in (None, "none", "cpu", "nvme"):
        raise ValueError(
            f"{_BLOCK}.device = {device!r} is not served by zero-offload, which keeps optimizer "
            f'state in host memory or on NVMe: use "cpu" or "nvme"'
        )


def _check_names(value: Any, name: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a list of patterns of parameter names, got {value!r}")
    return tuple(value)


def _check_bytes(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of bytes, got {value!r}")
    return value
