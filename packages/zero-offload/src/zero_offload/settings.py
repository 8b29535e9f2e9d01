"""Settings of the block ``offload_optimizer`` in a DeepSpeed-style config.

The engine reads ``update_in_backward``. As in DeepSpeed, ``nvme_path`` and ``buffer_count`` have no
effect without ``"device": "nvme"``. DeepSpeed's keys ``pipeline``, ``pipeline_read``,
``pipeline_write``, ``fast_init`` and ``cpuadam_cores_perc`` are accepted without effect. An unknown
key with a true value raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

STATE_DTYPES = ("float32", "bfloat16", "int8")
"""Allowed values of ``offload_optimizer.state_dtype``."""
INSTALL = "pip install packages/{} (in a clone of the repository)"
"""Advice of error messages, to format with the name of a package that no index has."""

HostShare = Literal["last", "first"]
"""End of the flat space at which the host's elements are, unless parameter names select them.

``last``: the last elements. Backward produces their gradients first, and forward needs their new
values last. ``first``: the first elements, as in DeepSpeed.
"""

_BLOCK = "offload_optimizer"


def check_state_dtype(value: Any, name: str = "state_dtype") -> str:
    """Return ``value`` if it is one of `STATE_DTYPES`, or raise ValueError."""
    if value not in STATE_DTYPES:
        raise ValueError(f"{name} must be one of {STATE_DTYPES}, got {value!r}")
    return str(value)


def _ratio(value: Any, name: str) -> float | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{name} is the share of elements updated on the host and must be a number from 0 to "
            f'1, or "auto"; got {value!r}'
        )
    return float(value)


def _host_share(value: Any, name: str) -> HostShare:
    if value not in ("last", "first"):
        raise ValueError(f'{name} must be "last" or "first", got {value!r}')
    return value  # type: ignore[no-any-return]


def _boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _whole(value: Any, name: str, kind: str = "number of bytes", *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole {kind}, got {value!r}")
    return value


def _patterns(value: Any, name: str) -> tuple[str, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a list of patterns of parameter names, got {value!r}")
    return tuple(value)


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "ratio": _ratio,
    "parameters": _patterns,
    "device_budget": _whole,
    "host_share": _host_share,
    "pin_memory": _boolean,
    "pin_memory_bytes": _whole,
    "state_dtype": check_state_dtype,
    "undo_buffer_size": _whole,
    "lossless_upload": _boolean,
}
"""Validators of `OffloadSettings`' fields, except ``nvme_path`` and ``buffer_count``."""
_SHARES = ("ratio", "parameters", "device_budget")
_KNOWN = {
    *("device", "nvme_path", "buffer_count", "update_in_backward", *_CHECKS),
    *("cpuadam_cores_perc", "fast_init", "pipeline", "pipeline_read", "pipeline_write"),
}


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Settings of optimizer offload.

    Attributes:
        ratio: the host's share of the elements, unless ``parameters`` or ``device_budget`` is set.
        nvme_path: folder of the state file; None keeps optimizer state in host memory.
        buffer_count: maximum blocks of the file in host memory; 3 are enough to overlap transfers.
        undo_buffer_size: maximum bytes of `HostTier.speculate`'s undo log; None for no limit.
    """

    ratio: float | Literal["auto"] = 1.0
    host_share: HostShare = "last"
    pin_memory: bool = True
    pin_memory_bytes: int | None = None
    nvme_path: str | None = None
    buffer_count: int = 16
    state_dtype: str = "float32"
    parameters: tuple[str, ...] | None = None
    device_budget: int | None = None
    undo_buffer_size: int | None = None
    lossless_upload: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OffloadSettings:
        """Read the block from a resolved ``zero_optimization`` config, or raise ValueError.

        A missing block and ``{"device": "none"}`` both mean the defaults.
        """
        block = config.get(_BLOCK) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"zero_optimization.{_BLOCK} must be a block of keys, got {block!r}")
        if (device := block.get("device")) not in (None, "none", "cpu", "nvme"):
            raise ValueError(
                f"{_BLOCK}.device = {device!r} is not served by zero-offload, which keeps "
                f'optimizer state in host memory or on NVMe: use "cpu" or "nvme"'
            )
        for key in sorted(set(block) - _KNOWN):
            if block[key]:
                raise ValueError(f"{_BLOCK}.{key} = {block[key]!r} is not served by zero-offload")
        settings = cls.check(block, f"{_BLOCK}.")
        if device != "nvme":
            return settings
        path, count = block.get("nvme_path"), block.get("buffer_count", 16)
        if not isinstance(path, str) or not path:
            raise ValueError(
                f'{_BLOCK}.device = "nvme" needs {_BLOCK}.nvme_path, a folder on the NVMe disk; '
                f"got {path!r}"
            )
        count = _whole(count, f"{_BLOCK}.buffer_count", "number >= 1", least=1)
        return replace(settings, nvme_path=path, buffer_count=count)

    @classmethod
    def check(cls, keys: Mapping[str, Any], prefix: str = "") -> OffloadSettings:
        """Return the settings in ``keys``, or raise ValueError. A value None means the default."""
        given = {key: value for key, value in keys.items() if value is not None}
        shares = [f"{prefix}{key}" for key in _SHARES if key in given]
        if len(shares) > 1:
            raise ValueError(f"{' and '.join(shares)} each say what the host updates: give one")
        names = [name for name in _CHECKS if name in given]
        return cls(**{name: _CHECKS[name](given[name], f"{prefix}{name}") for name in names})
