"""Choice of the kernels' instruction set.

The default is the fastest one that CPU and operating system support. The environment variable
``CPU_ADAM_ISA`` selects another one. All instruction sets compute the same bits, except NaN bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cpu_adam import _kernels

_VARIABLE = "CPU_ADAM_ISA"
_active: int | None = None


def available_isas() -> tuple[str, ...]:
    """Return which of scalar, avx2, avx512 and neon this machine supports, the slowest first."""
    return tuple(_kernels.available_isas())


def active_isa() -> str:
    """Return the name of the instruction set in use: the best one, or ``CPU_ADAM_ISA``.

    The variable is read once, at first use.

    Raises:
        ValueError: ``CPU_ADAM_ISA`` is unknown or not supported by this machine.
    """
    return available_isas()[active_isa_index()]


def active_isa_index() -> int:
    """Return the index of `active_isa` in `available_isas`, the kernels' first argument."""
    global _active
    if _active is None:
        _active = _choose(os.environ.get(_VARIABLE, ""))
    return _active


def _choose(wanted: str) -> int:
    usable = _kernels.available_isas()
    name = wanted.strip().lower()
    if not name:
        return len(usable) - 1
    if name in usable:
        return usable.index(name)
    is_known = name in _kernels.known_isas()
    problem = "is not supported by this machine" if is_known else "is no instruction set"
    raise ValueError(
        f"{_VARIABLE}={wanted!r} {problem}; unset it, or use one of: {', '.join(usable)}"
    )


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use instruction set ``name`` in all threads within the block, for tests and benchmarks."""
    global _active
    previous = _active
    _active = _choose(name)
    try:
        yield
    finally:
        _active = previous
