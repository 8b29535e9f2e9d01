"""``zero-engine verify | inspect | export | prune | import``: checkpoints on the command line.

torch is imported only when a command needs it, because the import takes seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import zero_core
from zero_core.errors import CheckpointError
from zero_engine.progress import working
from zero_engine.train.options import RESOLVED_CONFIG

Text = str | None
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Answer = tuple[Mapping[str, object], str]
"""A command's report, as JSON values and as text."""


def option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)


_DTYPES = ("float32", "bfloat16", "float16")
_Folder = Annotated[str, typer.Argument(metavar="DIR", show_default=False)]
_Output = Annotated[str, typer.Argument(metavar="OUT", show_default=False)]
_Tag = Annotated[Text, option("Name of the checkpoint. Default: the newest.")]


def _checkpoints_of(directory: str) -> str:
    """Return the folder or URL of the checkpoints in ``directory``, which may be a run's folder."""
    if not Path(directory, RESOLVED_CONFIG).is_file():
        return directory
    from zero_engine.train.settings import RunFolder

    return str(RunFolder.of({"output": directory}).checkpoint)


def verify(directory: _Folder, tag: _Tag = None) -> Answer:
    """Check every byte of a checkpoint. Ends with code 1 if it is damaged."""
    # Resolve the default tag first, because a live run may save a newer checkpoint meanwhile.
    directory = _checkpoints_of(directory)
    found = zero_core.inspect_checkpoint(directory, tag)
    with working("verifying") as show:
        checked = zero_core.verify_checkpoint(directory, found["tag"], progress=show)
    text = f"{found['folder']}: all {found['files']} files are intact ({checked} bytes)"
    return {"is_whole": True, "folder": found["folder"], "bytes": checked}, text


def inspect(directory: _Folder, tag: _Tag = None) -> Answer:
    """Show what a checkpoint holds, without reading its tensors."""
    found = zero_core.inspect_checkpoint(_checkpoints_of(directory), tag)
    lines = []
    for key, value in found.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        title = "frozen are saved" if key == "has_frozen" else key.replace("_", " ")
        lines.append(f"{title:17} {shown}")
    return found, "\n".join(lines)


def export(
    directory: _Folder,
    output: _Output,
    tag: _Tag = None,
    dtype: Annotated[
        Text, option("float32, bfloat16 or float16. Default: as it was trained.")
    ] = None,
) -> Answer:
    """Write a checkpoint's model as model.safetensors, in Hugging Face's layout."""
    import torch

    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    chosen = None if dtype is None else getattr(torch, dtype)
    place, hf = _checkpoints_of(directory), Path(directory, "hf")
    found = zero_core.inspect_checkpoint(place, tag)
    with working("exporting") as show:
        written = zero_core.export_checkpoint(
            place, output, found["tag"], dtype=chosen, progress=show
        )
    for file in hf.glob("*.json") if place != directory else ():  # a run has its model's config
        shutil.copy(file, output)
    nbytes = sum(file.stat().st_size for file in Path(output).glob("*.safetensors"))
    text = (
        f"{output}: {len(written)} parameters, {dtype or 'dtypes as trained'}, {nbytes:,} bytes. "
        "Load them with safetensors.torch.load_model(model, FILE), which knows tied weights"
    )
    return {"output": output, "parameters": len(written), "bytes": nbytes}, text


def prune(
    directory: _Folder,
    keep_last: Annotated[int, typer.Option(min=1, help="How many stay.", show_default=False)],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Steps whose multiples stay too.", show_default=False)
    ] = None,
    prefix: Annotated[
        list[str], typer.Option(help="What the step follows in their names. May be repeated.")
    ] = ["step-", "global_step"],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
) -> Answer:
    """Remove older checkpoints whose tags are a prefix and a step number. Others always stay."""
    with working("looking for checkpoints" if dry_run else "removing checkpoints"):
        removed = zero_core.prune_checkpoints(
            _checkpoints_of(directory),
            keep_last=keep_last,
            keep_every=keep_every,
            prefixes=prefix,
            is_trial=dry_run,
        )
    verb = "would be removed" if dry_run else "removed"
    text = "\n".join(f"{tag} {verb}" for tag in removed) or "nothing to remove"
    return {"removed": removed, "is_trial": dry_run}, text


def convert(
    directory: _Folder,
    output: _Output,
    tag: _Tag = None,
    optimizer: Annotated[
        Text, option("Class of the optimizer. Default: that of the saved configuration.")
    ] = None,
    frozen: Annotated[
        list[str] | None,
        option("A parameter that was frozen, for a checkpoint of stage 0. Repeatable."),
    ] = None,
) -> Answer:
    """Convert a checkpoint of DeepSpeed, of any ZeRO stage or universal, to this engine's format.

    The files are read without network if the system permits network namespaces. Pickles are read as
    by torch.load(weights_only=True). No file is replaced.
    """
    from zero_engine.deepspeed_import.importing import import_checkpoint

    place = Path(_checkpoints_of(directory))
    if any((folder / "manifest.json").is_file() for folder in (place, *place.glob("*"))):
        raise CheckpointError(
            f"{directory} is this engine's checkpoint already: load it with "
            "engine.load_checkpoint(), or write its weights with zero-engine export"
        )
    with working("importing"):
        place = import_checkpoint(directory, output, tag, optimizer=optimizer, frozen=frozen or ())
    return {"folder": str(place)}, f"wrote {place}"
