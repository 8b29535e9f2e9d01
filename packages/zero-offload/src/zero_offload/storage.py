"""Deprecated alias of `zero_offload.memory.storage`. Removed in the next release."""

import warnings

from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.memory.storage import BlockFile, Transfer

__all__ = ["BlockFile", "StorageCorruptError", "StorageError", "Transfer"]

warnings.warn(
    "zero_offload.storage is now zero_offload.memory.storage; "
    "the old name is removed in the next release",
    DeprecationWarning,
    stacklevel=2,
)
