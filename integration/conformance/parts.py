"""Every part beside the protocol of `zero_core.protocols` that it is to satisfy.

No package imports another's protocols; they match by shape. Here both sides are imported, and the
match is proved twice: mypy --strict checks the assignments below, and ``test_signatures.py``
compares what `inspect.signature` shows, parameter names and kinds included.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import cpu_adam
from zero_comm import create_collectives
from zero_comm.collectives import NativeCollectives as CommNative
from zero_comm.collectives import QuantizedWeights
from zero_core.collectives import NativeCollectives
from zero_core.protocols import (
    AdamKernel,
    Collectives,
    CollectivesFactory,
    DeviceTierFactory,
    StateTier,
    StateTierFactory,
)
from zero_core.tier import DeviceTier
from zero_offload import create_tier
from zero_offload.protocols import (
    AdagradKernel,
    Bf16AdamKernel,
    EightBitAdamKernel,
    LionKernel,
    SgdKernel,
)
from zero_offload.protocols import AdamKernel as OffloadKernel
from zero_offload.protocols import DeviceTierFactory as OffloadDeviceTierFactory
from zero_offload.protocols import StateTier as OffloadStateTier
from zero_offload.twin import TwinTier

__all__ = ["FACTORIES", "MODULES", "TYPES"]


def prove_instances(
    native: NativeCollectives,
    quantized: QuantizedWeights,
    device_tier: DeviceTier,
    twin_tier: TwinTier,
) -> None:
    """For mypy: instances of each part may stand where the engine asks for its protocol."""
    collectives: list[Collectives] = [native, quantized]
    tiers: list[StateTier] = [device_tier, twin_tier]
    del collectives, tiers


def prove_what_is_handed_over(
    collectives: Collectives, tier: StateTier, kernel: AdamKernel, factory: DeviceTierFactory
) -> None:
    """For mypy: what the engine hands to a part fits the part's own idea of it."""
    comm: CommNative = collectives
    offload: OffloadStateTier = tier
    offload_kernel: OffloadKernel = kernel
    offload_factory: OffloadDeviceTierFactory = factory
    del comm, offload, offload_kernel, offload_factory


adam_kernel: AdamKernel = cpu_adam
adagrad_kernel: AdagradKernel = cpu_adam
sgd_kernel: SgdKernel = cpu_adam
lion_kernel: LionKernel = cpu_adam
collectives_factory: CollectivesFactory = create_collectives
state_tier_factory: StateTierFactory = create_tier
device_tier_factory: DeviceTierFactory = DeviceTier

FACTORIES: dict[str, tuple[Callable[..., Any], type]] = {
    "zero_comm.create_collectives": (create_collectives, CollectivesFactory),
    "zero_offload.create_tier": (create_tier, StateTierFactory),
    "zero_core.tier.DeviceTier": (DeviceTier, DeviceTierFactory),
}
"""Callables and the protocol whose ``__call__`` each satisfies."""

TYPES: dict[str, tuple[type, type]] = {
    "zero_core.collectives.NativeCollectives": (NativeCollectives, Collectives),
    "zero_comm.collectives.QuantizedWeights": (QuantizedWeights, Collectives),
    "zero_core.tier.DeviceTier": (DeviceTier, StateTier),
    "zero_offload.twin.TwinTier": (TwinTier, StateTier),
}
"""Classes and the protocol that their instances satisfy."""

MODULES: dict[str, tuple[ModuleType, type]] = {
    "cpu_adam": (cpu_adam, AdamKernel),
    "cpu_adam, Adagrad": (cpu_adam, AdagradKernel),
    "cpu_adam, SGD": (cpu_adam, SgdKernel),
    "cpu_adam, Lion": (cpu_adam, LionKernel),
    "cpu_adam, 8 bits": (cpu_adam, EightBitAdamKernel),
    "cpu_adam, bf16": (cpu_adam, Bf16AdamKernel),
}
"""Modules that satisfy a protocol by their functions."""
