"""What each spawned rank runs: every scenario once, its outcomes saved for the tests to judge."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from native_collectives import GroupNative
from torch import Tensor

from zero_comm import BlockFormat, create_collectives, quantized_all_gather
from zero_comm.collectives import NativeCollectives

SIZES = (1, 7, 300, 1001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Outcomes = dict[str, Tensor]


def shard_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The shard that ``rank`` contributes; any process can tell it."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def make(native: GroupNative, bits: int = 8) -> NativeCollectives:
    config = {"zero_quantized_weights": True, "zero_quantized_weights_bits": bits}
    return create_collectives(
        native, rank=dist.get_rank(), world_size=dist.get_world_size(), config=config
    )


def gather_sizes_and_dtypes(rank: int, world_size: int) -> Outcomes:
    native = GroupNative()
    outcomes: Outcomes = {}
    for bits in (8, 4):
        collectives = make(native, bits)
        for unit, (numel, dtype) in enumerate((n, d) for n in SIZES for d in DTYPES):
            shard = shard_of(rank, numel, dtype)
            out = torch.full((world_size * numel,), 9.0, dtype=dtype)
            collectives.all_gather(out, shard, unit=unit, version=0, backward=False).wait()
            name = f"{bits} {numel} {dtype}"
            outcomes[f"out {name}"] = out
            outcomes[f"shard {name}"] = shard
    return outcomes


def gather_two_at_once(rank: int, world_size: int) -> Outcomes:
    collectives = make(GroupNative())
    outcomes: Outcomes = {}
    for step in range(3):
        shards = [shard_of(rank, 500 + 100 * i, torch.float32) + step for i in range(2)]
        outs = [torch.empty(world_size * len(s)) for s in shards]
        works = [
            collectives.all_gather(o, s, unit=i, version=step, backward=False)
            for i, (o, s) in enumerate(zip(outs, shards, strict=True))
        ]
        for work in reversed(works):
            work.wait()
        outcomes |= {f"{step} {i}": out for i, out in enumerate(outs)}
    return outcomes


def count_bytes(rank: int, world_size: int) -> Outcomes:
    sent = []
    for bits in (8, 4):
        native = GroupNative()
        shard = shard_of(rank, 1 << 14, torch.bfloat16)
        out = torch.empty(world_size * len(shard), dtype=shard.dtype)
        make(native, bits).all_gather(out, shard, unit=0, version=0, backward=False).wait()
        sent.append(native.sent_nbytes)
    return {"sent": torch.tensor(sent)}


def carry_nan(rank: int, world_size: int) -> Outcomes:
    shard = shard_of(rank, 1000, torch.float16)
    if rank == world_size - 1:
        shard[600] = float("inf")
    out = torch.empty(world_size * 1000, dtype=torch.float16)
    make(GroupNative()).all_gather(out, shard, unit=0, version=0, backward=False).wait()
    return {"out": out}


def gather_integers(rank: int, world_size: int) -> Outcomes:
    shard = torch.arange(1000) + rank
    out = torch.empty(world_size * 1000, dtype=torch.int64)
    make(GroupNative()).all_gather(out, shard, unit=0, version=0, backward=False).wait()
    return {"out": out}


def reduce_gradients(rank: int, world_size: int) -> Outcomes:
    full = shard_of(rank, 300 * world_size, torch.float32)
    out = torch.empty(300)
    make(GroupNative()).reduce_scatter(out, full, unit=0).wait()
    return {"out": out}


def call_the_function(rank: int, world_size: int) -> Outcomes:
    matrix = shard_of(rank, 1001, torch.bfloat16).view(143, 7)
    return {
        "8": quantized_all_gather(matrix),
        "4": quantized_all_gather(matrix, format=BlockFormat("int4", 64), group=dist.group.WORLD),
        "small": quantized_all_gather(torch.tensor([rank + 0.1])),
        "integers": quantized_all_gather(torch.tensor([[rank, 3]])),
    }


SCENARIOS = (
    gather_sizes_and_dtypes,
    gather_two_at_once,
    count_bytes,
    carry_nan,
    gather_integers,
    reduce_gradients,
    call_the_function,
)


def run(rank: int, world_size: int, folder: Path) -> None:
    """Entry point of a spawned rank: gloo over the loopback, rendezvous through a file."""
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    outcomes = {f.__name__: f(rank, world_size) for f in SCENARIOS}
    torch.save(outcomes, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
