"""The cases of each group. See [Note: groups]. Bars are those of the CPU's tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_core.testing import Case

BARS = {"fp32": (4e-6, 2e-6), "bf16": (0.07, 0.04), "fp16": (0.0045, 4.5e-4)}
"""Of a loss of about 3.6 and of a final value, as in the tests of the CPU, for cases whose
arithmetic is not the oracle's: ranks or a norm summed in another order, a kernel on the host."""
QUANTIZED_BAR = 0.1
"""Of a loss, relative, with quantized collectives: twice the largest difference on the CPU, of a
model so small that every block of a quantizer holds several parameters."""
RANKS_PER_NODE = 2
_QWZ, _QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
SMALL_SCALE = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 8}}
PARAMETERS_TOO: Mapping[str, Any] = {
    "offload_optimizer": {"device": "cpu", "ratio": 1.0},
    "offload_param": {"device": "cpu"},
}
COLLECTIVES: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    2: {"qwZ": _QWZ, "qgZ": _QGZ},
    4: {"hpZ": _HPZ, "all three": {**_QWZ, **_QGZ, **_HPZ}},
}
"""By ranks: one node, and two."""


def engine_cases(*, is_dry_run: bool) -> list[list[Case]]:
    """Return the cases without offload, a list of equal bits for each dtype.

    Some steps in fp16 overflow and are skipped.
    """
    grid = itertools.product((1, 3), (0.0, 0.5), (0, 1, 2, 3))
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    if is_dry_run:
        grid, dtypes = itertools.product((1,), (0.0,), (2, 3)), ("fp32", "fp16")
    points = list(grid)
    return [
        [
            Case(stage=stage, dtype=dtype, accumulation=accumulation, clipping=clipping)
            for accumulation, clipping, stage in points
        ]
        for dtype in dtypes
    ]


def offload_cases(*, is_dry_run: bool) -> list[list[Case]]:
    """Return the offloaded cases, a list for each dtype and ratio.

    Ratios are all, none, and a split within a parameter; with all, a list has parameters on the
    host, too.

    Within a list no bit may differ. On an accelerator ratios differ by what its kernel and the
    host's round differently. What is added up over micro-steps is handed on in 16 bits: in fp16 the
    sum overflows before its parts do, which torch adds up in fp32, so there the scale is small.
    """
    ratios = (0.3,) if is_dry_run else (1.0, 0.3, 0.0)
    found = []
    for cases in engine_cases(is_dry_run=is_dry_run):
        cases = [
            replace(case, top=SMALL_SCALE)
            if case.dtype == "fp16" and case.accumulation > 1
            else case
            for case in cases
        ]
        for ratio in ratios:
            zero = _offload(ratio=ratio)
            found.append([replace(case, zero=zero) for case in cases if case.stage > 0])
        if not is_dry_run:  # on the CPU parameters lie in host memory as it is
            found.append([replace(case, zero=PARAMETERS_TOO) for case in cases if case.stage == 3])
    return found


def delay_cases(*, is_dry_run: bool) -> dict[str, Case]:
    """Return everything that has a stream of its own, by name."""
    stages = (3,) if is_dry_run else (1, 2, 3)
    found = {f"stage {stage}": Case(stage=stage, dtype="bf16") for stage in stages}
    ratios = (0.5,) if is_dry_run else (1.0, 0.5)
    for stage, ratio in itertools.product(stages, ratios):
        case = Case(stage=stage, dtype="bf16", zero=_offload(ratio=ratio))
        found[f"stage {stage}, ratio {ratio}"] = case
        # Nothing may call a step off: units are updated while backward still runs.
        early = replace(case, top={"check_grad_overflow": False})
        found[f"stage {stage}, ratio {ratio}, in backward"] = early
    if not is_dry_run:
        found["stage 3, parameters too"] = Case(stage=3, dtype="bf16", zero=PARAMETERS_TOO)
    return found


def _offload(**keys: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", **keys}}
