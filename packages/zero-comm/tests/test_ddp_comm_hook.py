"""Quantized gradients in DistributedDataParallel, compared with plain DDP.

Bounds are at least twice the measured errors.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.real_ranks import (
    DTYPES,
    SHAPES,
    Outcomes,
    Scenario,
    counted,
    message,
    outcomes_of,
    values_of,
)
from support.toy_training import backward, gap, gradients, make_model, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero_comm import BlockFormat, LocoSettings, ddp_comm_hook

DTYPES_16 = (torch.bfloat16, torch.float16)
LOSS_BOUND = 0.03  # relative to plain DDP's loss, at any step


def ddp(model: nn.Module, hook: Any = None, **kwargs: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05, **kwargs)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


HOOKS: dict[str, dict[str, Any]] = {
    "exact gather": {"gathered": None},
    "int8, checksums": {"gradients": "int8", "has_checksum": True},
    "error feedback": {"error_feedback": LocoSettings(), "is_stochastic": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train_ddp(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {"plain": train(ddp(make_model()), rank)}
    model = make_model()
    found["default"] = train(ddp(model, ddp_comm_hook()), rank)
    found["default: weights"] = weights(model)
    return found


def train_ddp_with_settings(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    for name, settings in HOOKS.items():
        found[name] = train(ddp(make_model(), ddp_comm_hook(**settings)), rank)
    for name, kwargs in WAYS.items():
        model = make_model()
        if name == "unused":
            model.register_parameter("spare", nn.Parameter(torch.ones(9)))
        found[name] = train(ddp(model, ddp_comm_hook(), **kwargs), rank)
    for dtype in DTYPES_16:
        found[f"plain {dtype}"] = train(ddp(make_model(dtype)), rank)
        found[str(dtype)] = train(ddp(make_model(dtype), ddp_comm_hook()), rank)
    return found


def ddp_gradients(rank: int, world_size: int) -> Outcomes:
    """Compute the gradients of two steps, and of a step that accumulates two batches."""
    found: Outcomes = {}
    for name, hook in (("plain", None), ("quantized", ddp_comm_hook())):
        model = ddp(make_model(), hook)
        for step in range(2):  # DDP rebuilds its buckets after step 0
            model.zero_grad()
            backward(model, step, rank)
            found[f"{name} {step}"] = gradients(model)
        model.zero_grad()
        with model.no_sync():
            backward(model, 2, rank)
        backward(model, 3, rank)
        found[f"{name} accumulated"] = gradients(model)
    return found


def bucket_of(values: Tensor, parameters: Sequence[Tensor] = ()) -> Any:
    """Return a stand-in for a DDP bucket with one flat gradient."""
    return SimpleNamespace(index=lambda: 0, buffer=lambda: values, parameters=lambda: parameters)


def average_single_buckets(rank: int, world_size: int) -> Outcomes:
    found: Outcomes = {}
    hook = ddp_comm_hook()
    for numel in (1, 7, 1000, 4099):
        for dtype in DTYPES:
            values = values_of(rank, numel, dtype)
            found[f"{numel} {dtype}"] = hook(None, bucket_of(values)).wait()
    values = torch.complex(values_of(rank, 9), values_of(rank, 9))
    found["complex"] = hook(None, bucket_of(values)).wait()
    return found


def buckets_made_anew(rank: int, world_size: int) -> Outcomes:
    """Average equal gradients twice in one bucket, then in a bucket of other parameters."""
    hook = ddp_comm_hook(error_feedback=LocoSettings())
    one, other = torch.ones(4099), torch.ones(4099)
    parameters = {"first": [one], "again": [one], "anew": [other]}
    return {
        name: hook(None, bucket_of(values_of(rank, 4099), held)).wait()
        for name, held in parameters.items()
    }


def overlap_with_a_late_rank(rank: int, world_size: int) -> Outcomes:
    """Call the hook on the first rank before the other ranks start."""
    hook = ddp_comm_hook()
    late = torch.zeros(1)
    if rank == 0:
        future = hook(None, bucket_of(values_of(rank, 4096)))
        was_done = future.done()
        dist.broadcast(late, src=0)  # the other ranks wait for this broadcast
    else:
        dist.broadcast(late, src=0)
        future = hook(None, bucket_of(values_of(rank, 4096)))
        was_done = False
    future.wait()
    return {"was done": was_done}


def count_ddp(rank: int, world_size: int) -> Outcomes:
    hook = ddp_comm_hook()
    hook(None, bucket_of(torch.ones(50000))).wait()  # the first call discovers the topology
    with counted() as sent:
        hook(None, bucket_of(torch.ones(50000, dtype=torch.bfloat16))).wait()
    return dict(sent)


def fail_in_the_hook(rank: int, world_size: int) -> Outcomes:
    if world_size == 1:
        return {}
    sparse = ddp(nn.Embedding(4, 3, sparse=True), ddp_comm_hook())
    with pytest.raises(TypeError, match=r"must be dense: use sparse=False; got torch.sparse_coo"):
        sparse(torch.tensor(1)).sum().backward()
    fmt = BlockFormat("int8" if rank % 2 else "e4m3", 256)
    model = ddp(make_model(), ddp_comm_hook(fmt))
    try:
        backward(model, 0, rank)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def train_until_a_rank_dies(rank: int, folder: str) -> None:
    """Train on two ranks. The second one exits during the training.

    The first rank writes its error to ``folder``.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = ddp(make_model(), ddp_comm_hook(timeout=timedelta(seconds=20)))
    for step in range(3):
        if (rank, step) == (1, 2):
            os._exit(3)
        try:
            backward(model, step, rank)
        except RuntimeError as error:
            Path(folder, "error").write_text(f"step {step}: {error}")
            os._exit(0)  # a group with a dead rank cannot be destroyed


SCENARIOS = (
    train_ddp,
    ddp_gradients,
    average_single_buckets,
    buckets_made_anew,
    overlap_with_a_late_rank,
    count_ddp,
    fail_in_the_hook,
)
MORE: dict[int, tuple[Scenario, ...]] = {2: (train_ddp_with_settings,)}


def ranks_of(world_size: int, ranks_per_node: int) -> list[Outcomes]:
    return outcomes_of((*SCENARIOS, *MORE.get(world_size, ())), world_size, ranks_per_node)


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    return ranks_of(*request.param)


def test_losses_are_those_of_plain_ddp(ranks: list[Outcomes]) -> None:
    got = ranks[0]["train_ddp"]
    assert gap(got["default"], got["plain"]) <= (LOSS_BOUND if len(ranks) > 1 else 0)


@pytest.mark.parametrize("name", [*HOOKS, *WAYS, *map(str, DTYPES_16)])
def test_losses_are_those_of_plain_ddp_in_every_setting(name: str) -> None:
    outcomes = ranks_of(2, 2)[0]
    found = outcomes["train_ddp_with_settings"]
    plain = found.get(f"plain {name}", outcomes["train_ddp"]["plain"])
    assert gap(found[name], plain) <= LOSS_BOUND


def test_all_ranks_have_the_same_weights_to_the_bit(ranks: list[Outcomes]) -> None:
    first = ranks[0]["train_ddp"]["default: weights"]
    for outcomes in ranks[1:]:
        assert outcomes["train_ddp"]["default: weights"].equal(first)


@pytest.mark.parametrize("which", ["0", "1", "accumulated"])
def test_gradients_are_near_those_of_plain_ddp(ranks: list[Outcomes], which: str) -> None:
    got = ranks[0]["ddp_gradients"]
    plain = got[f"plain {which}"]
    error = (got[f"quantized {which}"] - plain).norm() / plain.norm()
    # Two roundings to 4 bits, one to 8. A sum, or a wrong average, has an error above 0.5.
    assert error <= (0.3 if len(ranks) > 1 else 0)


def test_buckets_of_any_length_and_dtype_are_averaged(ranks: list[Outcomes]) -> None:
    for numel in (1, 7, 1000, 4099):
        for dtype in DTYPES:
            shares = [values_of(r, numel, dtype).double() for r in range(len(ranks))]
            exact = torch.stack(shares).mean(0)
            for outcomes in ranks:
                got = outcomes["average_single_buckets"][f"{numel} {dtype}"]
                assert got.dtype == dtype
                # Half a 4-bit step for each hop, and half an 8-bit step for the gather.
                bound = max(s.abs().max() for s in shares) * (1 / 14 + 1 / 14 + 1 / 254) * 1.05
                if numel < 10:  # sent exactly, with the dtype's rounding
                    bound = 2 * torch.finfo(dtype).eps * exact.abs().max()
                assert (got.double() - exact).abs().max() <= bound, (numel, dtype)


def test_errors_are_not_given_to_a_bucket_of_other_parameters(ranks: list[Outcomes]) -> None:
    for outcomes in ranks:
        got = outcomes["buckets_made_anew"]
        assert got["first"].equal(got["anew"])
        assert got["first"].equal(got["again"]) is (len(ranks) == 1)


def test_complex_gradients_are_averaged_exactly(ranks: list[Outcomes]) -> None:
    mean = torch.stack([values_of(r, 9) for r in range(len(ranks))]).mean(0)
    for outcomes in ranks:
        got = outcomes["average_single_buckets"]["complex"]
        torch.testing.assert_close(got, torch.complex(mean, mean))


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_hook_returns_before_other_ranks_have_come(shape: tuple[int, int]) -> None:
    assert ranks_of(*shape)[0]["overlap_with_a_late_rank"]["was done"] is False


@pytest.mark.parametrize(("size", "per_node"), SHAPES[1:])
def test_traffic_is_that_of_the_formula(size: int, per_node: int) -> None:
    nodes, numel = size // per_node, -(-50000 // size)
    for outcomes in ranks_of(size, per_node):
        sent = outcomes["count_ddp"]
        hop_1 = (per_node - 1) * nodes * message(numel, "int4")
        hop_2 = (nodes - 1) * message(numel, "int4")
        gathered = message(numel, "int8")
        assert sent["all_to_all"] == [hop_1 + hop_2, hop_2]
        assert sent["all_gather"] == [(size - 1) * gathered, (size - per_node) * gathered]
        # A 16-bit ring all-reduce sends two slices per other rank.
        plain = 2 * (size - 1) * numel * 2
        assert plain / (sent["all_to_all"][0] + sent["all_gather"][0]) >= 2.5


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_an_error_in_an_exchange_ends_backward_with_its_reason(shape: tuple[int, int]) -> None:
    size, per_node = shape
    for rank, outcomes in enumerate(ranks_of(*shape)):
        error = outcomes["fail_in_the_hook"]["error"]
        first_hop = range(size) if per_node == 1 else range(rank & -per_node, size)
        sender = next(peer for peer in first_hop if peer % 2 != rank % 2)
        assert f"CorruptMessageError: the quantized message of rank {sender} is damaged" in error


def test_backward_ends_with_an_error_when_another_rank_has_died(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=train_until_a_rank_dies, args=(rank, str(tmp_path)), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=600)
    assert [process.exitcode for process in ranks] == [0, 3]
    assert (tmp_path / "error").read_text().startswith("step 2: ")


def test_a_format_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="format must be one of"):
        ddp_comm_hook("int5")


@contextmanager
def _bound_device(backends: str) -> Iterator[None]:
    """Pretend that an accelerator is bound as device, and that groups have ``backends``."""
    world, new_group = dist.group.WORLD, dist.new_group
    assert world is not None

    def make(*args: Any, **keys: Any) -> object:
        world.bound_device_id = None
        return new_group(*args, **keys)

    world.bound_device_id = torch.device("cuda", 0)
    with (
        mock.patch.object(dist, "get_backend_config", return_value=backends),
        mock.patch.object(dist, "new_group", make),
    ):
        yield
    world.bound_device_id = None


def make_hook_of_some_ranks(rank: int, world_size: int) -> Outcomes:
    """Create hooks on ranks 0 and 2, before and after rank 2 creates another group."""
    group, every = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
    with _bound_device("cpu:gloo,cuda:nccl"):
        ddp_comm_hook(group=every)  # a group of all ranks needs no check
    found = {"error": "", "bound": ""}
    if rank == 1:
        return found
    ddp_comm_hook(group=group)
    with _bound_device("cpu:gloo,cuda:gloo"):
        ddp_comm_hook(group=group)  # gloo never splits a communicator
    with _bound_device("cpu:gloo,cuda:nccl"), pytest.raises(RuntimeError) as bound:
        ddp_comm_hook(group=group)
    kept = [dist.new_group([2], use_local_synchronization=True)] if rank == 2 else []
    with pytest.raises(RuntimeError) as refused:
        ddp_comm_hook(group=group)
    del kept
    return {"error": str(refused.value), "bound": str(bound.value)}


def test_a_group_that_its_ranks_cannot_make_alone_is_refused_on_all_of_them() -> None:
    first, _, last = outcomes_of((make_hook_of_some_ranks,), 3, 1)
    for outcomes in (first, last):
        error = outcomes["make_hook_of_some_ranks"]["error"]
        assert "equal on its ranks, found rank 0: 6, rank 2: 7; make each group" in error
        assert "over ranks [0, 2]" in outcomes["make_hook_of_some_ranks"]["bound"]
