"""The backends of host memory that are there, and one of them in use for a while."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HAS_NATIVE = importlib.util.find_spec("zero_comm._kernels") is not None
if HAS_NATIVE:
    from zero_comm import _kernels
    from zero_comm.quantizer.native_backend import use_isa

    ISAS: tuple[str, ...] = tuple(_kernels.available_isas())
else:
    ISAS = ()

# As arguments of `forced`.
HOST_BACKENDS = [("torch", ""), *(("native", isa) for isa in ISAS)]


@contextmanager
def forced(name: str, isa: str = "") -> Iterator[None]:
    """Use backend ``name``, and an instruction set if one is named."""
    before = os.environ.get("ZERO_COMM_BACKEND")
    os.environ["ZERO_COMM_BACKEND"] = name
    try:
        with ExitStack() as stack:
            if isa:
                stack.enter_context(use_isa(isa))
            yield
    finally:
        if before is None:
            del os.environ["ZERO_COMM_BACKEND"]
        else:
            os.environ["ZERO_COMM_BACKEND"] = before
