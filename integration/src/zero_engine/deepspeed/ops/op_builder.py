"""``deepspeed.ops.op_builder``: builders of kernels, which are installed with the wheels.

Scripts call ``CPUAdamBuilder().load()`` to compile a kernel before ranks need it. Here ``load``
returns the installed module.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch

import cpu_adam
from zero_engine.deepspeed.errors import NotServedError


class OpBuilder:
    """Operation with DeepSpeed's ``NAME`` and an installed ``module``, None if it is not served."""

    NAME: ClassVar[str]
    module: ClassVar[ModuleType | None] = None

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.module is not None

    def load(self, verbose: bool = True) -> Any:
        """Return the installed module. Raises NotServedError if there is none."""
        if self.module is None:
            raise NotServedError(f"ops.op_builder.{type(self).__name__}", "there is no such kernel")
        return self.module


def _builder(class_name: str, name: str, module: ModuleType | None) -> type[OpBuilder]:
    return type(class_name, (OpBuilder,), {"NAME": name, "module": module, "__module__": __name__})


CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", cpu_adam)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", cpu_adam)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", cpu_adam)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", torch.optim)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", torch)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", None)
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", None)

ALL_OPS = {builder.NAME: builder() for builder in OpBuilder.__subclasses__()}
