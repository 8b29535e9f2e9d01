"""`import_checkpoint`: a checkpoint of DeepSpeed's as one of zero-core's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_core import CheckpointError
from zero_core.checkpoint import MANIFEST, local_path, read_latest
from zero_core.errors import CheckpointCorruptError
from zero_engine.deepspeed_import.isolation import MAX_ANSWER_BYTES
from zero_engine.deepspeed_import.reading import find_place

_WHAT = "the import of a checkpoint"


def import_checkpoint(
    directory: str | Path,
    output: str | Path,
    tag: str | None = None,
    *,
    optimizer: str | None = None,
    frozen: Sequence[str] = (),
) -> Path:
    """Convert DeepSpeed's checkpoint ``tag`` of ``directory``, and return the new one's folder.

    Its files are pickles. They are read in a process of its own by an unpickler of tensors and
    plain containers, with bounds of memory and processor time, and without network where the
    system permits network namespaces; where it does not (many containers), a note says so.
    Progress goes to stderr. Nothing that is in ``output`` is replaced; its file ``latest`` is
    written only if there is none. Call it on one process.

    Args:
        directory: what DeepSpeed's ``save_checkpoint`` was given, or one checkpoint's folder.
        output: folder for checkpoints, as `zero_core.Engine.load_checkpoint` takes it.
        tag: None is the one that the file ``latest`` names.
        optimizer: class of the optimizer, "AdamW" or "Adam" or as the script's own is called.
            None is the one of the saved configuration.
        frozen: parameters that were not trained, for a checkpoint of stage 0, which does not say.

    Raises:
        CheckpointError: there is none, it has what is not imported, or the new folder is there
            already or overlaps with it.
        CheckpointCorruptError: it is damaged.
    """
    try:
        place = find_place(local_path(directory, _WHAT), tag)
        # The name that was asked for, also where it is a link.
        target = local_path(output, _WHAT) / Path(os.path.abspath(place)).name
        _check_target(place, target)
    except OSError as error:
        raise CheckpointError(f"{directory} is not imported into {output}: {error}") from error
    request = {
        "place": str(place),
        "output": str(output),
        "tag": target.name,
        "optimizer": optimizer,
        "frozen": list(frozen),
        "parent": os.getpid(),
    }
    answer = _ask(request, directory)
    if "error" in answer:
        is_corrupt = answer["kind"] == CheckpointCorruptError.__name__
        raise (CheckpointCorruptError if is_corrupt else CheckpointError)(answer["error"])
    return target


def _check_target(place: Path, target: Path) -> None:
    """Refuse to write into the checkpoint that is read, or over anything."""
    source, new = place.resolve(), target.resolve()
    if source.is_relative_to(new) or new.is_relative_to(source):
        raise CheckpointError(
            f"{target} would replace DeepSpeed's checkpoint {place}, or lie in it: give another "
            "folder for the imported one"
        )
    if os.path.lexists(target):
        what = "a checkpoint" if _is_ours(target) else "something else than a checkpoint of ours"
        raise CheckpointError(
            f"{target} is there already, {what}: load or remove it, or import into another folder"
        )
    latest = read_latest(target.parent)
    if latest is not None and not _is_ours(target.parent / latest):
        raise CheckpointError(
            f"{target.parent} holds checkpoints of another program (its file 'latest' names "
            f"{latest}): import into another folder"
        )


def _is_ours(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _ask(request: dict[str, Any], directory: str | Path) -> dict[str, Any]:
    """Start the process that reads, and return its answer."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "zero_engine.deepspeed_import.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            try:
                child.stdin.write(json.dumps(request).encode())
                child.stdin.close()
            except BrokenPipeError:
                pass  # it has ended: its code says how
            data = child.stdout.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                child.kill()
            child.wait()
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
    ended = f"code {child.returncode}; what it printed is above"
    if child.returncode == -signal.SIGXCPU:
        ended = "SIGXCPU: it took more processor time than files of this size need"
    elif child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
    raise CheckpointError(f"{directory} is not imported: the process that reads it ended: {ended}")
