"""The way over from the Trainer's ``sharded_ddp``, FairScale's, which transformers has dropped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

SHARDED_DDP = "--sharded_ddp"
INSTEAD = (
    "was FairScale's, and transformers has dropped it: give --deepspeed zero.json (in code "
    'deepspeed="zero.json") instead, a file with {"train_micro_batch_size_per_gpu": "auto", '
    '"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto"}, '
    '"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}} (stage 1 for "simple", 2 for '
    '"zero_dp_2", 3 for "zero_dp_3"; "offload" is "offload_optimizer": {"device": "cpu"} in '
    "zero_optimization)"
)

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def tell_after(shown: _ExceptHook) -> _ExceptHook:
    """Return a ``sys.excepthook`` that adds `INSTEAD` where ``sharded_ddp`` is rejected."""

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        shown(kind, error, traceback)
        if kind is TypeError and "unexpected keyword argument 'sharded_ddp'" in str(error):
            print(f"zero-engine: sharded_ddp {INSTEAD}", file=sys.stderr)

    return show
