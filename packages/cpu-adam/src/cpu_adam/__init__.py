"""Updates of Adam and other optimizers in one pass over host memory.

Functions take contiguous arrays: torch tensors, NumPy arrays or DLPack objects. `CPUAdam`, a
``torch.optim.Optimizer`` over the same kernels, and `convert_state` need torch.
`cpu_adam.reference` defines the kernels in NumPy.

The module itself implements ``zero_core``'s ``AdamKernel`` protocol.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from cpu_adam._functional import (
    GradNorm,
    adagrad_step,
    adam_step,
    adam_step_8bit,
    adam_step_bf16,
    adam_step_split,
    copies_first,
    grad_norm_sq,
    lion_step,
    sgd_step,
    sums_grads,
)
from cpu_adam._isa import active_isa, available_isas
from cpu_adam._scalars import AdamHyper

if TYPE_CHECKING:
    from cpu_adam._convert import convert_state
    from cpu_adam.optimizer import CPUAdam

__all__ = [
    "AdamHyper",
    "CPUAdam",
    "GradNorm",
    "__version__",
    "active_isa",
    "adagrad_step",
    "adam_step",
    "adam_step_8bit",
    "adam_step_bf16",
    "adam_step_split",
    "available_isas",
    "convert_state",
    "copies_first",
    "grad_norm_sq",
    "lion_step",
    "sgd_step",
    "sums_grads",
]

__version__ = _version("cpu-adam")


# Names that need torch, and their modules.
_LAZY = {"CPUAdam": "cpu_adam.optimizer", "convert_state": "cpu_adam._convert"}


def __getattr__(name: str) -> Any:
    # Imported on demand, because importing this package must not import torch.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"cpu_adam.{name} needs torch: pip install torch", name="torch"
        ) from error
