"""Estimate of device memory that is in no tensor: of torch's allocator, of CUDA's libraries.

[Note: sources]
Allocator: the constants of torch's ``c10/core/AllocatorConfig.h``. Requests of at most 1 MiB share
segments of 2 MiB, those below 10 MiB segments of 20 MiB, others have a segment of their own, rounded
up to 2 MiB. Each stream has its own segments. With ``expandable_segments`` less is lost.

cuBLAS: ``getChosenWorkspaceSize`` of torch: 32 MiB on Hopper and later devices, 8.1 MiB on older
ones, for each thread that multiplies matrices. ``CUBLAS_WORKSPACE_CONFIG`` overrides the size.

NCCL: measured on 8 H100 with NVSwitch (NVIDIA/nccl, issue 1685): 1.06 GB with CUDA's context and a
communicator, 4.34 GB after its first all-to-all, which connects each pair of a node's ranks by 32
channels with 12 MiB each. Among nodes an all-to-all has a shared buffer of 512 MiB (issue 2363).
``NCCL_MAX_P2P_NCHANNELS`` and ``NCCL_BUFFSIZE`` make both smaller.

Context: 0.4 to 0.6 GB with CUDA's lazy loading (pytorch/pytorch, issues 107667 and 109888).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.layout.arithmetic import round_up

_MIB = 1 << 20
_CONTEXT = 500 * 10**6
_COMMUNICATOR = 500 * 10**6
_PEER = 470 * 10**6  # each peer of the node in an all-to-all
_NETWORK = 512 * _MIB  # an all-to-all's peers on other nodes
_WORKSPACE = 32 * _MIB


def outside_of_tensors(
    blocks: Mapping[str, list[int]], apart: Iterable[str], config: Config, links: Links
) -> dict[str, int]:
    """Return the bytes on an NVIDIA device by kind, for allocations of ``blocks`` bytes by kind.

    Kinds in ``apart`` are allocated on streams of their own.
    """
    apart = {kind for kind in apart if any(blocks.get(kind, ()))}
    streams = [[n for kind, sizes in blocks.items() if kind not in apart for n in sizes]]
    streams += [blocks[kind] for kind in apart]
    # The forward's thread and autograd's. A vertical schedule pauses a thread per micro-batch.
    threads = 2 + config.is_vertical * config.gradient_accumulation_steps
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    workspace = sum(1024 * int(kib) * int(n) for kib, n in re.findall(r":(\d+):(\d+)", asked))
    return {
        # Each stream has some small tensors, too.
        "allocator": sum(reserved_bytes([*sizes, 1]) - sum(sizes) for sizes in streams),
        "cuBLAS": threads * (workspace or _WORKSPACE),
        "NCCL": _nccl_bytes(config, links),
        "CUDA context": _CONTEXT,
    }


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of the segments in which torch's allocator puts blocks of ``sizes``."""
    small = total = 0
    free: list[int] = []  # bytes left of each segment
    for size in (round_up(size, 512) for size in sizes):
        if size <= _MIB:
            small += size
            continue
        place = min((n for n in free if n >= size), default=0)
        if place:
            free.remove(place)
        else:
            place = 20 * _MIB if size < 10 * _MIB else round_up(size, 2 * _MIB)
            total += place
        free.append(place - size)
    return total + round_up(small, 2 * _MIB)


def _nccl_bytes(config: Config, links: Links) -> int:
    if links.world_size == 1:
        return 0
    # The program's group, and one each for gathers and reductions. Two-level sums have two more,
    # ZeRO++'s gathers in two phases another two.
    levels = links.sums_in_two_levels
    phases = config.zero_optimization.quantized_key is not None and links.num_nodes > 1
    peers = (links.ranks_per_node - 1) * (1 + levels)
    far = (links.num_nodes > 1) * (1 + levels)
    return (3 + 2 * levels + 2 * phases) * _COMMUNICATOR + peers * _PEER + far * _NETWORK
