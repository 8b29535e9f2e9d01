"""The tail unit: a step waits for its values, gradients and sums only where they are used."""

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from support.tiers import MadeTier
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from zero_core.layout import discovery
from zero_core.layout.discovery import MIN_TAIL_NUMEL, discover, note_reader
from zero_core.protocols import EXACT_GRADIENTS
from zero_core.testing.models import batch, seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import alone, on_processes
from zero_core.testing.simulated import device_collectives, on_ranks, simulate
from zero_core.testing.training import assert_same, check_like_ddp, train

WIDTH, VOCAB, DEPTH = 64, 1024, 3


class _Block(nn.Module):
    def __init__(self, log, index):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.log = log
        self.index = index

    def forward(self, x):
        if self.log is None:  # dynamo would guard on the log's length
            return x + torch.tanh(self.inner(x))
        self.log.append(f"block {self.index}")
        out = x + torch.tanh(self.inner(x))
        if out.requires_grad:
            out.register_hook(lambda grad: self.log.append(f"backward of block {self.index}"))
        return out


class _Net(nn.Module):
    def __init__(self, way="plain", rank=0):
        super().__init__()
        self.way, self.rank = way, rank
        self.log = []
        with seeded(0):
            self.embed = nn.Embedding(7, WIDTH)
            self.blocks = nn.ModuleList(_Block(self.log, i + 1) for i in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB)
            self.other = nn.Linear(WIDTH, 3)
        self.kept = [self.head.weight]
        self.num_calls = 0

    def forward(self, ids):
        self.num_calls += 1
        is_last_rank = self.rank > 0
        x = self.embed(ids)
        if self.way == "read first":
            x = x + functional.linear(x, self.head.weight)[..., :WIDTH]
        if self.way == "read from a list" or (self.way == "read now and then" and self.is_odd):
            x = x * self.kept[0].square().mean().rsqrt()
        for index, block in enumerate(self.blocks):
            if not (self.way == "without the last block" and is_last_rank and index == DEPTH - 1):
                x = block(x)
            if self.way == "after each block":
                x = x + self.head(self.norm(x))[..., :WIDTH]
        if self.way == "without the last block" and is_last_rank:
            return x.square().mean()
        if self.way == "read last":
            return functional.linear(self.norm(x), self.head.weight).square().mean()
        if self.way == "each rank another head" and is_last_rank == self.is_odd:
            return self.other(self.norm(x)).square().mean()
        return self.head(self.norm(x)).square().mean() + self.other(x).mean()

    @property
    def is_odd(self):
        return self.num_calls % 2 == 1


def _ids(step, rank):
    return torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def _units(model):
    found = discover(model)
    return {name: {found.names[p][0] for p in members} for name, _, members in found.units}


def test_what_may_be_used_elsewhere_stays_in_the_root(monkeypatch):
    monkeypatch.setattr(discovery, "MIN_TAIL_NUMEL", 1)
    model = _Net()
    model.gain = nn.Parameter(torch.ones(1))
    model.embed = nn.Embedding(VOCAB, WIDTH)
    model.head.weight = model.embed.weight
    note_reader(model.blocks[0], model.other.weight)
    units = _units(model)
    assert units[""] == {"gain", "embed.weight", "other.weight"}
    assert units["tail"] == {"norm.weight", "norm.bias", "head.bias", "other.bias"}


def test_a_small_tail_and_one_without_blocks_stay_in_the_root(monkeypatch):
    numel = sum(p.numel() for m in (_Net().norm, _Net().head, _Net().other) for p in m.parameters())
    assert numel >= MIN_TAIL_NUMEL
    for least in (numel, numel + 1):
        monkeypatch.setattr(discovery, "MIN_TAIL_NUMEL", least)
        assert ("tail" in _units(_Net())) == (least == numel)
    assert list(_units(nn.Linear(WIDTH, VOCAB))) == [""]


class _Waited:
    def __init__(self, work, log, what):
        self._work, self._log, self._what = work, log, what

    def __getattr__(self, name):
        return getattr(self._work, name)

    def wait(self):
        self._log.append(f"waited for {self._what}")
        self._work.wait()


class _Logging:
    def __init__(self, native, log):
        self.native, self.log = native, log

    def _start(self, what, work):
        self.log.append(what)
        return _Waited(work, self.log, what)

    def all_gather(self, out, shard, *, unit, version, backward):
        work = self.native.all_gather(out, shard, unit=unit, version=version, backward=backward)
        what = "gather of gradients" if version == EXACT_GRADIENTS else "gather"
        return self._start(f"{what} {unit}", work)

    def reduce_scatter(self, out, full, *, unit):
        work = self.native.reduce_scatter(out, full, unit=unit)
        return self._start(f"reduce {unit}", work)


def _build(ranks, stage, way="plain", *, logs=False, **keys):
    model = _Net(way, 0 if ranks is None else ranks.rank)
    if logs:
        keys["collectives"] = lambda native, **_: _Logging(native, model.log)
    return Case(stage).build(ranks, model, **keys), model


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_the_tail_is_waited_for_behind_the_last_block_and_reduced_behind_the_blocks(ranks, stage):
    engine, model = _build(ranks, stage, logs=True)
    for step in range(2):
        model.log.clear()
        train(engine, [_ids(step, ranks.rank)])
    log = model.log
    assert [entry for entry in log if entry.startswith(("reduce", "backward"))] == [
        *("backward of block 3", "reduce 3"),
        *("backward of block 2", "reduce 2"),
        *("backward of block 1", "reduce 1", "reduce 4", "reduce 0"),
    ]
    if stage == 0:
        return
    before, after = (log[: log.index("block 1")], log[log.index("block 3") :])
    # Before block 1, forward waits only for the root (unit 0) and for block 1 itself (unit 1).
    if stage == 3:
        assert before == [
            *("gather 0", "gather 1", "gather 4", "waited for gather 0"),
            *("waited for gather 1", "gather 2"),
        ]
    else:
        assert before == ["waited for gather 0", "waited for gather 1"]
        assert after[-5:] == [f"gather {unit}" for unit in range(5)]
    assert after[1] == "waited for gather 4"
    assert log.count("gather 4") == log.count("gather 0") == 1


def _launched(log, what):
    return [entry for entry in log if entry.startswith(what)]


def _is_awaited(log, what):
    return f"waited for {what}" in log[log.index(what) :]


@pytest.mark.parametrize(
    ("stage", "accumulation", "num_late"),
    # Backward waits only before it uses memory again: never for gathers of reduced gradients (stage
    # 0) or for reductions at stage 1. At stages 2 and 3 two buffers alternate, so it waits for all
    # reductions but the last two.
    [(0, 1, 4), (0, 2, 4), (1, 1, 4), (2, 1, 2), (3, 1, 2)],
)
@on_ranks(2)
def test_backward_waits_only_for_memory_that_it_uses_again(ranks, stage, accumulation, num_late):
    logged = _Logging(device_collectives(ranks), [])
    case = Case(stage, accumulation=accumulation)
    engine = case.build(ranks, collectives=lambda native, **_: logged)
    for step in range(2):
        logged.log.clear()
        for micro in range(accumulation):
            engine.backward(engine(**batch(step, micro, ranks.rank))["loss"])
            launched = _launched(logged.log, "reduce" if stage else "gather of gradients")
            assert len(launched) == 4 or not stage  # at stage 0 these gathers may start in step()
            assert not any(_is_awaited(logged.log, one) for one in launched[-num_late:])
            engine.step()
        launched = _launched(logged.log, "reduce" if stage else "gather of gradients")
        assert len(launched) == 4
        assert all(_is_awaited(logged.log, one) for one in launched)


class _LoggingTier(MadeTier):
    owns_grads, log, starts = True, [], [0]

    def _unit(self, start):
        return max(i for i, first in enumerate(self.starts) if first <= start)

    def are_params_ready(self, start, stop):
        return False  # as if updates were pending

    def wait_params(self, start, stop):
        self.log.append(f"waited for unit {self._unit(start)}")
        super().wait_params(start, stop)

    def offer_grad(self, start, grad):
        self.log.append(f"offered unit {self._unit(start)}")
        return super().offer_grad(start, grad.clone())


def test_one_rank_waits_for_an_update_and_passes_a_gradient_on_unit_by_unit():
    engine, model = _build(None, 0, state_tier=_LoggingTier.made)
    tier = engine.sharded_state.tier
    tier.starts = sorted(start for start, _ in engine.layout.local_spans(is_sharded=False).values())
    tier.log = model.log
    for step in range(2):
        model.log.clear()
        train(engine, [_ids(step, 0)])
    assert [entry for entry in model.log if entry.startswith(("waited", "block"))] == [
        *("waited for unit 0", "waited for unit 1", "block 1", "waited for unit 2", "block 2"),
        *("waited for unit 3", "block 3", "waited for unit 4"),
    ]
    assert [entry for entry in model.log if entry.startswith(("offered", "backward"))] == [
        *("backward of block 3", "offered unit 3"),
        *("backward of block 2", "offered unit 2"),
        *("backward of block 1", "offered unit 1", "offered unit 4", "offered unit 0"),
    ]


WAYS = [
    *("plain", "read last", "read first", "read from a list", "read now and then"),
    *("after each block", "each rank another head", "without the last block", "recomputed"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_a_tail_that_is_used_at_any_time_follows_ddp(ranks, way, stage):
    top = {"activation_checkpointing": {}} if way == "recomputed" else {}
    check_like_ddp(ranks, lambda: _Net(way, ranks.rank), _ids, Case(stage, top=top), steps=4)


@on_ranks(2)
def test_what_a_forward_left_gathered_is_read_by_one_rank_until_it_changes(ranks):
    engine, model = _build(ranks, 3)

    def fail(module, args):
        raise ValueError("on purpose")

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        engine(_ids(0, ranks.rank))
    handle.remove()
    expected = _Net().head.weight
    if ranks.rank == 0:  # one rank may read, because a read starts no collective
        assert torch.equal(model.head.weight, expected)
    for _ in range(2):
        engine.states.set_full("head.weight", expected.detach() / 2)
        with pytest.raises(RuntimeError, match="stage 3 holds only"):
            model.head.weight.sum()
        engine(_ids(0, ranks.rank))
    train(engine, [_ids(0, ranks.rank)])
    assert engine.skipped_steps == 0


def _train(ranks, way, stage, *, is_compiled=False):
    engine, model = _build(ranks, stage, way)
    if is_compiled:
        for block in model.blocks:
            block.log = None
        model.compile(backend="aot_eager")
    train(engine, [_ids(step, ranks.rank).to(ranks.device) for step in range(3)])
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return values


@pytest.mark.cuda
@alone
def test_a_tail_has_the_bits_of_the_cpu_on_a_device_that_is_late():
    for seed, (way, stage) in enumerate([("read last", 1), ("read from a list", 3)]):
        expected = simulate(_train, 2, way, stage)
        fake_cuda.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        found = simulate_on_devices(_train, 2, way, stage)
        assert_same(found, expected)


@on_processes(2)
def test_a_tail_of_a_model_that_is_compiled_as_a_whole_has_the_same_bits(ranks):
    assert_same(*(_train(ranks, "read last", 3, is_compiled=how) for how in (False, True)))
    assert counters["stats"]["unique_graphs"] >= 1
