"""Exceptions. Each message says what was asked, what was found, and what to do."""

from __future__ import annotations


class ZeroError(Exception):
    """Base class of all exceptions that this package defines."""


class ConfigError(ZeroError, ValueError):
    """The configuration is wrong, or does not fit the model or the machine."""


class MissingPartError(ConfigError):
    """A requested feature needs a package that is not installed or cannot be imported."""


class RankMismatchError(ZeroError, RuntimeError):
    """Ranks differ where they must be equal, as in the model, a setting or an argument."""


class CollectiveError(ZeroError, RuntimeError):
    """A collective failed or timed out."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint cannot be saved, found or loaded."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint or model file is damaged, incomplete or malformed."""


class CheckpointFailedError(CheckpointError):
    """Writing or reading a checkpoint failed for a reason that may pass, such as a full disk."""


class PatchGapError(CheckpointError):
    """A weight patch lacks changes since a receiver's version. Use ``weight_patch(since=None)``."""


class AccumulationScheduleError(ZeroError, RuntimeError):
    """The vertical schedule cannot run this model or these calls. The message says why."""


class EvaluationOnlyError(ZeroError, RuntimeError, AttributeError):
    """A member of a training engine was used on one that was built for evaluation."""


class UnusedParameterError(ZeroError, AssertionError):
    """A trainable parameter got no gradient while ``ignore_unused_parameters`` is false."""
