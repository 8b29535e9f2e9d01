"""Estimate of an NVIDIA device's memory outside of tensors: torch's allocator and CUDA's libraries.

[Note: sources]
Allocator: torch's ``c10/core/AllocatorConfig.h``. Requests up to 1 MiB share segments of 2 MiB.
Requests below 10 MiB share segments of 20 MiB. A larger request has a separate segment, rounded up
to 2 MiB. Streams share no segments. cuBLAS: torch's ``getChosenWorkspaceSize``, 32 MiB since Hopper
and 8 MiB before: a plan does not know the device, and counts the larger. NCCL, on 8 H100 with
NVSwitch (NVIDIA/nccl, issue 1685): 1.06 GB with CUDA's context and a communicator, and 4.34 GB
after the first all-to-all, which connects each pair of ranks by 32 channels of 12 MiB. Between
nodes NCCL has a shared buffer of 512 MiB (issue 2363). Context: 0.4 to 0.6 GB with lazy loading
(pytorch/pytorch, issue 109888).
"""

from collections.abc import Collection, Mapping

from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.layout.arithmetic import round_up

_MIB = 1 << 20
_NUM_THREADS = 2  # threads with a workspace: the forward's and autograd's
_CONTEXT = _COMMUNICATOR = 500 * 10**6
_PEER = 470 * 10**6  # for each peer on the node, in an all-to-all
_NETWORK = 512 * _MIB  # for all peers on other nodes, in an all-to-all


def outside_of_tensors(
    blocks: Mapping[str, list[int]], apart: Collection[str], config: Config, links: Links
) -> dict[str, int]:
    """Return the bytes by library. ``blocks``: sizes of the tensors' allocations, by kind.

    Each kind in ``apart`` is allocated on a separate stream.
    """
    streams = [[n for kind, sizes in blocks.items() if kind not in apart for n in sizes]]
    streams += [sizes for kind, sizes in blocks.items() if kind in apart]
    # Groups: one of the program, one for gathers, and one for reductions (all-to-alls). Sums in two
    # levels add two groups for reductions, and gathers in two phases add two.
    levels, num_groups = links.sums_in_two_levels, 3 * (links.world_size > 1)
    num_groups += 2 * levels + 2 * (config.zero_optimization.quantized_key is not None and levels)
    peers = (1 + levels) * (links.ranks_per_node - 1)
    far = (1 + levels) * (links.num_nodes > 1)
    return {
        "allocator": sum(map(_unused_bytes, streams)),
        "cuBLAS": _NUM_THREADS * 32 * _MIB,
        "NCCL": num_groups * _COMMUNICATOR + peers * _PEER + far * _NETWORK,
        "CUDA context": _CONTEXT,
    }


def _unused_bytes(sizes: list[int]) -> int:
    """Return the bytes that blocks of ``sizes`` leave unused in segments of torch's allocator."""
    unused: list[int] = []  # free bytes of each segment for blocks above 1 MiB
    for size in (n for n in sizes if n > _MIB):
        place = min((n for n in unused if n >= size), default=0)
        if place:
            unused.remove(place)
        else:
            place = 20 * _MIB if size < 10 * _MIB else round_up(size, 2 * _MIB)
        unused.append(place - size)
    # Each stream has some small tensors, so at least one segment of 2 MiB.
    small = 1 + sum(n for n in sizes if n <= _MIB)
    return sum(unused) + round_up(small, 2 * _MIB) - small
