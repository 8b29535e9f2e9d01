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
from zero_comm.collectives import QuantizedCollectives
from zero_comm.native import NativeCollectives as CommNative
from zero_core.direct import DirectCollectives
from zero_core.library import LibraryCollectives
from zero_core.protocols import (
    AdamKernel,
    Collectives,
    CollectivesFactory,
    DeviceTierFactory,
    NativeCollectives,
    ParamStore,
    ParamTier,
    ParamTierFactory,
    StateTier,
    StateTierFactory,
    Work,
)
from zero_core.resting import LocalStore
from zero_core.tier import DeviceTier
from zero_offload import create_param_tier, create_tier
from zero_offload.auto_tier import AutoTier
from zero_offload.param_tier import RestingParams
from zero_offload.protocols import (
    AdagradKernel,
    Bf16AdamKernel,
    EightBitAdamKernel,
    LionKernel,
    SgdKernel,
)
from zero_offload.protocols import AdamKernel as OffloadKernel
from zero_offload.protocols import DeviceTierFactory as OffloadDeviceTierFactory
from zero_offload.protocols import ParamStore as OffloadParamStore
from zero_offload.protocols import StateTier as OffloadStateTier
from zero_offload.protocols import Work as OffloadWork
from zero_offload.twin import TwinTier

__all__ = ["FACTORIES", "MODULES", "TYPES"]


def prove_instances(
    direct: DirectCollectives,
    library: LibraryCollectives,
    quantized: QuantizedCollectives,
    device_tier: DeviceTier,
    twin_tier: TwinTier,
    auto_tier: AutoTier,
    resting_params: RestingParams,
    local_store: LocalStore,
) -> None:
    """For mypy: instances of each part may stand where the engine asks for its protocol."""
    natives: list[NativeCollectives] = [direct, library]
    collectives: list[Collectives] = [*natives, quantized]
    tiers: list[StateTier] = [device_tier, twin_tier, auto_tier]
    param_tier: ParamTier = resting_params
    store: ParamStore = local_store
    del natives, collectives, tiers, param_tier, store


def prove_what_is_handed_over(
    native: NativeCollectives,
    tier: StateTier,
    kernel: AdamKernel,
    factory: DeviceTierFactory,
    store: ParamStore,
    work: OffloadWork,
) -> None:
    """For mypy: what the engine hands to a part fits the part's own idea of it."""
    comm: CommNative = native
    offload: OffloadStateTier = tier
    offload_kernel: OffloadKernel = kernel
    offload_factory: OffloadDeviceTierFactory = factory
    offload_store: OffloadParamStore = store
    fetched: Work = work
    del comm, offload, offload_kernel, offload_factory, offload_store, fetched


adam_kernel: AdamKernel = cpu_adam
adagrad_kernel: AdagradKernel = cpu_adam
sgd_kernel: SgdKernel = cpu_adam
lion_kernel: LionKernel = cpu_adam
collectives_factory: CollectivesFactory = create_collectives
state_tier_factory: StateTierFactory = create_tier
device_tier_factory: DeviceTierFactory = DeviceTier
param_tier_factory: ParamTierFactory = create_param_tier

FACTORIES: dict[str, tuple[Callable[..., Any], type]] = {
    "zero_comm.create_collectives": (create_collectives, CollectivesFactory),
    "zero_offload.create_tier": (create_tier, StateTierFactory),
    "zero_offload.create_param_tier": (create_param_tier, ParamTierFactory),
    "zero_core.tier.DeviceTier": (DeviceTier, DeviceTierFactory),
}
"""Callables and the protocol whose ``__call__`` each satisfies."""

TYPES: dict[str, tuple[type, type]] = {
    "zero_core.direct.DirectCollectives": (DirectCollectives, NativeCollectives),
    "zero_core.library.LibraryCollectives": (LibraryCollectives, NativeCollectives),
    "zero_comm.collectives.QuantizedCollectives": (QuantizedCollectives, Collectives),
    "zero_core.tier.DeviceTier": (DeviceTier, StateTier),
    "zero_offload.twin.TwinTier": (TwinTier, StateTier),
    "zero_offload.auto_tier.AutoTier": (AutoTier, StateTier),
    "zero_offload.param_tier.RestingParams": (RestingParams, ParamTier),
    "zero_core.resting.LocalStore": (LocalStore, ParamStore),
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
