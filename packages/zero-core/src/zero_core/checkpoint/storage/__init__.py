"""Storage of checkpoints: folders of this machine, and any file system that fsspec serves.

A checkpoint is committed by one write: the rename of its folder, or of the object `MANIFEST` where
there are no renames. Nothing that was written before counts.
"""

import re

MANIFEST = "manifest.json"
"""Name of the file that describes a checkpoint, and vouches for its other files."""
LATEST = "latest"
"""Name of the file that names the newest checkpoint of a folder."""
SUBFOLDER = re.compile(r"data-[0-9a-f]{32}")
"""Names of folders beside a manifest that have the files, where there are no renames."""
NO_SAVE_S = 24 * 3600
"""Seconds after which nothing belongs to a save under way, where no lock says so."""
ADVICE = "save to another place; checkpoints that were there before are whole"
"""The cure in errors of a save."""
