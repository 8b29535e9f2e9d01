"""Files of ``torch.save``, of which only torch's list of functions that make tensors is called.

[Note: what a file may hold]
Tensors, numbers, strings and plain containers: what torch's own restricted unpickler takes
(``torch.load(weights_only=True)``). Objects of DeepSpeed's classes (loss scalers, addresses of
fragments) become `Record`s: the class's name and the object's attributes. A file that names
anything else is refused before it is read. Tensors are mapped: their bytes are read when used.
"""

from __future__ import annotations

import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_core import CheckpointError
from zero_core.errors import CheckpointCorruptError

_INERT = "deepspeed."
"""Names of these become records."""


class Record:
    """An object of a class that is not imported: what it was made of, and its attributes."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any) -> None:
        """Take what the class would have been called with."""


def load_file(path: Path) -> Any:
    """Return the content of a file of ``torch.save``: see [Note: what a file may hold]."""
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no file {path}: the checkpoint is not whole")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointCorruptError(
            f"{path} is not a regular file; links are not followed: copy the files"
        )
    if not zipfile.is_zipfile(path):
        raise CheckpointCorruptError(
            f"{path} is not a zip file of torch.save: it is damaged, or of torch's format before "
            "1.6. Load the checkpoint and save it again with DeepSpeed"
        )
    try:
        named = get_unsafe_globals_in_checkpoint(path)
        foreign = sorted(name for name in named if not name.startswith(_INERT))
        if foreign:
            raise CheckpointError(
                f"{path} names {', '.join(foreign[:5])}: objects other than tensors, plain "
                "containers and DeepSpeed's own records are not loaded. If it is of your "
                "client_state, save the checkpoint again without it"
            )
        records = [(type(name, (Record,), {}), name) for name in named]
        # Compare the records with their CRC-32: a mapped read does not.
        with zipfile.ZipFile(path) as archive:
            packed = [i for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED]
            name = packed[0].filename if packed else archive.testzip()
        if name is not None:
            raise CheckpointCorruptError(f"{path} is damaged: {name} in it is not what was written")
        with safe_globals(records):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: {_first_line(error)}") from error
    except Exception as error:  # whatever bytes of an attacker's make the unpickler raise
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise CheckpointCorruptError(f"{path} cannot be read: {reason}") from error


def flat(value: Any, where: str) -> Tensor:
    """Return a tensor as one dimension, a view of its mapped bytes.

    Raises:
        CheckpointCorruptError: it is no dense, contiguous tensor on the CPU.
    """
    is_plain = (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.is_contiguous()
    )
    if not is_plain:
        raise CheckpointCorruptError(f"{where} is no dense tensor: found {type(value).__name__}")
    found: Tensor = value.detach().reshape(-1)
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
