"""Parameter shards that rest off the device: streamed ahead of use, with the same numbers.

The tier here keeps them in a dict and fills a buffer only when it is waited for, so that whoever
reads its buffer too early reads NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_core
from zero_core._torch import DisableTorchFunction
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import LibraryControlGroup
from zero_core.layout.arithmetic import Segment
from zero_core.protocols import ParamTier
from zero_core.sharded.param_offload import OffloadedShard
from zero_core.sharded.pool import BufferPool, CopyStream, allocator
from zero_core.testing import (
    Case,
    Hard,
    SimulatedRanks,
    batch,
    make_model,
    run_ddp,
    run_engine,
    run_on_processes,
    seeded,
    simulate,
)

EVERYTHING = {"stage3_param_persistence_threshold": 0}


class _Late:
    def __init__(self, out: Tensor, source: Tensor) -> None:
        self._out, self._source = out, source
        out.fill_(float("nan"))

    def wait(self) -> None:
        self._out.copy_(self._source)


class Shelf:
    """A `ParamTier`; ``has_homes``: whether its memory may be written from outside."""

    def __init__(self, shards: Sequence[tuple[int, int, torch.dtype]], *, has_homes: bool) -> None:
        self.shards = {s: torch.full((n,), float("nan"), dtype=d) for s, n, d in shards}
        self.has_homes = has_homes
        self.log: list[tuple[str, int]] = []
        self.expected: list[int] = []

    def expect(self, segments: Sequence[int]) -> None:
        self.expected = list(segments)

    def fetch(self, segment: int, out: Tensor) -> _Late:
        self.log.append(("fetch", segment))
        return _Late(out, self.shards[segment])

    def write(self, segment: int, start: int, values: Tensor) -> None:
        self.log.append(("write", segment))
        self.shards[segment][start : start + values.numel()] = values

    def home(self, segment: int) -> Tensor | None:
        return self.shards[segment] if self.has_homes else None

    def report(self) -> Mapping[str, int]:
        return {"host parameters": sum(t.nbytes for t in self.shards.values())}


class Shelves:
    """A `ParamTierFactory` that remembers what it made."""

    def __init__(self, *, has_homes: bool = False) -> None:
        self.has_homes = has_homes
        self.made: list[Shelf] = []

    def __call__(
        self,
        *,
        shards: Sequence[tuple[int, int, torch.dtype]],
        device: torch.device,
        config: Mapping[str, Any],
    ) -> Shelf:
        shelf = Shelf(shards, has_homes=self.has_homes)
        assert isinstance(shelf, ParamTier)
        self.made.append(shelf)
        return shelf


def _case(dtype: str, **keys: Any) -> Case:
    return Case(stage=3, dtype=dtype, **{"zero": EVERYTHING, **keys})


def _same(ranks: SimulatedRanks, dtype: str) -> None:
    for keys in ({}, {"accumulation": 2}, {"accumulation": 2, "is_local": True, "clipping": 0.5}):
        expected = run_engine(
            Case(stage=3, dtype=dtype, **keys), ranks.rank, 4, process_group=ranks
        )
        for has_homes in (False, True):
            shelves = Shelves(has_homes=has_homes)
            found = run_engine(
                _case(dtype, **keys), ranks.rank, 4, param_tier=shelves, process_group=ranks
            )
            assert found.losses == expected.losses
            assert found.values.keys() == expected.values.keys()
            assert all(torch.equal(found.values[k], expected.values[k]) for k in expected.values)
            (shelf,) = shelves.made
            assert {s for _, s in shelf.log} == set(shelf.shards)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_losses_and_weights_are_those_without_offload(world_size: int, dtype: str) -> None:
    simulate(_same, world_size, dtype)


def _as_ddp(ranks: SimulatedRanks) -> None:
    expected = run_ddp(Case(), ranks.rank, 4, ranks)
    found = run_engine(_case("fp32"), ranks.rank, 4, param_tier=Shelves(), process_group=ranks)
    assert found.losses == expected.losses
    assert all(torch.equal(found.values[k], expected.values[k]) for k in expected.values)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp32_training_is_bit_identical_to_ddp(world_size: int) -> None:
    simulate(_as_ddp, world_size)


class _Tower(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        with seeded(3):
            self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(depth))
            self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x).square().mean()


def _tower(
    shelves: Shelves,
    dtype: str = "fp32",
    process_group: SimulatedRanks | None = None,
    **zero: Any,
) -> zero_core.Engine:
    config = Case(stage=3, dtype=dtype, zero={**EVERYTHING, **zero}).config()
    return zero_core.build(_Tower(), config, param_tier=shelves, process_group=process_group)


def test_the_next_unit_is_fetched_before_the_one_in_use_is_computed() -> None:
    shelves = Shelves()
    engine = _tower(shelves)
    (shelf,) = shelves.made
    shelf.log.clear()
    for index, block in enumerate(engine.module.blocks):
        block.register_forward_hook(
            lambda module, args, output, index=index: shelf.log.append(("forward", index + 1))
        )
        block.register_full_backward_hook(
            lambda module, grads, outputs, index=index: shelf.log.append(("backward", index + 1))
        )
    engine.backward(engine(torch.ones(2, 7, requires_grad=True)))
    order = {event: place for place, event in reversed(list(enumerate(shelf.log)))}
    for index in range(1, 5):
        assert order["fetch", index + 1] < order["forward", index]
    again = shelf.log[order["forward", 5] :]
    assert ("fetch", 5) not in again  # backward begins with the last one, which is still there
    for index in range(1, 4):
        assert again.index(("fetch", index)) < again.index(("backward", index + 1))


def test_what_is_expected_is_what_is_fetched_next() -> None:
    shelves = Shelves()
    engine = _tower(shelves)
    (shelf,) = shelves.made
    seen: list[tuple[int, list[int]]] = []
    for index, block in enumerate(engine.module.blocks, 1):
        block.register_forward_hook(
            lambda module, args, output, index=index: seen.append((index, shelf.expected))
        )
    loss = engine(torch.ones(2, 7))
    assert dict(seen) == {
        1: [2, 3, 4, 5, 4, 3, 2, 1],
        2: [3, 4, 5, 4, 3, 2, 1],
        3: [4, 5, 4, 3, 2, 1],
        4: [5, 4, 3, 2, 1],
        5: [4, 3, 2, 1],
    }
    engine.backward(loss)
    assert shelf.expected == []
    with torch.no_grad():
        seen.clear()
        engine(torch.ones(2, 7))
    assert dict(seen) == {1: [2, 3, 4, 5], 2: [3, 4, 5], 3: [4, 5], 4: [5], 5: []}


def _memory(ranks: SimulatedRanks) -> None:
    shelves = Shelves()
    engine = _tower(shelves, "bf16", process_group=ranks)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7)))
        engine.step()
    report = engine.memory_report()
    segments = engine.layout.segments
    assert report["host parameters"] == sum(2 * s.shard_numel for s in segments)
    assert "parameters" not in report
    block, root = segments[1], segments[0]
    assert report["gathered units"] == 2 * (root.padded_numel + 2 * block.padded_numel)
    staged = 2 * (root.shard_numel + block.shard_numel) if ranks.size > 1 else 0
    assert report["fetched shards"] == staged
    assert engine.sharded_state.tier._published.chunks[0][1].is_meta
    with DisableTorchFunction():  # no read of values, which are not there
        assert all(p.untyped_storage().nbytes() == 2 for p in engine.module.blocks.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_device_holds_two_blocks_and_the_root(world_size: int) -> None:
    simulate(_memory, world_size)


def _persistent(ranks: SimulatedRanks) -> None:
    expected = run_engine(Case(stage=3, dtype="bf16"), ranks.rank, 3, process_group=ranks)
    numels = {}
    for threshold in (0, 40, 10**6):
        shelves = Shelves()
        zero = {"stage3_param_persistence_threshold": threshold}
        found = run_engine(
            _case("bf16", zero=zero), ranks.rank, 3, param_tier=shelves, process_group=ranks
        )
        assert found.losses == expected.losses
        assert all(torch.equal(found.values[k], expected.values[k]) for k in expected.values)
        numels[threshold] = [len(shelf.shards) for shelf in shelves.made]
    assert numels[0] == [5]
    assert numels[10**6] == []  # nothing is left to rest


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_segments_stay_on_the_device(world_size: int) -> None:
    simulate(_persistent, world_size)
    root, blocks = 8, 56
    for threshold, model_threshold, resting in (
        (root - 1, 10**9, [0, 1, 2, 3, 4, 5]),
        (root, 10**9, [1, 2, 3, 4, 5]),
        (blocks, 10**9, []),
        (blocks, root + 2 * blocks, [3, 4, 5]),
    ):
        shelves = Shelves()
        engine = _tower(
            shelves,
            stage3_param_persistence_threshold=threshold,
            stage3_model_persistence_threshold=model_threshold,
        )
        assert [list(s.shards) for s in shelves.made] == ([resting] if resting else [])
        kept = [s for s in engine.layout.segments if s.index not in resting]
        held = engine.memory_report().get("parameters", 0)
        assert held == sum(4 * s.padded_numel for s in kept)


class _Adapted(nn.Module):
    """Frozen blocks with a small trainable part, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(4):
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"base": nn.Linear(9, 9), "adapter": nn.Linear(9, 9, bias=False)})
                for _ in range(3)
            )
            for block in self.blocks:
                block.base.requires_grad_(False)
                block.forward = lambda x, b=block: torch.tanh(b["base"](x) + b["adapter"](x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _frozen(ranks: SimulatedRanks, folder: str) -> None:
    def train(engine: zero_core.Engine, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            data = torch.randn(
                4, 9, generator=torch.Generator().manual_seed(10 * step + ranks.rank)
            )
            loss = engine(data)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def build(**keys: Any) -> zero_core.Engine:
        return zero_core.build(_Adapted(), _case("bf16").config(), **keys, process_group=ranks)

    plain, shelves = build(), Shelves(has_homes=True)
    engine = build(param_tier=shelves)
    assert train(engine, 3) == train(plain, 3)
    (shelf,) = shelves.made
    frozen = [s.index for s in engine.layout.segments if not s.is_trainable]
    assert frozen
    assert set(frozen) <= set(shelf.shards)
    engine.save_checkpoint(folder)
    full = engine.full_state_dict()
    reference = plain.full_state_dict()
    assert all(torch.equal(full[k], reference[k]) for k in reference)

    changed = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    for e in (engine, plain):
        e.states.set_full("blocks.1.base.weight", changed)
        with e.gathered(modifier_rank=0) as module:
            if ranks.rank == 0:
                module.blocks[2]["base"].bias.data.fill_(0.25)
                module.blocks[2]["adapter"].weight.data.mul_(2.0)
    assert torch.equal(engine.states.get_full("blocks.1.base.weight"), changed.bfloat16().float())
    assert torch.equal(engine.states.get_full("blocks.2.base.bias"), torch.full((9,), 0.25))
    assert train(engine, 2) == train(plain, 2)
    for e in (engine, plain):
        e.load_checkpoint(folder)
        again = e.full_state_dict()
        assert all(torch.equal(again[k], full[k]) for k in full)
    assert train(engine, 2) == train(plain, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_frozen_blocks_rest_and_can_be_read_set_and_saved(world_size: int, tmp_path: Path) -> None:
    simulate(_frozen, world_size, str(tmp_path))


def _checkpoint(ranks: SimulatedRanks, folder: str) -> None:
    def build(shelves: Shelves | None) -> zero_core.Engine:
        return zero_core.build(
            make_model(), _case("bf16").config(), param_tier=shelves, process_group=ranks
        )

    def train(engine: zero_core.Engine, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = engine(**batch(step, 0, ranks.rank))["loss"]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    for writer, reader in ((None, Shelves()), (Shelves(), None), (Shelves(), Shelves())):
        engine = build(writer)
        train(engine, range(3))
        engine.save_checkpoint(folder)
        expected = train(engine, range(3, 6))
        other = build(reader)
        train(other, range(7, 8))
        other.load_checkpoint(folder)
        assert train(other, range(3, 6)) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_cross_between_with_and_without_offload(
    world_size: int, tmp_path: Path
) -> None:
    simulate(_checkpoint, world_size, str(tmp_path))


def _deferred() -> Hard:
    with zero_core.deferred_init():
        return make_model()


def _construct(ranks: SimulatedRanks, folder: str, models: list[Hard]) -> None:
    plain = zero_core.build(make_model(), Case(stage=3).config(), process_group=ranks)
    plain.export_safetensors(folder)
    expected = load_file(Path(folder) / "model.safetensors")
    config = _case("fp32").config()
    with torch.device("meta"):
        empty = Hard()
    for model, keys in ((models[ranks.rank], {}), (empty, {"pretrained": folder})):
        engine = zero_core.build(model, config, param_tier=Shelves(), **keys, process_group=ranks)
        engine.export_safetensors(Path(folder) / "again")
        found = load_file(Path(folder) / "again" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected)
        assert engine.memory_report()["gathered units"] == 0  # nothing was gathered for it


@pytest.mark.parametrize("world_size", [1, 2])
def test_deferred_and_pretrained_models_never_lie_on_the_device(
    world_size: int, tmp_path: Path
) -> None:
    # Not made by ranks, which are threads: torch's hooks that record a model are global.
    models = [_deferred() for _ in range(world_size)]
    simulate(_construct, world_size, str(tmp_path), models)


def test_a_shard_that_cannot_be_read_fails_the_forward_with_the_tiers_error() -> None:
    shelves = Shelves()
    engine = _tower(shelves)
    (shelf,) = shelves.made

    def fail(segment: int, out: Tensor) -> Any:
        raise OSError(5, "the disk is gone", "/some/file")

    shelf.fetch = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="/some/file"):
        engine(torch.ones(2, 7))


def test_a_gather_that_fails_is_named_and_its_staging_buffer_is_lent_no_more() -> None:
    cpu = torch.device("cpu")
    staging = BufferPool(allocator(cpu), 12)
    segment = Segment(0, 4, torch.float32, is_trainable=True, slots=(), shard_numel=3, world_size=2)
    shelf = Shelf([(0, 3, torch.float32)], has_homes=False)

    def fail(*args: Any, **keys: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    library: Any = SimpleNamespace(rank=1, world_size=2)
    control = LibraryControlGroup(library, torch.device("cpu"))
    transport = SimpleNamespace(all_gather=fail, reduce_scatter=fail)
    names = {segment.index: "unit 4 (blocks.3)"}
    communicator = Communicator(transport, control, names)  # type: ignore[arg-type]
    shard = OffloadedShard(
        segment,
        shelf,
        CopyStream(cpu),
        staging=staging,
        communicator=communicator,
        tier=SimpleNamespace(),  # type: ignore[arg-type]
        span=None,
    )

    def gather() -> None:
        shard.gather(torch.empty(6), version=1, backward=False).wait()

    with pytest.raises(
        zero_core.CollectiveError,
        match=r"rank 1: all_gather of unit 4 \(blocks.3\) failed.*Connection",
    ):
        gather()
    shelf.fetch = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            gather()
        assert error.type is RuntimeError, "the tier's own"
    assert staging.allocated_bytes == 24, "peers may still read the first; the second is used again"


def test_a_param_tier_below_stage_3_is_refused() -> None:
    with pytest.raises(zero_core.ConfigError, match="stage 3, found 2"):
        zero_core.build(_Tower(), Case(stage=2).config(), param_tier=Shelves())


def test_on_a_cpu_shards_are_used_where_they_lie(caplog: pytest.LogCaptureFixture) -> None:
    zero = {**EVERYTHING, "offload_param": {"device": "cpu"}}
    with caplog.at_level("INFO"):
        engine = zero_core.build(_Tower(), Case(stage=3, zero=zero).config())
    said = [r.getMessage() for r in caplog.records if "are used there" in r.getMessage()]
    assert len(said) == 1
    engine.backward(engine(torch.ones(2, 7)))
    report = engine.memory_report()
    assert report["parameters"] == 4 * sum(s.padded_numel for s in engine.layout.segments)
    assert report["gathered units"] == 0


def _recomputed(ranks: SimulatedRanks) -> None:
    def train(**keys: Any) -> list[float]:
        config = _case("bf16").config() | {"activation_checkpointing": {}}
        engine = zero_core.build(_Tower(), config, **keys, process_group=ranks)
        losses = []
        for step in range(4):
            data = torch.randn(
                3, 7, generator=torch.Generator().manual_seed(10 * step + ranks.rank)
            )
            with torch.no_grad():  # an evaluation between, which leaves nothing gathered
                losses.append(engine(data).item())
            if step == 2:
                with pytest.raises(RuntimeError):  # a forward that breaks off in the middle
                    engine(torch.ones(3, 8))
            loss = engine(data)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    assert train(param_tier=Shelves()) == train()


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputation_evaluation_and_broken_forwards_change_nothing(world_size: int) -> None:
    simulate(_recomputed, world_size)


class _Pinned(Shelf):
    """Copies from page-locked memory on the stream that is current, and says when it is done."""

    def __init__(self, shards: Sequence[tuple[int, int, torch.dtype]]) -> None:
        super().__init__(shards, has_homes=True)
        self.shards = {s: t.pin_memory() for s, t in self.shards.items()}

    def fetch(self, segment: int, out: Tensor) -> Any:
        out.copy_(self.shards[segment], non_blocking=True)
        event = torch.accelerator.current_stream(out.device).record_event()

        class Copied:
            def wait(self) -> None:
                torch.accelerator.current_stream(out.device).wait_event(event)

        return Copied()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_streaming_on_an_accelerator_changes_no_bit() -> None:
    def train(**keys: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8)))
        model.forward = lambda x: [x := torch.tanh(b(x)) for b in model[0]][-1].square().mean()
        engine = zero_core.build(model, _case("bf16").config(), **keys)
        losses = []
        for step in range(8):
            data = torch.randn(256, 1024, generator=torch.Generator().manual_seed(step))
            loss = engine(data.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().cpu())
        return losses

    streamed = train(param_tier=lambda *, shards, device, config: _Pinned(shards))
    assert all(map(torch.equal, streamed, train()))


def _planned(ranks: SimulatedRanks) -> None:
    offload = {"device": "nvme", "nvme_path": "/nowhere"}
    for dtype in ("fp32", "bf16"):
        for threshold in (0, 20):
            zero = {"stage3_param_persistence_threshold": threshold, "offload_param": offload}
            config = Case(stage=3, dtype=dtype, zero=zero).config()
            plan = zero_core.plan(_Tower(), config, ranks.size, device_type="cpu")
            shelves = Shelves()
            engine = zero_core.build(_Tower(), config, param_tier=shelves, process_group=ranks)
            (shelf,) = shelves.made
            for _ in range(2):
                shelf.log.clear()
                engine.backward(engine(torch.ones(2, 7)))
                engine.step()
            held = {k: n for k, n in engine.memory_report().items() if n}
            del held["host parameters"]
            held.pop("exchange buffers", None)  # simulated ranks share no memory
            assert held == {k: plan.memory.device[k] for k in held}
            masters = [t for _, t in engine.sharded_state.tier._masters.chunks]
            kept = {t.data_ptr() for _, t in engine.sharded_state.tier._published.chunks}
            own = sum(t.nbytes for t in masters if t.data_ptr() not in kept)
            assert plan.memory.device.get("master weights", 0) == own

            zero = {**zero, "offload_param": {"device": "cpu"}}
            config = Case(stage=3, dtype=dtype, zero=zero).config()
            traffic = zero_core.plan(_Tower(), config, ranks.size).traffic
            up = next(t.host_link_bytes for t in traffic if t.collective == "to_device")
            fetched = [s for kind, s in shelf.log if kind == "fetch"]
            assert up == sum(shelf.shards[s].nbytes for s in fetched)
            down = next(t.host_link_bytes for t in traffic if t.collective == "to_host")
            written = [s for kind, s in shelf.log if kind == "write"]
            assert down == sum(shelf.shards[s].nbytes for s in written)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_plan_counts_what_rests_and_what_travels(world_size: int) -> None:
    simulate(_planned, world_size)


def test_offloaded_shards_follow_ddp_where_ranks_share_memory() -> None:
    run_on_processes(_as_ddp, 2)
