"""``deepspeed.launcher.runner``, of which accelerate reads a name. It starts nothing."""

from __future__ import annotations

import os
from typing import NoReturn

from zero_engine.deepspeed.errors import NotServedError
from zero_engine.script.hook import no_launcher

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
"""File with variables for other machines, which DeepSpeed's own launcher reads."""


def main(args: list[str] | None = None) -> NoReturn:
    """Refuse to start ranks, as the ``deepspeed`` program would.

    Raises:
        NotServedError: always; ranks are started by ``zero-engine run``.
    """
    raise NotServedError("its launcher", no_launcher())
