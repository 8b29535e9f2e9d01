"""Checkpoints and exports: their folders, manifests, files and values.

Saving and loading are methods of the engine. These functions find and read checkpoints without an
engine, and write a checkpoint from values of another source. Names are imported at their first use
(PEP 562): finding and verifying checkpoints needs no torch, whose import takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_core.checkpoint.files import (
        check_tag,
        export_checkpoint,
        find,
        holds_checkpoint,
        inspect_checkpoint,
        list_checkpoints,
        newest_step,
        prune_checkpoints,
        read_buffers,
        read_latest,
        read_weights,
        verify_checkpoint,
    )
    from zero_core.checkpoint.in_memory.keeper import started_at
    from zero_core.checkpoint.in_memory.snapshots import find_launcher
    from zero_core.checkpoint.json_values import encode
    from zero_core.checkpoint.load import PARTS, read_client_state
    from zero_core.checkpoint.manifest import (
        BUFFERS,
        CHUNK_BYTES,
        FORMAT,
        MANIFEST,
        RNG,
        VALUE,
        VERSION,
        file_name,
        is_plain,
        read_manifest,
        write_manifest,
    )
    from zero_core.checkpoint.safetensors_files import ModelFiles
    from zero_core.checkpoint.save import write_file
    from zero_core.checkpoint.storage import (
        LATEST,
        Aside,
        Location,
        discard,
        local_path,
        location_of,
        write_synced,
    )

__all__ = [
    "BUFFERS",
    "CHUNK_BYTES",
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "PARTS",
    "RNG",
    "VALUE",
    "VERSION",
    "Aside",
    "Location",
    "ModelFiles",
    "check_tag",
    "discard",
    "encode",
    "export_checkpoint",
    "file_name",
    "find",
    "find_launcher",
    "holds_checkpoint",
    "inspect_checkpoint",
    "is_plain",
    "list_checkpoints",
    "local_path",
    "location_of",
    "newest_step",
    "prune_checkpoints",
    "read_buffers",
    "read_client_state",
    "read_latest",
    "read_manifest",
    "read_weights",
    "started_at",
    "verify_checkpoint",
    "write_file",
    "write_manifest",
    "write_synced",
]

# Modules without torch come first: a name is taken from the first module that has it.
_MODULES = "storage manifest files safetensors_files json_values load save"
_HOMES = (*_MODULES.split(), "in_memory.keeper", "in_memory.snapshots")


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        found = vars(import_module(f"{__name__}.{home}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
