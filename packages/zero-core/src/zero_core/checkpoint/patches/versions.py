"""Versions of a patch's receiver."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from zero_core.checkpoint.patches.document import Document
from zero_core.errors import CheckpointError, PatchGapError


class Version(BaseModel):
    """Version ``version`` of the engine ``engine``: see `Document`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    version: int


def check_version(document: Document, known: Version | None, given: int | None, what: str) -> None:
    """Refuse a patch that does not apply to a receiver.

    Args:
        document: the patch.
        known: version that is kept with the receiver, if one is.
        given: version that the caller says it has, in place of the former.
        what: the receiver, for messages.

    Raises:
        PatchGapError: the receiver is too old.
        CheckpointError: its version is not known, is another engine's, or is newer.
    """
    if document.since is None:
        return
    if given is None and known is None:
        raise CheckpointError(
            f"the patch applies to version {document.since} and newer ones, and that of {what} is "
            "not known: apply a patch of all values first (since=None), or pass version="
        )
    if given is None and known is not None and known.engine != document.engine:
        raise CheckpointError(
            f"{what} has version {known.version} of another engine than the patch: after a new "
            "build(), apply a patch of all values first (since=None)"
        )
    version = known.version if given is None and known is not None else given
    assert version is not None
    if version < document.since:
        raise PatchGapError(
            f"{what} has version {version}, and the patch applies to {document.since} and newer "
            f"ones: ask the engine for weight_patch(since={version}), or for all by since=None"
        )
    if version > document.version:
        raise CheckpointError(
            f"{what} has version {version}, which is newer than that of the patch, "
            f"{document.version}: apply patches in their order"
        )
