"""Deprecated aliases of names in `zero_comm.transport.protocol`, removed in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from zero_comm.transport import protocol

_RENAMED = {"NativeCollectives": "TransportCollectives", "NativeWork": "Work"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'zero_comm.native' has no attribute {name!r}")
    warnings.warn(
        f"zero_comm.native.{name} is now zero_comm.transport.protocol.{_RENAMED[name]}; "
        f"the old name is removed in the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(protocol, _RENAMED[name])
