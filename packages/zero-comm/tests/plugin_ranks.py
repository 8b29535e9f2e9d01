"""Real gloo ranks for what is used without an engine: every scenario once for each shape of the
cluster, its outcomes kept for the tests to judge.
"""

import gc
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# The first optimizer imports it: once in the server from which ranks are forked, not in each rank.
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_comm
from zero_comm import BlockFormat, fsdp2, quantized_nbytes
from zero_comm.torch_collectives import TorchCollectives

PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "zero_comm"]
"""What the server that ranks are forked from imports; modules of this folder it does not find."""
SHAPES = ((1, 1), (2, 2), (3, 1), (4, 2))  # ranks, ranks per node
NUM_STEPS = 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TARGET = torch.randn(33, 7, generator=torch.Generator().manual_seed(7)) / 33**0.5
Outcomes = dict[str, Any]


_kept_in: list[Path] = []


def keep_in(folder: Path) -> None:
    """Where the processes of a test session share what ranks saw."""
    _kept_in.append(folder)


def outcomes_of(world_size: int, ranks_per_node: int) -> list[Outcomes]:
    """What every rank of such a cluster saw."""
    outcomes = _outcomes_or_error(world_size, ranks_per_node)
    if isinstance(outcomes, Exception):
        raise outcomes
    return outcomes


@cache
def _outcomes_or_error(world_size: int, ranks_per_node: int) -> list[Outcomes] | Exception:
    try:
        return _run_ranks(world_size, ranks_per_node)
    except Exception as error:  # kept, so that ranks which fail fail once
        return error


def _run_ranks(world_size: int, ranks_per_node: int) -> list[Outcomes]:
    folder = _kept_in[-1] / f"outcomes of {world_size} ranks, {ranks_per_node} per node"
    paths = [folder / f"rank{rank}.pt" for rank in range(world_size)]
    with FileLock(f"{folder}.lock"):  # whoever comes first starts the ranks
        if not folder.exists():
            scratch = tempfile.mkdtemp(dir=folder.parent)
            _start_ranks(world_size, ranks_per_node, scratch)
            Path(scratch).rename(folder)  # whole, or not at all
    return [torch.load(path, weights_only=True) for path in paths]


def _start_ranks(world_size: int, ranks_per_node: int, folder: str) -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _run, (world_size, ranks_per_node, folder), world_size, start_method="forkserver"
    )


def _run(rank: int, world_size: int, ranks_per_node: int, folder: str) -> None:
    gc.freeze()  # the collector need not look at what the server has imported
    warnings.simplefilter("error")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    scenarios = (*SCENARIOS, *SCENARIOS_OF.get(world_size, ()))
    outcomes = {f.__name__: f(rank, world_size) for f in scenarios}
    torch.save(outcomes, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What ``rank`` contributes; any process can tell it."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


# -- collectives and functions


def exchange(rank: int, world_size: int) -> Outcomes:
    everyone = TorchCollectives()
    found: Outcomes = {}
    for dtype in (*DTYPES, torch.int64, torch.bool, torch.complex64):
        mine = (torch.arange(3 * world_size) + 10 * rank).to(dtype)
        parts = torch.empty_like(mine)
        everyone.all_to_all(parts, mine, unit=0).wait()
        gathered = mine.new_empty(world_size * len(mine))
        everyone.all_gather(gathered, mine, unit=0, version=0, backward=False).wait()
        found[str(dtype)] = (parts, gathered)
    return found


def exchange_in_subgroups(rank: int, world_size: int) -> Outcomes:
    """Even ranks among themselves, and odd ones; then each half of either."""
    everyone = TorchCollectives()
    ranks = list(range(rank % 2, world_size, 2))
    group = everyone.subgroup(ranks)
    mine = torch.arange(2 * len(ranks)) + 100 * rank
    parts, gathered = torch.empty_like(mine), mine.new_empty(len(mine) * len(ranks))
    group.all_to_all(parts, mine, unit=0).wait()
    group.all_gather(gathered, mine, unit=0, version=0, backward=False).wait()
    alone = group.subgroup([group.rank])
    copied = torch.empty_like(mine)
    alone.all_to_all(copied, mine, unit=0).wait()
    return {"ranks": ranks, "parts": parts, "gathered": gathered, "copied": copied}


def sum_exactly(rank: int, world_size: int) -> Outcomes:
    out = torch.empty(5, dtype=torch.bfloat16)
    full = values_of(rank, 5 * world_size, torch.bfloat16)
    TorchCollectives().reduce_scatter(out, full, unit=0).wait()
    return {"out": out}


def carry_an_engines_collectives(rank: int, world_size: int) -> Outcomes:
    """qwZ, hpZ and qgZ of `create_collectives`, carried by torch.distributed."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    config = {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": per_node,
        "zero_quantized_gradients": True,
    }
    collectives = zero_comm.create_collectives(
        TorchCollectives(),
        rank=rank,
        world_size=world_size,
        config=config,
        ranks_per_node=per_node,
        frozen=(),
    )
    shard = values_of(rank, 1001)
    gathered, again = torch.empty(2, 1001 * world_size)
    collectives.all_gather(gathered, shard, unit=0, version=1, backward=False).wait()
    with counted() as sent:
        collectives.all_gather(again, shard, unit=0, version=1, backward=True).wait()
    total = torch.empty(1001)
    full = values_of(rank, 1001 * world_size)
    collectives.reduce_scatter(total, full, unit=0).wait()
    between = sum(nbytes for _, nbytes in sent.values())
    return {"gathered": gathered, "again": again, "between": between, "total": total}


def gather_with_the_function(rank: int, world_size: int) -> Outcomes:
    matrix = values_of(rank, 1001, torch.bfloat16).view(143, 7)
    return {
        "int8": zero_comm.quantized_all_gather(matrix),
        "int4": zero_comm.quantized_all_gather(matrix, "int4", group=dist.group.WORLD),
        "small": zero_comm.quantized_all_gather(torch.tensor([rank + 0.1])),
        "integers": zero_comm.quantized_all_gather(torch.tensor([[rank, 3]])),
    }


def reduce_with_the_function(rank: int, world_size: int) -> Outcomes:
    reduce = zero_comm.quantized_reduce_scatter
    found: Outcomes = {}
    for dtype in DTYPES:
        full = values_of(rank, 1001 * world_size, dtype)
        found[f"int4 {dtype}"] = reduce(full)
        found[f"int8 e4m3 {dtype}"] = reduce(full, "int8", between="e4m3", op="sum")
    matrix = values_of(rank, 700 * world_size).view(100 * world_size, 7)
    found["matrix"] = reduce(matrix, "int8")
    found["small"] = reduce(values_of(rank, world_size))
    found["one hop"] = reduce(matrix, ranks_per_node=1)
    found["seeds"] = [reduce(matrix, seed=seed) for seed in (1, 1, 2)]
    found["huge"] = reduce(torch.full((512 * world_size,), 6e4, dtype=torch.float16))
    poisoned = values_of(rank, 512 * world_size)
    if rank == world_size - 1:
        poisoned[0] = torch.nan
    found["poisoned"] = reduce(poisoned)
    return found


# -- training


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(33, 257), nn.GELU(), nn.Linear(257, 101), nn.GELU(), nn.Linear(101, 7)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs, and what a fixed function makes of them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 33, generator=generator)
    y = (x @ TARGET).tanh()
    return x.to(dtype), y.to(dtype)


def train(model: nn.Module, rank: int, *, num_steps: int = NUM_STEPS) -> list[float]:
    """The losses of plain SGD, which sees the gradients' scale; averaged over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(num_steps):
        x, y = batch(step, rank, dtype)
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    averages: list[float] = (total / dist.get_world_size()).tolist()
    return averages


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Bytes that this rank hands to torch's collectives for other ranks, by collective: all of
    them, and those for other nodes.
    """
    sent: dict[str, list[int]] = {}
    kept = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    def count(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"]
            ranks, rank = range(dist.get_world_size(group)), dist.get_rank(group)
            given = kwargs["input"] if "input" in kwargs else args[1]
            each = [given.nbytes if name in _GATHERS else given.nbytes // len(ranks)] * len(ranks)
            if len(args) > 3 and args[3]:  # an all-to-all's splits, in bytes
                each = args[3]
            totals = sent.setdefault(_NAMES[name], [0, 0])
            totals[0] += sum(each[peer] for peer in ranks if peer != rank)
            totals[1] += sum(each[peer] for peer in ranks if peer // per_node != rank // per_node)
            return kept[name](*args, **kwargs)

        return counting

    for name in kept:
        setattr(dist, name, count(name))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_NAMES = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# -- DDP


def ddp(model: nn.Module, hook: Any = None, **kwargs: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05, **kwargs)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


HOOKS: dict[str, dict[str, Any]] = {
    "exact gather": {"gathered": None},
    "int8, checksums": {"gradients": "int8", "has_checksum": True},
    "error feedback": {"error_feedback": zero_comm.LocoSettings(), "is_stochastic": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train_ddp(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {"plain": train(ddp(make_model()), rank)}
    model = make_model()
    found["default"] = train(ddp(model, zero_comm.ddp_comm_hook()), rank)
    found["default: weights"] = weights(model)
    return found


def train_ddp_with_settings(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    for name, settings in HOOKS.items():
        found[name] = train(ddp(make_model(), zero_comm.ddp_comm_hook(**settings)), rank)
    for name, kwargs in WAYS.items():
        model = make_model()
        if name == "unused":
            model.register_parameter("spare", nn.Parameter(torch.ones(9)))
        found[name] = train(ddp(model, zero_comm.ddp_comm_hook(), **kwargs), rank)
    for dtype in (torch.bfloat16, torch.float16):
        found[f"plain {dtype}"] = train(ddp(make_model(dtype)), rank)
        found[f"quantized {dtype}"] = train(ddp(make_model(dtype), zero_comm.ddp_comm_hook()), rank)
    return found


def ddp_gradients(rank: int, world_size: int) -> Outcomes:
    """Of one step, and of one that accumulates two batches."""
    found: Outcomes = {}
    for name, hook in (("plain", None), ("quantized", zero_comm.ddp_comm_hook())):
        model = ddp(make_model(), hook)
        for step in range(2):  # DDP makes its buckets anew after the first
            model.zero_grad()
            x, y = batch(step, rank, torch.float32)
            (model(x) - y).square().mean().backward()
            found[f"{name} {step}"] = gradients(model)
        model.zero_grad()
        with model.no_sync():
            x, y = batch(2, rank, torch.float32)
            (model(x) - y).square().mean().backward()
        x, y = batch(3, rank, torch.float32)
        (model(x) - y).square().mean().backward()
        found[f"{name} accumulated"] = gradients(model)
    return found


def bucket_of(values: Tensor, parameters: Sequence[Tensor] = ()) -> Any:
    """What a hook is given, without DDP."""
    return SimpleNamespace(index=lambda: 0, buffer=lambda: values, parameters=lambda: parameters)


def buckets_made_anew(rank: int, world_size: int) -> Outcomes:
    """The average of the same gradients, at first, again, and in a bucket of other parameters."""
    hook = zero_comm.ddp_comm_hook(error_feedback=zero_comm.LocoSettings())
    one, other = torch.ones(4099), torch.ones(4099)
    parameters = {"first": [one], "again": [one], "anew": [other]}
    return {
        name: hook(None, bucket_of(values_of(rank, 4099), held)).wait()
        for name, held in parameters.items()
    }


def average_single_buckets(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    hook = zero_comm.ddp_comm_hook()
    for numel in (1, 7, 1000, 4099):
        for dtype in DTYPES:
            values = values_of(rank, numel, dtype)
            found[f"{numel} {dtype}"] = hook(None, bucket_of(values)).wait()
    values = torch.complex(values_of(rank, 9), values_of(rank, 9))
    found["complex"] = hook(None, bucket_of(values)).wait()
    return found


def overlap_with_a_late_rank(rank: int, world_size: int) -> Outcomes:
    """The first rank goes on while the others haven't started."""
    hook = zero_comm.ddp_comm_hook()
    late = torch.zeros(1)
    if rank == 0:
        future = hook(None, bucket_of(values_of(rank, 4096)))
        was_done = future.done()
        dist.broadcast(late, src=0)  # only now may the others start
    else:
        dist.broadcast(late, src=0)
        future = hook(None, bucket_of(values_of(rank, 4096)))
        was_done = False
    future.wait()
    return {"was done": was_done}


def count_ddp(rank: int, world_size: int) -> Outcomes:
    hook = zero_comm.ddp_comm_hook()
    hook(None, bucket_of(torch.ones(50000))).wait()  # the topology is found once
    with counted() as sent:
        hook(None, bucket_of(torch.ones(50000, dtype=torch.bfloat16))).wait()
    return dict(sent)


def fail_in_the_hook(rank: int, world_size: int) -> Outcomes:
    """Messages of other settings than the receiver's: all ranks see the error."""
    if world_size == 1:
        return {}
    fmt = BlockFormat("int8" if rank % 2 else "e4m3", 256)
    model = ddp(make_model(), zero_comm.ddp_comm_hook(fmt))
    x, y = batch(0, rank, torch.float32)
    try:
        (model(x) - y).square().mean().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def train_until_a_rank_dies(rank: int, folder: str) -> None:
    """Two ranks; the second ends in the middle, the first writes down what it sees of that."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = ddp(make_model(), zero_comm.ddp_comm_hook(timeout=timedelta(seconds=20)))
    for step in range(3):
        x, y = batch(step, rank, torch.float32)
        loss = (model(x) - y).square().mean()
        if (rank, step) == (1, 2):
            os._exit(3)
        try:
            loss.backward()
        except RuntimeError as error:
            Path(folder, "error").write_text(f"step {step}: {error}")
            os._exit(0)  # the group cannot be destroyed in good order any more


# -- FSDP2


def fsdp(model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    fully_shard(model[0], **kwargs)
    fully_shard(model[2], **kwargs)
    fully_shard(model, **kwargs)
    return model


def full_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])  # type: ignore[operator]


PLUGINS: dict[str, dict[str, Any]] = {
    "weights alone": {"gradients": None},
    "gradients alone": {"weights": None},
    "8 bits, checksums": {"weights": "e4m3", "gradients": "int8", "has_checksum": True},
    "error feedback": {"error_feedback": zero_comm.LocoSettings(), "is_stochastic": True},
}


def train_fsdp(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {"plain": train(fsdp(make_model()), rank)}
    model = fsdp(make_model())
    fsdp2.apply(model)
    found["default"] = train(model, rank)
    return found


def train_fsdp_with_settings(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    for name, settings in PLUGINS.items():
        model = fsdp(make_model())
        fsdp2.apply(model, **settings)
        found[name] = train(model, rank)
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("plain", "quantized"):
            model = fsdp(make_model(), mp_policy=MixedPrecisionPolicy(dtype, dtype))
            if name == "quantized":
                fsdp2.apply(model)
            found[f"{name} {dtype}"] = train(model, rank)
    return found


def change_and_restore(rank: int, world_size: int) -> Outcomes:
    """Plain, quantized and then plain again; and plain beside it, from the same weights."""
    model = fsdp(make_model())
    fsdp2.apply(model)
    fsdp2.apply(model, weights="int4", gradients="int8")
    train(model, rank, num_steps=2)
    fsdp2.apply(model, weights=None, gradients=None)
    other = fsdp(make_model())
    other.load_state_dict(model.state_dict())
    return {
        "restored": train(model, rank, num_steps=3),
        "plain": train(other, rank, num_steps=3),
        "restored weights": full_weights(model),
        "plain weights": full_weights(other),
    }


def step_of(model: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> None:
    x, y = batch(0, rank, dtype)
    (model(x) - y).square().mean().backward()


def fsdp_gradients(rank: int, world_size: int) -> Outcomes:
    """Of one step with exact weights, in each way that FSDP2 can be told to divide."""
    found: Outcomes = {}
    for name, factor, is_summed in (
        ("average", None, False),
        ("own factor", 3.0, False),
        ("own factor by sums", 3.0, True),
    ):
        for kind in ("plain", "quantized"):
            if kind == "plain" and name == "own factor":
                continue  # gloo has no PREMUL_SUM
            model = fsdp(make_model())
            for part in (model[0], model[2], model):
                assert isinstance(part, fsdp2.FSDPModule)
                if factor is not None:
                    part.set_gradient_divide_factor(factor)
                part.set_force_sum_reduction_for_comms(is_summed)
            if kind == "quantized":
                fsdp2.apply(model, weights=None, gradients="int8")
            step_of(model, rank)
            shards = [p.grad.full_tensor().flatten() for p in model.parameters()]  # type: ignore[union-attr]
            found[f"{kind} {name}"] = torch.cat(shards)
    return found


def unshard_ahead(rank: int, world_size: int) -> Outcomes:
    """Asynchronous gathers give the weights that waiting ones give; shards keep every bit."""
    model = fsdp(make_model())
    before = full_weights(model)
    fsdp2.apply(model)
    found: Outcomes = {}
    for is_async in (False, True):
        handles = [m.unshard(async_op=is_async) for m in model.modules() if _is_fsdp(m)]
        for handle in handles:
            if handle is not None:
                handle.wait()
        found[f"{is_async}"] = weights(model)
        for m in model.modules():
            if isinstance(m, fsdp2.FSDPModule):
                m.reshard()
    found["kept"] = torch.equal(full_weights(model), before)
    found["exact"] = before
    return found


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, fsdp2.FSDPModule)


class TwoTypes(nn.Module):
    """Parameters of two dtypes in one group, which FSDP2 gathers as bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(33, 64)
        self.narrow = nn.Linear(64, 7, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16())  # type: ignore[no-any-return]


def gather_two_dtypes(rank: int, world_size: int) -> Outcomes:
    x, _ = batch(0, rank, torch.float32)
    expected = TwoTypes()(x).detach()
    model = TwoTypes()
    fully_shard(model)
    fsdp2.apply(model)
    out = model(x)
    out.float().sum().backward()
    return {"equal": torch.equal(out.detach(), expected)}


def count_fsdp(rank: int, world_size: int) -> Outcomes:
    """A step of 16-bit parameters, plain and quantized."""
    found: Outcomes = {}
    for name in ("plain", "quantized"):
        model = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))
        fully_shard(model)
        if name == "quantized":
            fsdp2.apply(model)
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        model(x).sum().backward()
        with counted() as sent:
            model(x).sum().backward()
        found[name] = dict(sent)
    return found


def train_with_replicas(rank: int, world_size: int) -> Outcomes:
    """HSDP: two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: Outcomes = {"plain": train(fsdp(make_model(), mesh=mesh), rank)}
    model = fsdp(make_model(), mesh=mesh)
    fsdp2.apply(model)
    found["quantized"] = train(model, rank)
    return found


def take_nodes_from_a_mesh(rank: int, world_size: int) -> Outcomes:
    """Hop 1 among ranks 0 1 and 2 3, told in three ways; and meshes that don't fit."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = values_of(rank, 4 * 1001)
    reduce = zero_comm.quantized_reduce_scatter
    found: Outcomes = {
        "environment": reduce(full),
        "number": reduce(full, ranks_per_node=2),
        "mesh": reduce(full, ranks_per_node=mesh),
        "one per node": reduce(full, ranks_per_node=1),
    }
    for name, shape in (("flat", (4,)), ("crossed", (2, 2))):
        other = init_device_mesh("cpu", shape)
        if name == "crossed":
            other = DeviceMesh("cpu", [[0, 2], [1, 3]])
        try:
            reduce(full, ranks_per_node=other)
        except ValueError as error:
            found[name] = str(error)
    return found


SCENARIOS: tuple[Callable[[int, int], Outcomes], ...] = (
    exchange,
    exchange_in_subgroups,
    sum_exactly,
    carry_an_engines_collectives,
    gather_with_the_function,
    reduce_with_the_function,
    train_ddp,
    ddp_gradients,
    average_single_buckets,
    buckets_made_anew,
    overlap_with_a_late_rank,
    count_ddp,
    fail_in_the_hook,
    train_fsdp,
    change_and_restore,
    fsdp_gradients,
    unshard_ahead,
    gather_two_dtypes,
    count_fsdp,
)
SCENARIOS_OF: dict[int, tuple[Callable[[int, int], Outcomes], ...]] = {
    2: (train_ddp_with_settings, train_fsdp_with_settings),
    4: (train_with_replicas, take_nodes_from_a_mesh),
}


def gap(losses: list[float], plain: list[float]) -> float:
    """The largest difference of a step's loss, relative to the plain run's."""
    assert plain[-1] < plain[0] / 2, "the plain run must have learned something"
    return max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))


def message(numel: int, kind: str) -> int:
    """Bytes of a message of ``numel`` elements."""
    return 32 + quantized_nbytes(numel, kind)
