"""zero.GatheredParameters with and without an engine, and the ``ds_`` attributes of parameters."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import _CheckpointFrame, checkpoint
from zero_engine.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

import zero_core
from tests.support.facade import check_values, config, make, run_each, square, update
from zero_core.step.param_grads import TrainedParameter
from zero_core.testing import LR, spawn
from zero_engine import deepspeed
from zero_engine.deepspeed import NotServedError, initialize, zero
from zero_engine.deepspeed.zero.partition_parameters import ShardedParameter, is_zero_param


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3, bias=False))


def _config(stage: int) -> dict[str, Any]:
    return config(stage, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 0.1}})


def _before_the_engine(rank: int, world_size: int) -> None:
    with zero.Init(config_dict_or_path=_config(3)):
        inner = nn.Linear(2, 2)
        with zero.Init():
            model = _model()
        assert not is_zero_param(inner.weight)
    params = [*model.parameters(), *inner.parameters()]
    assert all(map(is_zero_param, params))
    assert len({p.ds_id for p in params}) == len(params)
    weight = model[0].weight
    assert (weight.ds_shape, weight.ds_numel) == (torch.Size([7, 5]), 35)
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    source = world_size - 1
    with zero.GatheredParameters(model[0].parameters(), modifier_rank=source):
        assert weight.ds_status == zero.ZeroParamStatus.AVAILABLE
        # The dtype is the config's, as in DeepSpeed.
        assert torch.equal(weight, _model()[0].weight.bfloat16())
        if rank == source:
            nn.init.constant_(weight, 2.0)
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters(weight, enabled=False):
        assert weight.isnan().all()
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full((7, 5), 2.0, dtype=torch.bfloat16))
    whole = nn.Linear(3, 3)
    value = whole.weight.detach().clone()
    zero.Init(module=whole, dtype=torch.bfloat16)
    with zero.GatheredParameters({whole.weight, whole.bias}):
        if rank == 0:
            assert torch.equal(whole.weight, value.bfloat16())


def _parts_before_the_engine(rank: int, world_size: int) -> None:
    hpz = {**_config(3), "zero_optimization": {"stage": 3, "zero_hpz_partition_size": world_size}}
    with zero.Init(config_dict_or_path=hpz), zero.Init(config_dict_or_path=hpz):
        layer = nn.Linear(4, 3)
        nn.init.constant_(layer.weight, 1.0 + rank)
    part = layer.weight.ds_tensor
    assert (part.numel(), part.dtype) == (-(-12 // world_size), torch.bfloat16)
    assert part.sum() == min(part.numel(), 12 - rank * part.numel()), "rank 0's values"
    assert layer.weight.ds_tensor.device.type == "cpu"
    group = layer.weight.ds_zero_param_process_group
    assert (group is None) == (world_size == 1)
    if group is not None:
        assert torch.distributed.get_world_size(group) == world_size
    alone = torch.distributed.new_subgroups(1)[0]
    for given, ranks in (({}, None), ({"zero_optimization": None}, None), (hpz, alone)):
        with zero.Init(config_dict_or_path=given, data_parallel_group=ranks):
            layer = nn.Linear(4, 3)
        assert layer.weight.ds_zero_param_process_group is None


def _inside_init(rank: int, world_size: int) -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with zero.GatheredParameters(self.linear.weight, modifier_rank=0):
                self.linear = nn.utils.parametrizations.weight_norm(self.linear)
            zero.register_external_parameter(self, self.linear.bias)

    torch.manual_seed(1)
    expected = Normalised()
    torch.manual_seed(1)
    with zero.Init():
        model = Normalised()
    with zero.GatheredParameters(model.parameters()):
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    with zero.Init(), pytest.raises(NotServedError, match=r"leave zero\.Init first"):
        zero.GatheredParameters(model.parameters()).__enter__()


def _on_other_things(rank: int, world_size: int) -> None:
    plain, buffer = nn.Parameter(torch.ones(2)), torch.ones(2)
    for given in ([], None, plain, [None, plain, buffer], iter([plain])):
        with zero.GatheredParameters(given, modifier_rank=0):
            assert torch.equal(plain, torch.ones(2))
    with zero.Init(enabled=False):
        assert not nn.Linear(2, 2).weight.isnan().any()
    with pytest.raises(NotServedError, match="param_swapper"):
        zero.Init(param_swapper=object())


class _Reader(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.__dict__["other"] = other
        zero.register_external_parameter(self, other.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.__dict__["other"].weight


def _read_elsewhere(rank: int, world_size: int) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        first = nn.Linear(4, 4)
        made.append(nn.Sequential(first, _Reader(first)))
    model, expected = made
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    engine = zero_core.build(model, {**_config(3), "bf16": {"enabled": False}})
    for _ in range(2):
        loss, wanted = square(engine, x), square(expected, x)
        torch.testing.assert_close(loss, wanted)
        engine.backward(loss)
        engine.step()
        wanted.backward()
        update(optimizer)
    with pytest.raises(NotServedError, match="after initialize"):
        zero.register_external_parameter(model[0], model[1].own.weight)
    engine.close()


class _Own(nn.Parameter):
    pass


def _what_scripts_ask(rank: int, world_size: int) -> None:
    here = zero.ZeroParamStatus.AVAILABLE
    model = _model()
    model[1].bias = _Own(model[1].bias.detach())
    settings = _config(3)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = initialize(model=model, config=settings)[0]
    weight, own = engine.module[1].weight, engine.module[1].bias
    assert isinstance(own, _Own)
    seen: list[Any] = []
    handles = [
        engine.module[1].register_forward_pre_hook(lambda *_: seen.append(weight.ds_status)),
        engine.module[1].register_forward_hook(lambda *_: seen.append(own.ds_status)),
    ]
    engine.backward(engine(torch.ones(1, 5).bfloat16()).float().mean())
    with pytest.raises(RuntimeError, match=r"param\.grad is None at stages 1 to 3"):
        weight.grad = torch.zeros(7, 7, dtype=torch.bfloat16)
    engine.step()
    assert seen == [here] * 2
    for handle in handles:
        handle.remove()
    assert (weight.ds_status == here) == (world_size == 1)  # the only rank's shard is complete
    with zero.GatheredParameters(weight):
        assert weight.ds_status == here
        whole = weight.detach().clone()
    rows = [torch.empty(0)] * world_size
    parts = weight.ds_tensor
    assert parts.dtype == torch.bfloat16
    if world_size > 1:
        torch.distributed.all_gather_object(rows, parts)
    else:
        rows = [parts]
    assert torch.equal(torch.cat(rows), whole.flatten())
    assert (weight.ds_shape, weight.ds_numel) == (torch.Size([7, 7]), 49)
    assert (own.ds_status == here) == (world_size == 1)
    assert own.partition_numel() == own.ds_tensor.numel()
    assert own.ds_tensor.dtype == torch.bfloat16
    if world_size > 1:
        _refusals_name_deepspeeds_calls(weight)
        engine.module.to(engine.device)  # nothing to move
    with zero.GatheredParameters(engine.module.parameters()):
        assert own.ds_status == here
        copied = copy.deepcopy(engine.module)
    assert {type(p) for p in copied.parameters()} == {nn.Parameter, _Own}
    assert not hasattr(copied[1].bias, "ds_status")
    engine.destroy()
    assert own.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    assert not hasattr(own, "ds_tensor")
    assert is_zero_param(weight)
    assert not isinstance(weight, ShardedParameter)
    assert "ds_tensor" not in vars(_Own)
    assert not hasattr(TrainedParameter, "ds_tensor")
    assert "ds_external_parameters" not in vars(model)
    if world_size == 1:
        assert len(pickle.loads(pickle.dumps(model))) == len(model)


def _refusals_name_deepspeeds_calls(weight: nn.Parameter) -> None:
    reads = r"1\.weight was read.*zero\.GatheredParameters.*zero\.register_external_parameter"
    with pytest.raises(RuntimeError, match=reads):
        weight.norm()
    writes = r"1\.weight was written.*zero\.GatheredParameters.*modifier_rank="
    with torch.no_grad(), pytest.raises(RuntimeError, match=writes):
        weight.zero_()
    lost = r"1\.weight changed within deepspeed\.zero\..* would be lost.*modifier_rank="
    with torch.no_grad(), pytest.raises(RuntimeError, match=lost), zero.GatheredParameters(weight):
        weight.add_(1.0)
    assert torch.zeros_like(weight).shape == weight.shape  # needs no values
    assert weight.to(weight.device, weight.dtype) is weight


def _edits_that_would_be_lost(rank: int, world_size: int) -> None:
    settings = _config(3)
    settings["zero_optimization"]["enable_sanity_checks"] = True
    with zero.Init(config_dict_or_path=settings):
        model = _model()
    for makes_engine in (False, True):
        engine = initialize(model=model, config=settings)[0] if makes_engine else None
        weight = model[1].weight
        with zero.GatheredParameters(weight), torch.no_grad():
            weight.sum()
        gathered = zero.GatheredParameters(weight)
        gathered.__enter__()
        if rank == world_size - 1:
            nn.init.ones_(weight)
        with pytest.raises(RuntimeError, match=r"in-place modification.*give modifier_rank"):
            gathered.__exit__(None, None, None)
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.add_(1.0)
        if engine is not None:
            engine.destroy()


def _engine_within_init(rank: int, world_size: int) -> None:
    with zero.Init():
        with pytest.raises(ValueError, match="hybrid_engine"):
            initialize(model=_model(), config={**_config(3), "hybrid_engine": {"enabled": True}})
        later = nn.Linear(2, 2)
    assert is_zero_param(later.weight)
    for stage in (0, 3):
        with zero.Init():
            sgd = {"type": "SGD", "params": {"lr": 0.1}}
            engine = make(_model(), config=config(stage, optimizer=sgd))
            later = nn.Linear(2, 2)
        assert is_zero_param(later.weight)
        engine.backward(engine(torch.ones(1, 5)).mean())
        engine.step()
        expected = _model()
        expected(torch.ones(1, 5)).mean().backward()
        torch.optim.SGD(expected.parameters(), 0.1).step()
        check_values(engine, expected)
        engine.destroy()


def _take_hooks(engine: Any) -> Any:
    """Remove the engine's hooks like TRL's remove_hooks. Return the object that had them."""
    offload = engine.optimizer.parameter_offload
    named = offload.module.named_parameters(recurse=True)
    for _, param in itertools.chain(named, offload.module.ds_external_parameters()):
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []
    return offload


def _generates_without_hooks(rank: int, world_size: int) -> None:
    """Run the model without its hooks, register them again, and train as torch does."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, plain = make(_model(), config=config(3, **sgd)), _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    unwrap = deepspeed.runtime.zero.unwrap_model_for_generation
    x = torch.ones(2, 5)
    for _ in range(3):
        with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
            offload = _take_hooks(engine)
            torch.testing.assert_close(engine.module(x), plain(x))
            offload._register_deepspeed_module(offload.module)
        with unwrap(engine) as unwrapped:
            assert unwrapped is engine
            assert not offload.forward_hooks
            torch.testing.assert_close(engine.module[0].weight.detach(), plain[0].weight.detach())
        assert offload.forward_hooks
        with pytest.raises(ZeroDivisionError), unwrap(engine):
            raise ZeroDivisionError
        assert offload.forward_hooks
        loss, wanted = square(engine, x), square(plain, x)
        torch.testing.assert_close(loss, wanted)
        engine.backward(loss)
        engine.step()
        wanted.backward()
        update(optimizer)
    engine.destroy()
    engine = make(_model(), stage=2)
    assert not hasattr(engine.optimizer, "parameter_offload")
    engine.destroy()


def _whole(ins: int = 7, outs: int = 5) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(ins, outs)


def _copies_shards(rank: int, world_size: int) -> None:
    whole, ones = _whole(6, 5), torch.ones(6)
    with deepspeed.zero.Init():
        layer = _whole(6, 5)
    owned = make(nn.Sequential(nn.Linear(6, 5)), stage=3)
    with deepspeed.zero.GatheredParameters(owned.module.parameters(), modifier_rank=0):
        owned.module[0].load_state_dict(whole.state_dict())
    for source in (layer, owned.module[0]):
        tiled = TiledLinear(6, 5, in_splits=2, out_splits=2, init_linear=source)
        torch.testing.assert_close(tiled(ones), whole(ones))
    with deepspeed.zero.Init():
        sharded = TiledLinear(6, 5, in_splits=3)
    sharded.copy_params_from(layer)
    with deepspeed.zero.GatheredParameters(sharded.parameters()):
        torch.testing.assert_close(sharded(ones), whole(ones))
    owned.destroy()


CHECKS = [
    _before_the_engine,
    _inside_init,
    _on_other_things,
    _parts_before_the_engine,
    _what_scripts_ask,
    _edits_that_would_be_lost,
    _engine_within_init,
    _read_elsewhere,
    _generates_without_hooks,
    _copies_shards,
]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_parameters_are_whole_within_and_changes_stay(world_size: int) -> None:
    spawn(run_each, world_size, CHECKS)


def test_init_that_cannot_begin_leaves_none_active() -> None:
    wrong: Any = "no group"
    with pytest.raises(ValueError, match="not registered"):
        zero.Init(data_parallel_group=wrong).__enter__()
    assert zero.Init._active is None
    with zero.Init():
        made = nn.Linear(2, 2)
    assert is_zero_param(made.weight)


VOCAB = 12_000  # so large that the engine gathers the head separately, as its tail unit
SGD_AT_3 = config(3, optimizer={"type": "SGD", "params": {"lr": LR}})


class _Head(torch.autograd.Function):
    """The function ``hidden @ weight.T + bias``, whose backward reads saved weight and bias."""

    found: list[tuple[Any, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        return torch.addmm(bias, hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias = ctx.saved_tensors
        _look(hidden, weight, bias)
        with zero.GatheredParameters([weight, bias]):
            return grad @ weight, grad.t() @ hidden, grad.sum(0)


def _look(hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Record in ``_Head.found`` the attributes that libraries with DeepSpeed support read."""
    if hasattr(weight, "ds_status"):
        missing = [p for p in (weight, bias) if p.ds_status != zero.ZeroParamStatus.AVAILABLE]
        _Head.found.append((missing, weight.ds_id, weight.ds_shape, bias.ds_numel))
        assert not hasattr(hidden, "ds_id")


def _recomputed_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if torch._C._current_graph_task_id() != -1:  # runs within a backward
        _look(hidden, weight, bias)
    return torch.addmm(bias, hidden, weight.t())


class _Headless(nn.Module):
    """A model that uses its head's weights without calling the head."""

    def __init__(self, *, is_tied: bool, is_recomputed: bool) -> None:
        super().__init__()
        self.is_recomputed = is_recomputed
        self.embed = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, VOCAB)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        with zero.GatheredParameters([self.head.weight, self.head.bias]):
            saved = (hidden, self.head.weight, self.head.bias)
            if self.is_recomputed:
                return checkpoint(_recomputed_head, *saved, use_reentrant=False).square().mean()
            return _Head.apply(*saved).square().mean()


def _trains_saved(rank: int, world_size: int) -> None:
    get_inputs = vars(_CheckpointFrame).get("get_inputs")
    names = set(dir(Tensor))  # torch.compile assumes that every tensor has these attributes
    for is_tied, is_recomputed in itertools.product((True, False), repeat=2):
        torch.manual_seed(0)
        expected = DistributedDataParallel(_Headless(is_tied=is_tied, is_recomputed=is_recomputed))
        optimizer = torch.optim.SGD(expected.parameters(), lr=LR)
        torch.manual_seed(0)
        model = _Headless(is_tied=is_tied, is_recomputed=is_recomputed)
        engine, *_ = deepspeed.initialize(model=model, config=SGD_AT_3)
        assert set(dir(Tensor)) == names
        for step in range(2):
            ids = torch.arange(8) * (step + 2 + rank) % 13
            wanted = expected(ids)
            wanted.backward()
            update(optimizer)
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss, wanted)
        weight = model.head.weight
        assert _Head.found == [([], weight.ds_id, (VOCAB, 6), VOCAB)] * 2
        _Head.found.clear()
        check_values(engine, expected.module, rtol=0, atol=0)
        engine.destroy()
    assert "saved_tensors" not in vars(BackwardCFunction)
    assert vars(_CheckpointFrame).get("get_inputs") is get_inputs
    assert not hasattr(torch.ones(2), "ds_status")
    with pytest.raises(AttributeError, match="has no attribute 'ds_status'"):
        _ = model.head.weight.data.ds_status


def test_a_saved_parameter_has_its_ds_attributes_in_backward() -> None:
    spawn(_trains_saved, 2)


def test_tiles_compute_what_the_whole_layer_does() -> None:
    whole, inputs = _whole(), torch.randn(4, 7)
    expected = whole(inputs)
    for ins, outs in itertools.product((1, 3, 7), (1, 2, 5)):
        tiled = TiledLinear(7, 5, in_splits=ins, out_splits=outs, init_linear=whole)
        torch.testing.assert_close(tiled(inputs), expected)
    split = {"input_is_already_split": True, "combine_out_splits": False}
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=2, **split)
    whole.register_buffer("scale", torch.ones(1))  # layers of other classes may have extra buffers
    tiled.copy_params_from(whole)
    parts = tiled(inputs.split([4, 3], dim=-1))
    assert [part.shape[-1] for part in parts] == [3, 2]
    torch.testing.assert_close(torch.cat(parts, -1), expected)
    with pytest.raises(RuntimeError, match=r"in_splits = 8, expected 1 to 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match="has a bias"):
        TiledLinear(7, 5, bias=False).copy_params_from(whole)


class _Apart(nn.Linear):
    """A layer that returns its bias separately, like Megatron's layers."""

    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


def test_tiles_that_return_their_bias() -> None:
    tiled = TiledLinearReturnBias(7, 5, in_splits=2, out_splits=3, linear_cls=_Apart)
    whole, inputs = _whole(), torch.randn(4, 7)
    tiled.copy_params_from(whole)
    output, bias = tiled(inputs)
    assert (output.shape, bias.shape) == ((4, 5), (5,))
    torch.testing.assert_close(output + bias, whole(inputs))
