"""Adam on host memory, in one pass over it.

- `adam_step`: one update of torch tensors, NumPy arrays or anything with DLPack.
- `CPUAdam`: a ``torch.optim.Optimizer`` over the same kernels (needs torch).
- `active_isa`, `available_isas`: the instruction set in use, and those that work here.
- `cpu_adam.reference`: the kernels' definition in plain NumPy.

The module itself satisfies ``zero_core``'s ``AdamKernel`` protocol, by shape alone.
"""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from cpu_adam._functional import adam_step
from cpu_adam._isa import active_isa, available_isas

if TYPE_CHECKING:
    from cpu_adam.optimizer import CPUAdam

__all__ = ["CPUAdam", "__version__", "active_isa", "adam_step", "available_isas"]

__version__ = _version("cpu-adam")


def __getattr__(name: str) -> Any:
    # On demand: importing this package neither needs torch nor loads it.
    if name == "CPUAdam":
        try:
            from cpu_adam.optimizer import CPUAdam
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "cpu_adam.CPUAdam needs torch: pip install 'cpu-adam[torch]'", name="torch"
            ) from error
        return CPUAdam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
