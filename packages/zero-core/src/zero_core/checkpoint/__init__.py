"""Checkpoints and exports."""

from zero_core.checkpoint.load import PARTS, read_client_state

__all__ = ["PARTS", "read_client_state"]
