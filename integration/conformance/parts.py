"""Proof that each part satisfies its protocol of `zero_core.protocols`.

No package imports another package's protocols. Parts match protocols by structure only. The match
is proved twice: mypy --strict checks the assignments below, and ``test_signatures.py`` compares
signatures, including parameter names and kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import cpu_adam
from zero_comm import create_collectives
from zero_comm.collectives import ExactGradients, QuantizedCollectives
from zero_comm.footprint import CommFootprint, comm_footprint, upload_nbytes
from zero_comm.lossless.message import GradientMessages
from zero_comm.lossless.upload import UploadCodec as LosslessUploadCodec
from zero_comm.transport.protocol import CodingCollectives
from zero_comm.transport.protocol import TransportCollectives as CommTransport
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.host import HostCollectives
from zero_core.footprint.footprints import (
    CollectivesFootprint,
    CollectivesFootprintFactory,
    ParamFootprintFactory,
    TierFootprint,
    TierFootprintFactory,
    UploadFootprint,
)
from zero_core.optim.device_tier import DeviceTier
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import (
    AccumulatingTier,
    AdamKernel,
    AddingCollectives,
    Collectives,
    CollectivesFactory,
    DeviceMemory,
    DeviceTierFactory,
    ParamStore,
    ParamTier,
    ParamTierFactory,
    PartitionedParam,
    PreparedCollectives,
    ReservingTier,
    SliceCodec,
    SnapshotTier,
    SpeculativeTier,
    StatefulCollectives,
    StateTier,
    StateTierFactory,
    TimedTier,
    TransportCollectives,
    UploadCodec,
)
from zero_core.sharded.param_offload import LocalStore
from zero_engine.deepspeed.zero.partitioned import Partitioned
from zero_offload import create_param_tier, create_tier
from zero_offload.footprint import TierFootprint as OffloadFootprint
from zero_offload.footprint import param_footprint, tier_footprint
from zero_offload.param_tier import OffloadedParams
from zero_offload.protocols import (
    AdagradKernel,
    Bf16AdamKernel,
    CopyingKernel,
    EightBitAdamKernel,
    LionKernel,
    SgdKernel,
    SummingKernel,
)
from zero_offload.protocols import AdamKernel as OffloadKernel
from zero_offload.protocols import DeviceMemory as OffloadDeviceMemory
from zero_offload.protocols import DeviceTierFactory as OffloadDeviceTierFactory
from zero_offload.protocols import ParamStore as OffloadParamStore
from zero_offload.protocols import StateTier as OffloadStateTier
from zero_offload.protocols import UploadCodec as OffloadUploadCodec
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.twin import TwinTier

__all__ = ["FACTORIES", "MODULES", "TYPES"]


def prove_instances(
    host: HostCollectives,
    device: DeviceCollectives,
    quantized: QuantizedCollectives,
    exact: ExactGradients,
    messages: GradientMessages,
    device_tier: DeviceTier,
    whole_tier: WholeTier,
    twin_tier: TwinTier,
    auto_tier: AutoTier,
    offloaded_params: OffloadedParams,
    local_store: LocalStore,
    partitioned: Partitioned,
) -> None:
    """Let mypy check that instances of each part match the protocols that the engine requires."""
    transports: list[TransportCollectives] = [host, device]
    collectives: list[Collectives] = [*transports, quantized]
    stateful: StatefulCollectives = quantized
    prepared: PreparedCollectives = quantized
    adding: list[AddingCollectives] = [host, device, exact]
    codec: SliceCodec = messages
    tiers: list[StateTier] = [device_tier, whole_tier, twin_tier, auto_tier]
    timed: list[TimedTier] = [twin_tier, auto_tier]
    accumulating: list[AccumulatingTier] = [twin_tier, auto_tier]
    reserving: list[ReservingTier] = [device_tier, twin_tier, auto_tier]
    speculative: list[SpeculativeTier] = [twin_tier, auto_tier]
    snapshots: list[SnapshotTier] = [device_tier, twin_tier, auto_tier]
    memory: list[DeviceMemory] = [device, quantized, device_tier, whole_tier, twin_tier]
    param_tier: ParamTier = offloaded_params
    store: ParamStore = local_store
    param: PartitionedParam = partitioned
    del transports, collectives, stateful, prepared, tiers, accumulating, reserving, memory, adding
    del param_tier, store, param, snapshots, timed, codec, speculative


def prove_what_is_handed_over(
    transport: TransportCollectives,
    kernel: AdamKernel,
    factory: DeviceTierFactory,
    store: ParamStore,
    memory: DeviceMemory,
    tier: SnapshotTier,
    codec: UploadCodec,
) -> None:
    """Let mypy check that the engine's objects match the protocols of the receiving parts."""
    comm: CommTransport = transport
    coding: CodingCollectives = transport
    offload: OffloadStateTier = tier
    offload_kernel: OffloadKernel = kernel
    offload_factory: OffloadDeviceTierFactory = factory
    offload_store: OffloadParamStore = store
    offload_memory: OffloadDeviceMemory = memory
    offload_codec: OffloadUploadCodec = codec
    del comm, offload, offload_kernel, offload_factory, offload_store, offload_memory
    del coding, offload_codec


upload_codec: UploadCodec = LosslessUploadCodec()
adam_kernel: AdamKernel = cpu_adam
adagrad_kernel: AdagradKernel = cpu_adam
sgd_kernel: SgdKernel = cpu_adam
lion_kernel: LionKernel = cpu_adam
summing_kernel: SummingKernel = cpu_adam
copying_kernel: CopyingKernel = cpu_adam
collectives_factory: CollectivesFactory = create_collectives
state_tier_factory: StateTierFactory = create_tier
device_tier_factory: DeviceTierFactory = DeviceTier
param_tier_factory: ParamTierFactory = create_param_tier
collectives_footprint_factory: CollectivesFootprintFactory = comm_footprint
tier_footprint_factory: TierFootprintFactory = tier_footprint
upload_footprint: UploadFootprint = upload_nbytes
param_footprint_factory: ParamFootprintFactory = param_footprint

FACTORIES: dict[str, tuple[Callable[..., Any], type]] = {
    "zero_comm.create_collectives": (create_collectives, CollectivesFactory),
    "zero_offload.create_tier": (create_tier, StateTierFactory),
    "zero_offload.create_param_tier": (create_param_tier, ParamTierFactory),
    "zero_comm.footprint.comm_footprint": (comm_footprint, CollectivesFootprintFactory),
    "zero_comm.footprint.upload_nbytes": (upload_nbytes, UploadFootprint),
    "zero_offload.footprint.tier_footprint": (tier_footprint, TierFootprintFactory),
    "zero_offload.footprint.param_footprint": (param_footprint, ParamFootprintFactory),
    "zero_core.optim.device_tier.DeviceTier": (DeviceTier, DeviceTierFactory),
}
"""Callables, each with the protocol whose ``__call__`` it satisfies."""

TYPES: dict[str, tuple[type, type]] = {
    "zero_core.comm.host.HostCollectives": (HostCollectives, TransportCollectives),
    "zero_core.comm.device.DeviceCollectives": (DeviceCollectives, TransportCollectives),
    "zero_comm.collectives.QuantizedCollectives": (QuantizedCollectives, StatefulCollectives),
    "zero_comm.lossless.message.GradientMessages": (GradientMessages, SliceCodec),
    "zero_comm.lossless.upload.UploadCodec": (LosslessUploadCodec, UploadCodec),
    "zero_comm.lossless.upload.UploadCodec, for a tier": (
        LosslessUploadCodec,
        OffloadUploadCodec,
    ),
    "zero_comm.collectives.ExactGradients": (ExactGradients, AddingCollectives),
    "zero_comm.collectives.QuantizedCollectives, memory": (QuantizedCollectives, DeviceMemory),
    "zero_core.optim.device_tier.DeviceTier": (DeviceTier, StateTier),
    "zero_core.optim.whole_tier.WholeTier": (WholeTier, StateTier),
    "zero_core.optim.device_tier.DeviceTier, memory": (DeviceTier, ReservingTier),
    "zero_core.comm.device.DeviceCollectives, memory": (DeviceCollectives, DeviceMemory),
    "zero_core.optim.device_tier.DeviceTier, offloaded": (DeviceTier, DeviceMemory),
    "zero_offload.tiers.twin.TwinTier, offloaded": (TwinTier, DeviceMemory),
    "zero_offload.tiers.twin.TwinTier": (TwinTier, AccumulatingTier),
    "zero_offload.tiers.twin.TwinTier, timed": (TwinTier, TimedTier),
    "zero_offload.tiers.twin.TwinTier, memory": (TwinTier, ReservingTier),
    "zero_core.optim.device_tier.DeviceTier, watched": (DeviceTier, SnapshotTier),
    "zero_offload.tiers.twin.TwinTier, watched": (TwinTier, SnapshotTier),
    "zero_offload.tiers.twin.TwinTier, speculative": (TwinTier, SpeculativeTier),
    "zero_offload.tiers.auto_tier.AutoTier": (AutoTier, AccumulatingTier),
    "zero_offload.param_tier.OffloadedParams": (OffloadedParams, ParamTier),
    "zero_core.sharded.param_offload.LocalStore": (LocalStore, ParamStore),
    "zero_comm.footprint.CommFootprint": (CommFootprint, CollectivesFootprint),
    "zero_offload.footprint.TierFootprint": (OffloadFootprint, TierFootprint),
    "zero_engine.deepspeed.zero.partitioned.Partitioned": (Partitioned, PartitionedParam),
}
"""Classes, each with the protocol that its instances satisfy."""

MODULES: dict[str, tuple[ModuleType, type]] = {
    "cpu_adam": (cpu_adam, AdamKernel),
    "cpu_adam, Adagrad": (cpu_adam, AdagradKernel),
    "cpu_adam, SGD": (cpu_adam, SgdKernel),
    "cpu_adam, Lion": (cpu_adam, LionKernel),
    "cpu_adam, several gradients": (cpu_adam, SummingKernel),
    "cpu_adam, copies": (cpu_adam, CopyingKernel),
    "cpu_adam, 8 bits": (cpu_adam, EightBitAdamKernel),
    "cpu_adam, bf16": (cpu_adam, Bf16AdamKernel),
}
"""Modules, each with the protocol that its functions satisfy."""
