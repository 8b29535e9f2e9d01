"""``deepspeed.ops.op_builder``, which compiles nothing: kernels are installed with the wheels.

Scripts call ``CPUAdamBuilder().load()`` to have a kernel built before ranks need it. Here ``load``
gives the installed module; a builder of what the engine does not have refuses it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch

import cpu_adam
from zero_engine.deepspeed.errors import NotServedError


class OpBuilder:
    """Knows whether an operation is there, and its module.

    Attributes:
        NAME: of the operation, DeepSpeed's.
        module: what `load` gives; None if it is not served.
    """

    NAME: ClassVar[str]
    module: ClassVar[ModuleType | None] = None

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.module is not None

    def load(self, verbose: bool = True) -> Any:
        """Return the installed module of the operation.

        Raises:
            NotServedError: the engine does not have it.
        """
        if self.module is None:
            raise NotServedError(f"ops.op_builder.{type(self).__name__}", "there is no such kernel")
        return self.module


class CPUAdamBuilder(OpBuilder):
    """Adam on the host: cpu_adam."""

    NAME = "cpu_adam"
    module: ClassVar[ModuleType | None] = cpu_adam


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the host: cpu_adam."""

    NAME = "cpu_adagrad"
    module: ClassVar[ModuleType | None] = cpu_adam


class CPULionBuilder(OpBuilder):
    """Lion on the host: cpu_adam."""

    NAME = "cpu_lion"
    module: ClassVar[ModuleType | None] = cpu_adam


class FusedAdamBuilder(OpBuilder):
    """Adam on the device: torch's."""

    NAME = "fused_adam"
    module: ClassVar[ModuleType | None] = torch.optim


class FusedLionBuilder(OpBuilder):
    """Lion on the device: torch operations."""

    NAME = "fused_lion"
    module: ClassVar[ModuleType | None] = torch


class FusedLambBuilder(OpBuilder):
    """Lamb, which is not served."""

    NAME = "fused_lamb"


class AsyncIOBuilder(OpBuilder):
    """DeepSpeed's asynchronous files, which are not served."""

    NAME = "async_io"


ALL_OPS: dict[str, OpBuilder] = {
    builder.NAME: builder()
    for builder in (
        *(CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder),
        *(FusedAdamBuilder, FusedLionBuilder, FusedLambBuilder, AsyncIOBuilder),
    )
}
SERVED = frozenset(name for name, builder in ALL_OPS.items() if builder.is_compatible())
"""Names of the operations that `OpBuilder.load` gives."""
