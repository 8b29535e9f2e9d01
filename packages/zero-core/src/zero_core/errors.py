"""Errors. A message says what was asked, what was found, and what to do about it."""

from __future__ import annotations


class ZeroError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigError(ZeroError, ValueError):
    """The configuration is wrong. The message carries the path of the key."""


class MissingPartError(ConfigError):
    """The configuration asks for a package that is not installed."""


class RankMismatchError(ZeroError, RuntimeError):
    """Ranks were built from different models or configurations."""


class CollectiveError(ZeroError, RuntimeError):
    """A collective failed or timed out. The message names the rank, the unit and the collective."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint cannot be written, found or matched with the model."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is there, but its bytes are not what was written."""


class CheckpointFailedError(CheckpointError):
    """Writing or reading a checkpoint failed for a cause that may pass, such as a full disk."""


class PatchGapError(CheckpointError):
    """A patch lacks changes since the receiver's version: ``weight_patch(since=None)`` has all."""


class AccumulationScheduleError(ZeroError, RuntimeError):
    """The vertical schedule cannot compute a model or a program. The message names the block."""


class EvaluationOnlyError(ZeroError, RuntimeError, AttributeError):
    """A member of a training engine was used on one that was built for evaluation."""


class UnusedParameterError(ZeroError, AssertionError):
    """A step lacks a gradient, ``ignore_unused_parameters`` being false. An AssertionError too."""
