"""``deepspeed.add_config_arguments``: the options that scripts have on their command line."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, and their old names; the same parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(
            f"--{name}",
            default=False,
            action="store_true",
            help="for the script's own use; the engine does not read it",
        )
        group.add_argument(
            f"--{name}_config", default=None, type=str, help="path of the JSON configuration"
        )
    return parser
