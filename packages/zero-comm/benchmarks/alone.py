"""Times DDP and FSDP2 over a link of 200 Mbit/s, each with and without this package.

Two gloo ranks train one model in two network namespaces. A veth pair, limited by ``tc tbf``, joins
the namespaces. Bytes are counted at rank 0's end, with headers. The variants alternate, one step
each. Lossless gathers are differences in FSDP2's hook, where every rank keeps its last gathered
values. Needs Linux, ip, tc and root.
"""

import copy
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_comm

WIDTH, BLOCKS, BATCH, WARMUP, STEPS = 256, 6, 64, 3, 15
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # gradients are reduced in bf16, too
NAMES = ("DDP", "DDP, `ddp_comm_hook()`", "FSDP2, bf16", "FSDP2, bf16, lossless gathers")

RANKS = """  # rank 0 stays here, rank 1 gets a namespace of its own
unshare --net sleep 1d & peer=$!
until [ $(readlink /proc/$peer/ns/net) != $(readlink /proc/$$/ns/net) ]; do sleep 0.1; done
ip link add comm0 type veth peer name comm1 netns $peer
export OMP_NUM_THREADS=1 WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29577
for place in 1:$peer 0:$$; do
    export RANK=${place%:*} GLOO_SOCKET_IFNAME=comm${place%:*}
    nsenter --target=${place#*:} --net sh -ec '
        ip address add 10.77.0.$((RANK + 1))/24 dev comm$RANK
        tc qdisc add dev comm$RANK root tbf rate 200mbit burst 128kb limit 2mb
        ip link set comm$RANK up; ip link set lo up; exec "$@"' rank "$0" "$@" &
done
trap "kill $peer" EXIT; wait $!"""


class LosslessGather:
    """FSDP2's gather of a module as differences from the last gathered values."""

    kept: Tensor | None = None

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        if self.kept is None:
            self.kept = gather(input_tensor, group)
        else:
            own = zero_comm.encode_difference(self.kept[dist.get_rank(group)], input_tensor)
            lengths = gather(torch.tensor([own.numel()]), group).flatten().tolist()
            rows = gather(nn.functional.pad(own, (0, max(lengths) - own.numel())), group)
            for values, row, length in zip(self.kept, rows, lengths, strict=True):
                zero_comm.apply_difference(values, row[:length])
        output_tensor.copy_(self.kept.view(-1))


def gather(own: Tensor, group: Any) -> Tensor:
    out, ranks = own.new_empty(2, own.numel()), zero_comm.TorchCollectives(group)
    ranks.all_gather(out.view(-1), own, unit=0, version=0, backward=False).wait()
    return out


def wrapped(model: Any, name: str) -> Any:
    if "DDP" in name:
        model = DistributedDataParallel(model)
        if "hook" in name:
            model.register_comm_hook(None, zero_comm.ddp_comm_hook())
        return model
    for part in (*model, model):
        sharded: Any = fully_shard(part, mp_policy=BF16)
        if "lossless" in name:
            sharded.set_custom_all_gather(LosslessGather())
    return model


def sent_nbytes() -> int:
    return int(Path("/proc/self/net/dev").read_text().partition("comm")[2].split()[9])


def train(rank: int) -> None:
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    blocks = [nn.Sequential(*layers)] * BLOCKS
    models = {name: wrapped(nn.Sequential(*map(copy.deepcopy, blocks)), name) for name in NAMES}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in models.items()}
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in NAMES}
    for step in range(WARMUP + STEPS):
        torch.manual_seed(2 * step + rank)
        x, target = torch.randn(2, BATCH, WIDTH)
        for name in NAMES:
            dist.barrier()
            start, before = time.perf_counter(), sent_nbytes()
            loss = nn.functional.mse_loss(models[name](x).float(), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            seconds = time.perf_counter() - start
            found[name].append((seconds, sent_nbytes() - before, loss.item()))
    columns = [[*zip(*rows[WARMUP:], strict=True)] for rows in found.values()]
    assert columns[2][2] == columns[3][2], "lossless gathers change no bit of a loss"
    for number, name in enumerate(NAMES if rank == 0 else ()):
        plain, own = (statistics.median(columns[n][0]) for n in (number // 2 * 2, number))
        megabytes = statistics.median(columns[number][1]) / 1e6
        print(f"| {name} | {own:.3f} s | {plain / own:.2f} | {megabytes:.2f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank())
        dist.destroy_process_group()
    else:
        enter = ("unshare", "--net", *["--map-root-user"] * (os.geteuid() != 0))
        os.execvp("unshare", [*enter, "sh", "-ec", RANKS, sys.executable, __file__])
