"""`OffloadedOptimizer` under DDP and FSDP2: bits equal to torch's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.kernels import cpu_adam
from support.models import groups_of, loop, make_model, weights, whole
from support.ranks import spawn
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero_offload import OffloadedOptimizer

RATIOS = (0.0, 0.3, 1.0)
STEPS = range(3)  # the schedule changes the learning rate in the last step
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-2, "foreach": False}),
    (optim.Adam, {"lr": 1e-2, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.NAdam, {"lr": 1e-2}),
]
if find_spec("cpu_adam") is not None:
    CLASSES.append((cpu_adam().CPUAdam, {"lr": 1e-2}))


PAIRS = [(0, 0.0), (0, 1.0), (1, 0.3), (2, 0.3)]
"""(index in `CLASSES`, ratio). Tests on one process cover every class at every ratio."""


def shard(
    model: nn.Sequential, *, is_mixed: bool = False, mesh: DeviceMesh | None = None
) -> nn.Sequential:
    """Apply FSDP2 to each linear layer and to the model. ``is_mixed`` computes in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_mixed else None)
    for module in (model[0], model[3], model[4], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _assert_equals_torch(
    rank: int, make: Any, max_norm: float, pairs: list[tuple[int, float]] = PAIRS
) -> None:
    expected: dict[int, tuple[list[float], torch.Tensor]] = {}
    for index, ratio in pairs:
        cls, settings = CLASSES[index]
        if index not in expected:
            plain = make()
            losses = loop(plain, cls(groups_of(plain), **settings), rank, STEPS, max_norm)
            assert len(set(losses)) >= len(STEPS), "a loop in which nothing happens shows nothing"
            expected[index] = losses, weights(plain)
        ours = make()
        optimizer = OffloadedOptimizer(cls, groups_of(ours), ratio=ratio, **settings)
        assert loop(ours, optimizer, rank, STEPS, max_norm) == expected[index][0]
        assert torch.equal(weights(ours), expected[index][1])


def _ddp(rank: int, world_size: int) -> None:
    for is_view, pairs in ((False, PAIRS[2:]), (True, PAIRS)):
        keys = {"gradient_as_bucket_view": is_view}
        _assert_equals_torch(
            rank, lambda keys=keys: DistributedDataParallel(make_model(), **keys), 0.0, pairs
        )


def test_ddp_equals_torch_bit_for_bit() -> None:
    spawn(_ddp, 2)


def _equal_at_every_ratio(train: Callable[[Callable[..., Any]], Tensor]) -> None:
    """Check that ``train`` returns the same with torch's optimizer and at every ratio."""
    expected = train(lambda model: optim.AdamW(groups_of(model), lr=1e-2))
    for ratio in RATIOS:
        keys = {"lr": 1e-2, "ratio": ratio}
        found = train(lambda m, keys=keys: OffloadedOptimizer(optim.AdamW, groups_of(m), **keys))
        assert torch.equal(found, expected)


def _late_ddp(rank: int, world_size: int) -> None:
    """Check that master weights follow DDP's broadcast if DDP is created after the optimizer."""

    def train(make: Callable[..., Any]) -> Tensor:
        model = make_model()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        optimizer = make(model)
        loop(DistributedDataParallel(model), optimizer, rank)
        return weights(model)

    _equal_at_every_ratio(train)


def test_an_optimizer_made_before_ddp_trains_on_rank_0s_weights() -> None:
    spawn(_late_ddp, 2)


def _fsdp2(rank: int, world_size: int, is_mixed: bool, max_norm: float) -> None:
    local = shard(make_model())[4].weight.to_local()
    assert (local.numel() == 0) == (rank > 0), "the model must leave ranks without an element"
    # The optimizer gets fp32 shards and gradients, with and without mixed precision.
    pairs = [*PAIRS[2 * is_mixed :], *((i, 0.3) for i in range(4, len(CLASSES)))]
    _assert_equals_torch(rank, lambda: shard(make_model(), is_mixed=is_mixed), max_norm, pairs)


@pytest.mark.parametrize(
    ("world_size", "is_mixed", "max_norm"),
    [(1, False, 0.05), (2, False, 0.0), pytest.param(3, True, 0.05, id="3 ranks, also cpu_adam")],
)
def test_fsdp2_with_uneven_and_empty_shards_equals_torch_bit_for_bit(
    world_size: int, is_mixed: bool, max_norm: float
) -> None:
    spawn(_fsdp2, world_size, is_mixed, max_norm)


def _replicated(rank: int, world_size: int) -> None:
    """Train under HSDP: sharded over one mesh dimension, replicated over the other."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    _assert_equals_torch(
        rank, lambda: shard(make_model(), mesh=mesh), max_norm=0.05, pairs=PAIRS[2:]
    )


def test_hsdp_equals_torch_bit_for_bit() -> None:
    spawn(_replicated, 4)


def _states(rank: int, world_size: int) -> None:
    """Compare exported states with torch's by name, placement and value."""
    plain, ours = shard(make_model()), shard(make_model())
    expected = optim.AdamW(groups_of(plain), lr=1e-2)
    optimizer = OffloadedOptimizer(optim.AdamW, groups_of(ours), lr=1e-2, ratio=0.3)
    loop(plain, expected, rank)
    loop(ours, optimizer, rank)
    optimizer.zero_grad()  # get_optimizer_state_dict steps an optimizer without state
    for _ in range(2):  # the first call must not change anything
        theirs = get_optimizer_state_dict(plain, expected)["state"]
        found = get_optimizer_state_dict(ours, optimizer)["state"]
        assert found.keys() == theirs.keys()
        for name, entry in found.items():
            assert set(entry) == {*theirs[name], "master_weight", "num_steps"}
            assert (entry["num_steps"], entry["step"]) == (5, theirs[name]["step"].item())
            for moment in ("exp_avg", "exp_avg_sq"):
                assert isinstance(entry[moment], DTensor)
                assert entry[moment].placements == theirs[name][moment].placements
                assert entry[moment].shape == theirs[name][moment].shape
                assert torch.equal(entry[moment].to_local(), theirs[name][moment].to_local())
            assert torch.equal(whole(entry["master_weight"]), whole(ours.get_parameter(name)))


def test_states_are_dtensors_in_the_parameters_placements() -> None:
    spawn(_states, 3)


def _resume(rank: int, world_size: int, folder: str) -> None:
    """Resume from each kind of checkpoint at another ratio, and compare with the first run."""
    for cls, settings in CLASSES[0:4:3]:
        first = shard(make_model(torch.bfloat16))
        source = OffloadedOptimizer(cls, groups_of(first), ratio=0.6, **settings)
        loop(first, source, rank, range(2))
        source.zero_grad()
        path = Path(folder) / f"{cls.__name__}-{world_size}"
        dcp.save({"optim": get_optimizer_state_dict(first, source)}, checkpoint_id=path)
        kinds = [StateDictOptions(flatten_optimizer_state_dict=True)]
        kinds += [StateDictOptions(full_state_dict=True)]
        saved = [(o, get_optimizer_state_dict(first, source, options=o)) for o in kinds]
        resumed = []
        for options, values in [(StateDictOptions(), None), *saved]:
            # Loading must restore the weights from the checkpoint's master weights.
            model = shard(nn.Sequential(*make_model(torch.bfloat16)))
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            target = OffloadedOptimizer(cls, groups_of(model), ratio=0.2, **settings)
            optim.lr_scheduler.StepLR(target, step_size=2)  # adds initial_lr, as in the checkpoint
            if values is None:
                values = get_optimizer_state_dict(model, target)
                dcp.load({"optim": values}, checkpoint_id=path)
            set_optimizer_state_dict(model, target, values, options=options)
            resumed.append((model, target))
        expected = loop(first, source, rank, range(2, 5))
        for model, target in resumed:
            assert loop(model, target, rank, range(2, 5)) == expected
            assert torch.equal(weights(model), weights(first))


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_resume_bit_identically_at_another_ratio(
    world_size: int, tmp_path: Path
) -> None:
    spawn(_resume, world_size, str(tmp_path))


def _save(rank: int, world_size: int, folder: str) -> None:
    model = shard(make_model())
    optimizer = OffloadedOptimizer(optim.NAdam, groups_of(model), ratio=0.6, lr=1e-2)
    loop(model, optimizer, rank, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optim": state}, checkpoint_id=Path(folder) / "dcp")
    entries = {name: _plain(entry) for name, entry in state["state"].items()}
    if rank == 0:
        torch.save(entries, Path(folder) / "expected.pt")


def _load(rank: int, world_size: int, folder: str) -> None:
    model = shard(make_model())
    optimizer = OffloadedOptimizer(optim.NAdam, groups_of(model), ratio=0.1, lr=1e-2)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optim": state}, checkpoint_id=Path(folder) / "dcp")
    set_optimizer_state_dict(model, optimizer, state)
    expected = torch.load(Path(folder) / "expected.pt")
    for name, entry in get_optimizer_state_dict(model, optimizer)["state"].items():
        found = _plain(entry)
        assert found.keys() == expected[name].keys()
        for key, value in found.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name][key])), key


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: whole(v) if isinstance(v, torch.Tensor) else v for k, v in entry.items()}


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    spawn(_save, 2, str(tmp_path))
    spawn(_load, 3, str(tmp_path))


def _plain_state(rank: int, world_size: int) -> None:
    """Load a state_dict of torch's optimizer, which has no master weights."""
    plain, ours = shard(make_model()), shard(make_model())
    source = optim.AdamW(groups_of(plain), lr=1e-2)
    loop(plain, source, rank, range(3))
    target = OffloadedOptimizer(optim.AdamW, groups_of(ours), lr=1e-2, ratio=0.4)
    ours.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(ours, target, get_optimizer_state_dict(plain, source))
    assert loop(ours, target, rank, range(3, 6)) == loop(plain, source, rank, range(3, 6))
    with pytest.raises(ValueError, match="set_optimizer_state_dict"):
        target.load_state_dict(_full(target.state_dict()))  # whole tensors instead of DTensors


def _full(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {key: _plain(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def test_a_plain_torch_state_is_taken_over_on_fsdp2() -> None:
    spawn(_plain_state, 3)


def _overflow(rank: int, world_size: int) -> None:
    """Check that an overflow on one rank skips the step on all ranks."""

    def train(make: Callable[..., Any]) -> Tensor:
        model = shard(make_model())
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(4):
            data = torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            scaler.scale(model(data).square().mean()).backward()
            if step == 1 and rank == 0:
                model[0].weight.grad.to_local()[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0, 512.0]
        return weights(model)

    _equal_at_every_ratio(train)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    spawn(_overflow, 2)
