"""`import_checkpoint`: a checkpoint of DeepSpeed's as one of zero-core's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_core import CheckpointError
from zero_core.errors import CheckpointCorruptError


def import_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    optimizer: str | None = None,
    frozen: Sequence[str] = (),
) -> Path:
    """Convert DeepSpeed's checkpoint ``tag`` of ``directory``, and return the new one's folder.

    Its files are pickles. They are read in a process of its own without network, by an unpickler
    of tensors and plain containers; progress goes to stderr. Call it on one process.

    Args:
        directory: what DeepSpeed's ``save_checkpoint`` was given, or one checkpoint's folder.
        output: folder for checkpoints, as `zero_core.Engine.load_checkpoint` takes it.
        tag: None is the one that the file ``latest`` names.
        optimizer: class of the optimizer, "AdamW" or "Adam" or as the script's own is called.
            None is the one of the saved configuration.
        frozen: parameters that were not trained, for a checkpoint of stage 0 in fp32, which does
            not say.

    Raises:
        CheckpointError: there is none, or it has what is not imported.
        CheckpointCorruptError: it is damaged.
    """
    request = {
        "directory": str(directory),
        "output": str(output),
        "tag": tag,
        "optimizer": optimizer,
        "frozen": list(frozen),
    }
    child = subprocess.run(
        [sys.executable, "-P", "-m", "zero_engine.deepspeed_import.child", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if child.returncode != 0:
        ended = f"code {child.returncode}"
        if child.returncode < 0:
            ended = signal.Signals(-child.returncode).name
        raise CheckpointError(
            f"{directory} is not imported: the process that reads it ended with {ended}; what it "
            "printed is above"
        )
    answer = json.loads(child.stdout)
    if "error" in answer:
        is_corrupt = answer["kind"] == CheckpointCorruptError.__name__
        raise (CheckpointCorruptError if is_corrupt else CheckpointError)(answer["error"])
    return Path(answer["place"])
