"""Times of a transformer's step on machines described by published figures.

[Note: seconds]
passes  operators of one micro-batch on the meta device (`zero_core.footprint.Trace`), each by the
        device's published peaks and the shares of them assumed to be reached
        (`zero_engine.calibration.machine.EFFICIENCY`). Nothing is recomputed
link    2 bytes per parameter in each direction over the device's bus
device  28 bytes per parameter over the device's memory bandwidth
host    bytes of `States` per parameter over the host's memory bandwidth, of which 0.6 is assumed to
        be reached. The experiment ``cpu_adam`` ("offload path") shows that the kernel is limited by
        memory. With 8-bit states this requires enough cores

On a node with several ranks, each has its share of the parameters, of the bus and of the host's
memory. Steps do not include exchanges between ranks, nor the memory traffic of bus copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.harness.models import Gpt, GptShape
from lab.experiments.schedule.job import Times
from zero_core.blueprint import Blueprint
from zero_core.config import load_config
from zero_core.footprint.activations import Trace, trace_step
from zero_engine.calibration.machine import BYTES_PER_UPDATE, EFFICIENCY, device_calibration
from zero_engine.planning.rates import Curve, Rates

CHUNK_NUMEL = 1 << 24
"""Maximum number of elements of an update that are published together."""
_GRAD_BYTES = 2


@dataclass(frozen=True)
class States:
    """Host memory traffic in bytes per bf16 parameter. A written cache line is also read.

    Attributes:
        update: traffic of an update, including the gradient and the new parameter.
        log: traffic of the copies to an undo log.
        keep: traffic of publishing logged updates.
        undo: traffic of the copies back from the log.
    """

    name: str
    update: int
    log: int
    keep: int
    undo: int
    is_eight_bit: bool = False


FP32 = States("fp32", BYTES_PER_UPDATE, log=24, keep=8, undo=36)
"""Master weight and moments of 4 bytes each. Publishing rounds the master weight."""
INT8 = States("8 bit", 14, log=12, keep=6, undo=12, is_eight_bit=True)
"""One-byte moments, and a master weight whose upper half is the parameter."""
FUSED = States("fp32, log in the kernel's pass", BYTES_PER_UPDATE, log=12, keep=8, undo=36)
"""Modelled: a kernel that also writes the log, bypassing the caches, as cpu-adam's can."""
BESIDE = States("fp32, new states beside the old", BYTES_PER_UPDATE, log=0, keep=8, undo=0)
"""Modelled: a kernel that writes new states to other memory, bypassing the caches. None exists."""


@dataclass(frozen=True)
class Machine:
    """A node whose devices each train their share of the parameters.

    Attributes:
        device: name in the table of devices.
        host_bytes_per_s: published peak of the node's memory; None for the value in the table.
        source: source of that peak.
    """

    name: str
    device: str
    ranks: int
    host_bytes_per_s: float | None
    source: str


EPYC = Machine(
    "8 H100, two EPYC 9004",
    "H100",
    8,
    921.6e9,
    "two sockets of 12 channels of DDR5-4800, 460.8 GB/s each (AMD)",
)
GH200 = Machine(
    "GH200",
    "GH200",
    1,
    500e9,
    "LPDDR5X of Grace, as in SuperOffload's paper (arXiv 2509.21271)",
)
NARROW = Machine("8 H100, 200 GB/s", "H100", 8, None, "the table of devices")
MACHINES = (EPYC, GH200, NARROW)


@cache
def _trace(shape: GptShape, tokens: int) -> Trace:
    """Trace a micro-batch of ``tokens`` tokens on the meta device."""
    samples = tokens // shape.context
    found = {
        "train_micro_batch_size_per_gpu": samples,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
    }
    config = load_config(found, world_size=1)
    with torch.device("meta"):
        model, ids = Gpt(shape), torch.zeros(samples, shape.context, dtype=torch.int64)
    units = [unit for _, unit, _ in Blueprint.draw(model, config, 1).found.units]
    return trace_step(model, config, [ids], units)


def rates_of(machine: Machine) -> tuple[Rates, str]:
    found = device_calibration(machine.device, machine.ranks)
    rates, host_bytes_per_s = found.at(machine.ranks), machine.host_bytes_per_s
    if host_bytes_per_s is None:
        return rates, found.source
    updated = host_bytes_per_s * EFFICIENCY["host"] / machine.ranks / BYTES_PER_UPDATE
    curves = {**rates.curves, "update.host.float32": Curve.of_rate(updated)}
    said = f"{found.source}, but {host_bytes_per_s / 1e9:g} GB/s of host memory"
    return replace(rates, curves=curves), said


def times_of(machine: Machine, shape: GptShape, tokens: int, states: States) -> Times:
    """Return the times of a rank's step with ``tokens`` tokens. See [Note: seconds]."""
    rates, _ = rates_of(machine)
    trace = _trace(shape, tokens)
    assert trace.backward is not None, "the model returns its loss"
    numel = shape.numel / machine.ranks
    byte_s = rates.seconds(["update.host.float32"], numel) / BYTES_PER_UPDATE
    block_bytes = _GRAD_BYTES * numel / shape.layers
    blocks = 12 * shape.width**2 * shape.layers
    return Times(
        forward_s=sum(rates.pass_s(part) for part in trace.forward.values()),
        backward_s=rates.pass_s(trace.backward),
        link_s=shape.layers * rates.seconds(["copy.to_host"], block_bytes),
        host_s=states.update * byte_s,
        device_s=rates.seconds(["update.device.float32"], numel),
        blocks=shape.layers,
        log_s=states.log * byte_s,
        keep_s=states.keep * byte_s,
        undo_s=states.undo * byte_s,
        term_s=_GRAD_BYTES * byte_s,
        root=(1 - blocks / shape.numel) / 2,
    )


def chunks_per_block(machine: Machine, shape: GptShape) -> float:
    """Return the number of update chunks of a block on one rank."""
    return shape.numel / machine.ranks / shape.layers / CHUNK_NUMEL
