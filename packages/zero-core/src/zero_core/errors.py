"""Exceptions. Each message says what was asked, what was found, and what to do."""

from __future__ import annotations


class ZeroError(Exception):
    """Base class of all exceptions that this package defines."""


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
    """A checkpoint is damaged: its bytes differ from those written."""


class CheckpointFailedError(CheckpointError):
    """Writing or reading a checkpoint failed for a reason that may pass, such as a full disk."""


class PatchGapError(CheckpointError):
    """A patch lacks changes since the receiver's version. Use ``weight_patch(since=None)``."""


class AccumulationScheduleError(ZeroError, RuntimeError):
    """The vertical schedule cannot compute a model or a program. The message names the block."""


class EvaluationOnlyError(ZeroError, RuntimeError, AttributeError):
    """A member of a training engine was used on one that was built for evaluation."""


class UnusedParameterError(ZeroError, AssertionError):
    """A trainable parameter got no gradient while ``ignore_unused_parameters`` is false."""
