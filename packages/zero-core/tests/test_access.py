"""Reads and writes of parameters at any moment use the current value or raise an error."""

import logging
import threading
from contextlib import nullcontext
from types import GetSetDescriptorType

import pytest
import torch
from torch import Tensor, nn

from zero_core import RankMismatchError
from zero_core.core.access import NEEDS_NO_VALUE
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.ranks import spawn
from zero_core.testing.readers import (
    AFTER,
    BEFORE,
    Log,
    Watched,
    check_truth,
    inputs,
    read_everywhere,
)
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import adamw, assert_same, check_like_ddp, step_ddp, train

STEPS = 3
REFUSAL = "parameter blocks.1.inner.weight was read where stage 3 holds only"


def _build(ranks, stage, dtype="fp32"):
    model = Watched()
    return Case(stage, dtype).build(ranks, model), model


def _ddp(ranks):
    model, losses = Watched(), []
    log, ddp = Log(model.blocks[1].inner.weight), SimulatedDDP(model, ranks)
    optimizer = adamw(model)
    for step in range(STEPS):
        log.look(BEFORE)
        losses.append(step_ddp(ddp, optimizer, inputs(step, ranks.rank)))
    log.look(AFTER)
    return log.found, losses


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)])
@on_ranks()
def test_each_reader_has_the_value_of_ddp_or_an_error_at_each_moment(ranks, stage):
    engine, _ = _build(ranks, stage)
    found, losses = read_everywhere(engine, ranks.rank, STEPS)
    here = {"forward of block 1", "forward of block 1, evaluating", BEFORE, AFTER}
    refused = {moment for moment, _ in found} - here if stage == 3 else set()
    check_truth(found, dict.fromkeys(refused, REFUSAL))
    if ranks.size == 2:  # with more ranks DDP sums gradients in another order
        expected, of_ddp = _ddp(ranks)
        assert losses == of_ddp
        for key, value in expected.items():
            assert found[key] == value, key


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_integers_are_no_zeros_where_they_are_not(ranks, stage):
    engine, model = _build(ranks, stage)
    counts = model.blocks[1].counts
    refusal = pytest.raises(RuntimeError, match=r"blocks\.1\.counts was read where stage 3 holds")
    if ranks.rank == 0:  # a read starts no collective, so one rank suffices
        with refusal if stage == 3 else nullcontext():
            assert counts.tolist() == [0, 1, 2]
    with engine.gathered(params=[counts]):
        assert counts.tolist() == [0, 1, 2]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_block_that_reads_a_later_ones_weight_follows_ddp_or_is_refused_by_name(ranks, stage):
    def make():
        model = Watched()
        held, plain = [model.blocks[2].inner.weight], model.blocks[0].forward
        model.blocks[0].forward = lambda x: plain(x) + nn.functional.linear(x, held[0])
        return model

    refusal = pytest.raises(RuntimeError, match=r"blocks\.2\.inner\.weight was read where stage 3")
    with refusal if stage == 3 else nullcontext():
        check_like_ddp(ranks, make, inputs, Case(stage))


def _penalty(weight):
    off = weight @ weight.t() - torch.eye(len(weight))
    return 0.01 * (weight.abs().sum() + off.square().sum())


@pytest.mark.parametrize("where", ["one", "all", "within"])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_penalty_of_gathered_weights_has_torchs_gradient(ranks, stage, where):
    model = Watched()
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    own = Watched()
    top = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = Case(stage, top=top).build(ranks, own)
    weight = own.blocks[1].inner.weight
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp(inputs(step, ranks.rank)) + _penalty(model.blocks[1].inner.weight)
        loss.backward()
        ddp.average_gradients()
        optimizer.step()
        found = engine(inputs(step, ranks.rank))
        with engine.gathered(params=[weight] if where == "one" else None):
            found = found + _penalty(weight)
            if where == "within":
                engine.backward(found)
        if where != "within":
            engine.backward(found)
        engine.step()
        assert found.item() == loss.item()
    with engine.gathered():
        for one, other in zip(model.parameters(), own.parameters(), strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def _clamp(model, way):
    weight = model.blocks[1].inner.weight
    if way == "data":
        weight.data.clamp_(-0.1, 0.1)
    elif way == "in place":
        weight.clamp_(-0.1, 0.1)
    elif way == "state dict":
        state = {k: v.clone() for k, v in model.state_dict().items()}
        state["blocks.1.inner.weight"].clamp_(-0.1, 0.1)
        model.load_state_dict(state)
    elif way == "read":
        weight.data.norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["data", "in place", "state dict", "read"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "bf16"), (2, "fp16"), (2, "fp32")])
@on_ranks(2)
def test_edits_past_the_engine_are_those_within_gathered(ranks, stage, way, dtype):
    found = []
    for own in (True, False):
        engine, model = _build(ranks, stage, dtype)
        for step in range(STEPS):
            train(engine, [inputs(step, ranks.rank)])
            if own:
                _clamp(model, way)
            elif way != "read":
                with engine.gathered(modifier_rank=0):
                    _clamp(model, "data")
        full = engine.full_state_dict(dtype=torch.float32)
        found.append({n: full[n] for n, _ in model.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (2, "fp32"), (2, "bf16")])
@on_ranks(3)
def test_an_edit_of_one_rank_is_refused_by_all_until_it_is_mended(ranks, stage, dtype):
    engine, model = _build(ranks, stage, dtype)
    train(engine, [inputs(0, ranks.rank)])
    if ranks.rank == 1:
        _clamp(model, "in place")
    engine.backward(engine(inputs(1, ranks.rank)))
    with pytest.raises(RankMismatchError, match=r"into blocks\.1\.inner\.weight since the last"):
        engine.step()
    with engine.gathered(modifier_rank=0):  # the error message recommends this call
        pass
    engine.step()
    masters = engine.full_state_dict(dtype=torch.float32)
    for name, param in model.named_parameters():
        if param.is_floating_point():
            assert torch.equal(masters[name].to(param.dtype), param), name


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_write_in_the_units_own_forward_or_into_a_small_parameter_is_kept_or_told(ranks, stage):
    def clamp(module, args):
        with torch.no_grad():
            module.inner.weight.clamp_(-0.05, 0.05)

    engine, model = _build(ranks, stage)
    handle = model.blocks[1].register_forward_pre_hook(clamp)
    engine.backward(engine(inputs(0, ranks.rank)))
    handle.remove()
    if stage < 3:
        engine.step()
        assert engine.full_state_dict()["blocks.1.inner.weight"].abs().max() < 0.07
        return
    with pytest.raises(RuntimeError, match=r"1\.inner\.weight was written where stage 3"):
        engine.step()
    engine, model = _build(ranks, stage)
    engine.keep_small_params()
    engine.publish()
    with torch.no_grad():
        model.blocks[1].inner.bias.clamp_(-0.01, 0.01)
    engine.backward(engine(inputs(0, ranks.rank)))
    with pytest.raises(RuntimeError, match=r"blocks\.1\.inner\.bias was written where stage 3"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_zero_grad_of_the_module_drops_what_another_loss_has_left(ranks, stage):
    trained = []
    for is_left in (True, False):
        engine, model = _build(ranks, stage)
        if is_left:
            (10 * model(inputs(5, ranks.rank))).backward()
            model.zero_grad()
        train(engine, [inputs(0, ranks.rank)])
        trained.append(engine.full_state_dict())
    assert_same(*trained)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")])
@on_ranks(2)
def test_a_backward_of_a_forward_before_the_step_is_refused_as_in_torch(ranks, stage, dtype):
    engine, _ = _build(ranks, stage, dtype)
    old = engine(inputs(0, ranks.rank))
    train(engine, [inputs(1, ranks.rank)])
    with pytest.raises(RuntimeError, match=r"inplace operation|ran before the last step"):
        engine.backward(old)


@on_ranks(2)
def test_threads_read_while_the_engine_steps(ranks):
    engine, model = _build(ranks, 2)
    weight, errors, is_over = model.blocks[1].inner.weight, [], threading.Event()

    def read():
        while not is_over.is_set():
            try:
                weight.detach().clone()
            except RuntimeError as error:
                errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    train(engine, [inputs(step, ranks.rank) for step in range(8)])
    is_over.set()
    for reader in readers:
        reader.join()
    assert not errors


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_an_initialiser_of_torch_writes_or_is_told_what_would_be_lost(ranks, stage):
    engine, model = _build(ranks, stage)
    train(engine, [inputs(0, ranks.rank)])
    weight = model.blocks[1].inner.weight
    if stage == 3:
        with pytest.raises(RuntimeError, match="was written where stage 3 holds only"):
            nn.init.constant_(weight, 0.5)
    else:
        assert nn.init.constant_(weight, 0.5).unique().tolist() == [0.5]


@pytest.mark.parametrize("way", ["data", "in place"])
@pytest.mark.parametrize("where", ["one", "all"])
def test_a_write_that_stage_3_would_lose_is_told(where, way):
    def write(ranks):
        engine, model = _build(ranks, 3)
        weight = model.blocks[1].inner.weight
        with pytest.raises(RuntimeError, match=r"1\.inner\.weight was written where stage 3"):
            _clamp(model, "in place")
        with engine.gathered(params=[weight] if where == "one" else None):
            _clamp(model, way)
        engine(inputs(0, ranks.rank))

    with pytest.raises(RuntimeError, match=r"1\.inner\.weight changed within engine\.gathered"):
        simulate(write, 2)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_names_shapes_and_hooks_neither_wait_nor_raise(ranks, stage):
    model, plain = Watched(), Watched()
    engine = Case(stage).build(ranks, model)
    train(engine, [inputs(0, ranks.rank)])
    closed = [type(p) for p in model.parameters()]
    assert repr(model) == repr(plain)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(param, name) == getattr(other, name)
        assert isinstance(param, nn.Parameter)
        assert param in {param}
        if param.requires_grad:
            param.register_hook(lambda grad: None).remove()
            param.requires_grad_(True)
    model.zero_grad()
    model.to("cpu")
    assert [type(p) for p in model.parameters()] == closed, "nobody has waited"


def test_what_needs_no_value_is_torchs_list_of_what_returns_none_of_it():
    # Functions that run on meta parameters and return no tensor need no value, except ``reads``.
    reads = {"data_ptr", "const_data_ptr", "storage", "untyped_storage", "__repr__", "type"}
    reads |= {"storage_type", "_clear_non_serializable_cached_data", "_is_view"}
    reads.add("has_names")  # torch 2.10 to 2.12
    unknown = []
    for func in torch.overrides.get_overridable_functions()[Tensor]:
        name = getattr(func, "__name__", "")
        if name in reads or func in NEEDS_NO_VALUE:
            continue
        try:
            found = func(nn.Parameter(torch.empty(2, 2, device="meta")))
        except Exception:
            continue
        if not isinstance(found, Tensor | tuple | list | type(NotImplemented)):
            unknown.append(name)
    assert not unknown
    properties = vars(torch._C.TensorBase).items()
    values = {n for n, p in properties if isinstance(p, GetSetDescriptorType)}
    assert {n for n in values if getattr(Tensor, n).__get__ not in NEEDS_NO_VALUE} == {
        *("data", "T", "mT", "H", "mH", "real", "imag")
    }


def _warns(ranks, stage):
    engine, model = _build(ranks, stage)
    for step in range(2):
        model.zero_grad()
        engine.backward(engine(inputs(step, ranks.rank)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain, held = Watched().outlet.weight, [model.outlet.weight]
        for whole in (nullcontext(), engine.gathered(), engine.gathered(params=held)):
            with whole, pytest.raises(RuntimeError, match=r"engine\.states"):
                model.outlet.weight.grad = torch.zeros_like(plain)
        assert plain.grad is None
        engine.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_clipping_which_clips_nothing_is_told_once(stage, caplog):
    with caplog.at_level(logging.WARNING):
        simulate(_warns, 2, stage)
    told = [r for r in caplog.records if "clips nothing" in r.getMessage()]
    assert len(told) == 2


class _Kernel(torch.autograd.Function):
    """Reads a weight as compiled extensions do: without torch's dispatch of functions."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch._C.DisableTorchFunction():
            weight = weight.detach().clone()
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class _Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x):
        return _Kernel.apply(x, self.weight)


class _Keeping(_Kernel):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.saved = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved[1].T, ctx.saved[0].T @ grad


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = _Part(), _Part()

    def forward(self, x):
        return self.second(self.first(x))


class _OfParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block.second(block.first(x))
        return x.square().mean()


def _trains_parts(rank, world_size):
    model, seeded = _OfParts(), torch.Generator().manual_seed(0)  # the same samples on both ranks
    batches = [{"x": torch.randn(4, 64, generator=seeded)} for _ in range(STEPS)]
    expected, optimizer = [], adamw(model)
    for given in batches:
        loss = model(**given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for stage in (1, 2, 3):
        engine = Case(stage).build(None, _OfParts())
        assert train(engine, batches) == expected, stage


def test_a_part_that_is_called_alone_waits_for_its_values():
    spawn(_trains_parts, 2)


@on_ranks(2)
def test_what_stage_3_cannot_compute_is_refused_with_the_cure(ranks):
    x = torch.ones(4, 64)
    engine = Case(3).build(ranks, _OfParts())
    blocks = engine.module.blocks
    blocks[0].second.forward = lambda x: _Keeping.apply(x, blocks[0].second.weight)
    loss = engine(x)
    with pytest.raises(RuntimeError, match=r"blocks\.\d\..*save it by ctx.save_for_backward"):
        engine.backward(loss)
    blocks[2].first.forward = torch.func.grad(lambda x: (x @ blocks[2].first.weight).sum())
    with pytest.raises(RuntimeError, match="saved tensor hooks") as error:
        engine(x)
    assert "use torch.autograd.grad" in error.value.__notes__[0]
