"""Triton's kernels on the fake CUDA, run by Triton's interpreter as jobs of the current stream.

Without `install`, the interpreter copies each argument's whole storage to the host and back. Writes
by other streams to that storage in the meantime are lost. `install` needs ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import traceback
from typing import Any

import torch
from torch import Tensor

from support.fake_cuda import _library

_jobs: dict[int, Any] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()  # the interpreter has global state


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    try:
        with _lock, torch.no_grad():
            _jobs.pop(number)()
    except BaseException:  # ctypes would only print the error
        traceback.print_exc()
        os.abort()


def _at_shadow(value: Any) -> Any:
    """Return a CPU tensor over the memory of a nonempty CUDA tensor. Other values are unchanged."""
    if not isinstance(value, Tensor) or not value.is_cuda or not value.numel():
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    shadow_of = _library()._ZN4fake9shadow_ofEPKv
    shadow_of.restype, shadow_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    memory = (ctypes.c_char * (extent * value.itemsize)).from_address(shadow_of(value.data_ptr()))
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    return flat.as_strided(value.shape, value.stride())


def install() -> None:
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **keys: Any) -> None:
        given = [_at_shadow(arg) for arg in args], {k: _at_shadow(v) for k, v in keys.items()}
        number = next(_numbers)
        _jobs[number] = lambda: run(self, *given[0], **given[1])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert _library().cudaLaunchHostFunc(stream, _run, ctypes.c_void_p(number)) == 0

    GridExecutor.__call__ = launch
    GridExecutor._init_args_hst = lambda self, args, keys: (args, keys)
    GridExecutor._restore_args_dev = lambda self, *given: None
