"""Checkpoints and exports: their folders, manifests, files and values.

Saving and loading are methods of the engine. These functions find and read checkpoints without an
engine, and write a checkpoint from values of another source. Finding and verifying checkpoints
needs no torch, whose import takes seconds: functions that need it import it when they are called.
"""

from zero_core.checkpoint.files import (
    PARTS,
    check_tag,
    export_checkpoint,
    find,
    holds_checkpoint,
    inspect_checkpoint,
    list_checkpoints,
    newest_step,
    prune_checkpoints,
    read_buffers,
    read_client_state,
    read_latest,
    read_weights,
    verify_checkpoint,
)
from zero_core.checkpoint.in_memory.keeper import find_launcher, started_at
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.manifest import (
    BUFFERS,
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
from zero_core.checkpoint.safetensors_files import CHUNK_BYTES, ModelFiles, write_file
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
