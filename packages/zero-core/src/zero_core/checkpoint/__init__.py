"""Checkpoints and exports: their folders, manifests, files and values.

Saving and loading are methods of the engine. These functions find and read checkpoints without an
engine, and write a checkpoint from values of another source. Finding and verifying checkpoints
needs no torch, whose import takes seconds: names that need it are imported at their first use.
"""

from typing import TYPE_CHECKING

from zero_core._lazy import lazy_names
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
from zero_core.checkpoint.json_values import encode
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
from zero_core.checkpoint.storage import (
    LATEST,
    Aside,
    Location,
    discard,
    local_path,
    location_of,
    write_synced,
)

if TYPE_CHECKING:
    from zero_core.checkpoint.in_memory.snapshots import find_launcher
    from zero_core.checkpoint.load import PARTS, read_client_state
    from zero_core.checkpoint.save import write_file

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

_HOMES = {
    "in_memory.snapshots": "find_launcher",
    "load": "PARTS read_client_state",
    "save": "write_file",
}
__getattr__ = lazy_names(__name__, _HOMES)
