"""Backends available on this machine, and a context that forces one of them."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_comm.quantizer.backend import backend as find_backend_name

CPU = torch.device("cpu")
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
HAS_NATIVE = importlib.util.find_spec("zero_comm._kernels") is not None
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
ISAS: tuple[str, ...] = ()
if HAS_NATIVE:
    from zero_comm import _kernels
    from zero_comm.quantizer.native_backend import use_isa

    ISAS = tuple(_kernels.available_isas())


@dataclass(frozen=True)
class Target:
    """A backend, its instruction set if it has several, and the device of its tensors."""

    name: str
    isa: str = ""
    device: torch.device = CPU

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.isa, self.device.type)))

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton interprets the kernels, which takes seconds."""
        return self.name == "triton" and self.device == CPU

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Use this backend within the block."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, ZERO_COMM_BACKEND=self.name))
            if self.isa:
                stack.enter_context(use_isa(self.isa))
            if self.is_interpreted:  # the interpreter's NumPy warns about NaN
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            yield

    def for_all(self, check: Callable[[Any], None], examples: st.SearchStrategy[Any]) -> None:
        """Call ``check`` with 40 examples, or with 4 if the kernels are interpreted."""
        settings(max_examples=4 if self.is_interpreted else 40)(given(examples)(check))()


TORCH = Target("torch")
HOSTS = [TORCH, *(Target("native", isa) for isa in ISAS)]
HOSTS += [Target("triton")] if IS_INTERPRETED else []
ON_DEVICE = [] if DEVICE is None else [Target("torch", device=DEVICE)]
if DEVICE is not None and find_backend_name(DEVICE) != "torch":
    ON_DEVICE.append(Target(find_backend_name(DEVICE), device=DEVICE))

every_host = pytest.mark.parametrize("target", HOSTS, ids=str)
every_target = pytest.mark.parametrize("target", [*HOSTS, *ON_DEVICE], ids=str)
every_device = pytest.mark.parametrize("target", ON_DEVICE, ids=str)  # no accelerator: skipped
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="the compiled module isn't there")
