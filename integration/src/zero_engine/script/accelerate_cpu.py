"""Lets accelerate see all ranks with DeepSpeed where there is no accelerator.

accelerate (1.15, ``PartialState.__init__``) asks ``_prepare_backend`` for the backend. Without an
accelerator and with ``cpu=False``, which is how DeepSpeed is chosen, there is none; it then joins
the group all the same, but counts one process, number 0, on every rank. Every rank would read all
data and write every file. Here it is told of gloo.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Any

logger = logging.getLogger("zero_engine")


def mend(module: ModuleType) -> None:
    """Change ``module``, which is ``accelerate.state``, as the top of this file says."""
    state = module.PartialState
    prepare = state._prepare_backend

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, *args, **kwargs)
        uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        has_ranks = uses_deepspeed and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if backend is None and not self._cpu and has_ranks:
            backend = "gloo"
            if os.environ.get("RANK", "0") == "0":
                logger.warning(
                    "no accelerator: accelerate is told to join %s ranks by gloo, as it would "
                    "otherwise take every rank for the only one",
                    os.environ["WORLD_SIZE"],
                )
        return backend, kind

    state._prepare_backend = prepare_backend
