"""Measured cost curves of a machine, by which a plan converts bytes and operations to seconds.

[Note: names of curves]
`Rates.curves` has a curve for each name. "DTYPE" is a dtype's name, such as "bfloat16".

name                    amount                  seconds of
OPERATOR.DTYPE          see `Operator`          a call of a torch operator, such as "gelu.float32"
matmul.DTYPE            floating-point          a matrix product, and any operator with a count of
                        operations              operations but without a curve
product.DTYPE           bytes read and written  the memory traffic of a product, added to matmul
memory.DTYPE            bytes read and written  an elementwise operator, and any other operator
operator                calls                   a call outside its kernel
pass                    units                   the engine's work for a unit, forward or backward
step                    steps                   the engine's work for a step
update.device.DTYPE     elements                the optimizer's update on the compute device, by
                                                the dtype of the parameters
update.host.DTYPE       elements                the update on the host, with the suffix ".int8" or
                                                ".bfloat16" for moments of fewer bits
gather.within           bytes a rank sends      a gather among the ranks of a node, also "reduce"
                                                and "agree" (the small all-reduce of a step)
gather.between          bytes a rank sends      a gather between nodes
gather.between.cpu      bytes a rank sends      processor time of a gather between nodes
copy.to_host            bytes                   a copy from a device to its host, or "to_device"
file.read, file.write   bytes                   access to the disk of NVMe offload
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_core.errors import ConfigError
from zero_core.footprint import Operator

FORMAT = "zero calibration 1"


@dataclass(frozen=True)
class Curve:
    """Seconds as a piecewise linear function of an amount.

    Attributes:
        points: ``(amount, seconds)`` by rising amount. Below the first point the seconds are
            constant. Above the last point the slope of the last two continues. A single point gives
            a constant rate above it.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of_rate(cls, rate: float, latency_s: float = 0.0) -> Curve:
        return cls(((0.0, latency_s), (rate, latency_s + 1.0)))

    def seconds(self, amount: float) -> float:
        """Return the seconds of ``amount``, 0 for an amount of 0."""
        if amount <= 0:
            return 0.0
        points = self.points
        if len(points) == 1:
            return points[0][1] * max(1.0, amount / points[0][0])
        last = bisect_right(points, amount, key=lambda point: point[0])
        last = min(max(last, 1), len(points) - 1)
        (low, early), (high, late) = points[last - 1], points[last]
        slope = (late - early) / (high - low)
        return max(early + slope * (amount - low), min(points[0][1], late))


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank while the other ranks of its node are equally busy.

    Attributes:
        ranks: ranks of the node that were measured at once.
        threads: threads of a rank, on a CPU.
        cores: cores that the ranks of a node share. None if each rank computes on an accelerator.
        curves: see [Note: names of curves].
    """

    ranks: int
    threads: int
    cores: int | None
    curves: Mapping[str, Curve]

    def seconds(self, names: Sequence[str], amount: float) -> float:
        """Return the seconds by the first of ``names`` with a curve, or raise ConfigError."""
        for name in names:
            if name in self.curves:
                return self.curves[name].seconds(amount)
        raise ConfigError(
            f"the calibration has no rate called {' or '.join(map(repr, names))}: measure again "
            "with zero-engine doctor --measure"
        )

    def operator_s(self, call: Operator) -> float:
        if not call.amount:
            return 0.0
        own, dtypes = f"{call.kind}.{call.dtype}", (call.dtype, "float32")
        if own in self.curves or not call.is_product:
            return self.seconds([own, *(f"memory.{dtype}" for dtype in dtypes)], call.amount)
        product = f"product.{call.dtype}"
        memory_s = self.seconds([product], call.nbytes) if product in self.curves else 0.0
        return memory_s + self.seconds([f"matmul.{dtype}" for dtype in dtypes], call.amount)

    def pass_s(self, calls: Mapping[Operator, int]) -> float:
        """Return the seconds of calls in sequence. An accelerator runs kernels beside launches."""
        kernels = sum(number * self.operator_s(call) for call, number in calls.items())
        launches = sum(calls.values()) * self.seconds(["operator"], 1)
        return max(kernels, launches) if self.cores is None else kernels + launches


@dataclass(frozen=True)
class Calibration:
    """Speeds of a machine, measured on it or taken from a table of devices.

    Attributes:
        device: name of the processor or accelerator.
        source: date of the measurement, or origin of published figures with the assumptions.
        rates: one entry per number of ranks that share a node.
    """

    device: str
    source: str
    rates: tuple[Rates, ...]

    def at(self, ranks_per_node: int) -> Rates:
        """Return the rates for the measured number of ranks nearest to ``ranks_per_node``."""
        return min(self.rates, key=lambda r: (abs(math.log(r.ranks / ranks_per_node)), r.ranks))

    def to_json(self) -> str:
        rates = [
            {**vars(r), "curves": {name: curve.points for name, curve in r.curves.items()}}
            for r in self.rates
        ]
        return json.dumps({"format": FORMAT, **vars(self), "rates": rates})

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str) -> Calibration:
        """Return what `to_json` wrote in the file ``name``. Other content raises ConfigError."""
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
            rates = tuple(
                Rates(
                    ranks=_positive(row["ranks"]),
                    threads=_positive(row["threads"]),
                    cores=None if row["cores"] is None else _positive(row["cores"]),
                    curves={str(k): _curve(k, v) for k, v in row["curves"].items()},
                )
                for row in content["rates"]
            )
            if not rates:
                raise ValueError("no rates")
            return cls(str(content["device"]), str(content["source"]), rates)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"no key {error}" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"{name} is no calibration ({cause}): write one with zero-engine doctor --measure "
                "--output FILE"
            ) from None


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected a whole number of at least 1, found {value!r}")
    return value


def _curve(name: str, points: Any) -> Curve:
    found = tuple((float(amount), float(seconds)) for amount, seconds in points)
    amounts = [amount for amount, _ in found]
    if not found or any(not math.isfinite(v) or v < 0 for point in found for v in point):
        raise ValueError(f"curve {name}: expected pairs of finite numbers")
    if amounts != sorted(set(amounts)) or (len(found) == 1 and not amounts[0]):
        raise ValueError(f"curve {name}: amounts must rise")
    return Curve(found)
