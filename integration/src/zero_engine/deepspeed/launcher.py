"""``deepspeed.launcher.runner``: starts ranks as ``zero-engine run`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""File of environment variables for other machines. DeepSpeed's own launcher reads it."""


def main(args: Sequence[str] | None = None) -> None:
    # Imported here, because training ranks do not need torchrun.
    from zero_engine.script.run import run_program, with_host_file

    code = run_program(with_host_file(sys.argv[1:] if args is None else args))
    if code:
        sys.exit(code)
