"""Quantized frozen parameters, sharded as bytes, with adapters that train as under DDP."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zero_core
from zero_core.checkpoint.files import read_weights
from zero_core.errors import CheckpointError, ConfigError
from zero_core.testing import (
    Case,
    assert_same,
    make_tower,
    on_ranks,
    rows,
    simulate,
    train,
    train_ddp,
)
from zero_core.testing.quantized import (
    Adapted,
    AttachedLinear,
    PackedParam,
    WrappedLinear,
    dequantize,
)

WIDTH = 24


def _x(step, rank):
    return rows(step, rank, WIDTH)


def _build(ranks=None, stage=3, model=None, **further):
    return Case(stage, **further).build(ranks, model or Adapted(WIDTH))


def _bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _assert_same_base(model, expected):
    own = dict(model.named_modules())
    for path, module in expected.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.requires_grad or isinstance(module, nn.LayerNorm):
            continue
        reads = [lambda module: module.weight]
        if hasattr(weight, "state"):
            reads += [lambda m: m.weight.state.absmax, lambda m: m.weight.state.inner.values]
        if hasattr(weight, "codes"):
            reads = [lambda m: m.weight.codes, lambda m: m.weight.absmax]
        if hasattr(module, "scale"):
            reads += [lambda module: module.scale]
        for read in reads:
            mine, theirs = read(own[path]), read(module)
            assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
            assert torch.equal(_bytes(mine), _bytes(theirs)), path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("top", [{}, {"activation_checkpointing": {}}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_adapters_on_quantized_weights_follow_ddp_bit_by_bit(ranks, stage, top):
    batches = [_x(step, ranks.rank) for step in range(2)]
    model = Adapted(WIDTH)
    engine = _build(ranks, stage, top=top)
    engine.eval()
    with torch.no_grad():  # each forward repacks weights, which the engine restores
        assert {engine(batches[0]).item() for _ in range(2)} == {model(batches[0]).item()}
    engine.train()
    expected = train_ddp(model, ranks, batches)
    assert train(engine, batches) == expected
    with engine.gathered():
        for found in (engine.module, copy.deepcopy(engine.module)):
            _assert_same_base(found, model)
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert torch.equal(engine.module.get_parameter(name), param), name
    full = engine.full_state_dict()
    assert list(full) == list(model.state_dict())
    assert torch.equal(full["blocks.1.first.weight"].codes, model.blocks[1].first.weight.codes)
    left = engine.unwrap()
    _assert_same_base(left, model)
    assert _build(ranks, stage, left)(batches[0]).item() == model(batches[0]).item()


@on_ranks(2)
def test_two_forwards_before_a_backward_read_each_units_own_bytes(ranks):
    model = Adapted(WIDTH)
    (model(_x(0, 0)) + model(_x(1, 0), is_reversed=True)).backward()
    engine = _build(ranks)
    engine.backward(engine(_x(0, 0)) + engine(_x(1, 0), is_reversed=True))
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert_same(engine.states.get_full(name, "grad"), param.grad)


@on_ranks(2)
def test_a_bf16_configuration_casts_neither_codes_nor_scales(ranks):
    engine = _build(ranks, dtype="bf16")
    block = engine.module.blocks[0]
    assert block.norm.weight.dtype == block.adapter.up.weight.dtype == torch.bfloat16
    with engine.gathered():
        _assert_same_base(engine.module, Adapted(WIDTH))


def test_integers_without_scales_leave_the_weights_beside_them_ordinary():
    module = nn.Linear(4, 4).requires_grad_(False)
    module.head = nn.Linear(4, 4)
    for name, value in (
        ("count", torch.zeros((), dtype=torch.int64)),
        ("places", torch.arange(4).view(1, 4)),
    ):
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    module.register_buffer("tied", module.head.weight)
    Case(3, "bf16").build(model=module)
    assert module.weight.dtype == module.head.weight.dtype == torch.bfloat16
    assert module.count.dtype == module.places.dtype == torch.int64


@on_ranks(2)
def test_shards_are_bytes_and_frozen_parameters_have_neither_gradients_nor_states(ranks):
    config = Case(3).config()
    expected = zero_core.plan(Adapted(WIDTH), config, world_size=2).memory.device
    engine = _build(ranks)
    train(engine, [_x(0, ranks.rank)])
    report = engine.memory_report()
    segments = engine.layout.segments
    num_bytes = sum(s.shard_numel for s in segments if s.is_opaque)
    num_floats = sum(s.shard_numel for s in segments if not s.is_opaque)
    num_trained = sum(s.shard_numel for s in segments if s.is_trainable)
    assert report["parameters"] == expected["parameters"] == num_bytes + 4 * num_floats
    assert report["gradient shards"] == 4 * num_trained
    dense = sum(4 * WIDTH**2 for module in engine.module.modules() if hasattr(module, "weight"))
    assert 2 * num_bytes < dense / 2, "less than half of the unquantized weights"


def test_a_weight_is_put_back_after_an_error_if_it_was_replaced_over_the_same_memory():
    def replace(module, args):
        state = module.weight.state
        module.weight = torch.Tensor._make_subclass(PackedParam, module.weight.data, False)
        module.weight.state = state
        raise LookupError("of the forward")

    engine = _build(stage=0)
    module = engine.module.blocks[1].last
    weight = module.weight
    handle = module.register_forward_pre_hook(replace)
    with pytest.raises(LookupError, match="of the forward"):
        engine(_x(0, 0))
    handle.remove()
    assert module.weight is weight
    assert engine(_x(0, 0)).item() == Adapted(WIDTH)(_x(0, 0)).item()
    module.weight = merged = PackedParam.of(torch.ones(WIDTH, WIDTH))
    with torch.no_grad():
        engine(_x(0, 0))  # must keep the newly assigned weight
    assert module.weight is merged


@on_ranks(2)
def test_components_are_gathered_and_edited_with_their_parameter(ranks):
    engine = _build(ranks)
    weight = engine.module.blocks[1].last.weight
    with engine.gathered(params=[weight], modifier_rank=0):
        if ranks.rank == 0:
            weight.fill_(7)
            weight.state.absmax.fill_(2.0)
    with engine.gathered(params=[weight]):
        assert bool((weight == 7).all())
        assert bool((weight.state.absmax == 2.0).all())
        with torch.no_grad():
            dense = dequantize(weight, weight.state.absmax, weight.state.inner.values, (24, 24))
        assert torch.isfinite(dense).all()
    assert torch.equal(
        engine.states.get_full("blocks.1.last.weight.state.absmax"),
        weight.state.absmax.new_full((72,), 2.0),
    )


@on_ranks(2)
def test_a_checkpoint_holds_the_components(ranks, tmp_path):
    engine = _build(ranks)
    train(engine, [_x(0, ranks.rank)])
    engine.save_checkpoint(tmp_path)
    expected = engine(_x(1, 0)).item()
    other = Adapted(WIDTH)
    for block in other.blocks:
        block.last.weight.data.zero_()
        block.second.scale.data.zero_()
    resumed = _build(ranks, 2, other)
    resumed.load_checkpoint(tmp_path)
    assert resumed(_x(1, 0)).item() == expected
    offset = "inlet.weight.state.offset"
    assert [w.value.shape for w in read_weights(tmp_path) if offset in w.names] == [()]


@on_ranks(2)
def test_an_export_has_the_bytes_and_refuses_tensor_subclasses_by_name(ranks, tmp_path):
    engine = _build(ranks)
    with pytest.raises(CheckpointError, match=r"outlet\.weight is a WrappedCodes"):
        engine.export_safetensors(tmp_path)
    model = Adapted(WIDTH)
    model.outlet = nn.Identity()
    for block in model.blocks:
        block.first = nn.Identity()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _build(ranks, 3, model).export_safetensors(tmp_path)
    found = load_file(f"{tmp_path}/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(_bytes(found[name]), _bytes(tensor)), name


def test_a_trained_tensor_subclass_is_refused_by_name():
    model = Adapted(WIDTH)
    model.blocks[2].first.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"blocks\.2\.first\.weight is a .*WrappedCodes"):
        Case(0).build(model=model)


def test_replaced_memory_of_a_component_is_refused_by_name():
    engine = _build(stage=0)
    state = engine.module.blocks[0].last.weight.state
    state.absmax.data = state.absmax.data.clone()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.last\.weight\.state\.absmax was given"):
        engine(_x(0, 0))


def _quantize(block):
    for name, kind in (("0", WrappedLinear), ("3", AttachedLinear)):
        setattr(block, name, kind(getattr(block, name).weight))


def _deferred():
    with zero_core.deferred_init():
        return make_tower(3, WIDTH)


def _loaded(ranks, folder, models):
    model = models[ranks.rank]
    zero_core.quantize_blocks(model, _quantize, pretrained=folder, process_group=ranks)
    # The weights are sharded, so a read of their scales gives NaN.
    assert bool(model.blocks[1][3].weight.state.absmax.isnan().all())
    model.adapter = nn.Linear(WIDTH, WIDTH)
    engine = _build(ranks, 3, model)
    return engine(_x(0, 0)).item()


def test_blocks_on_the_meta_device_without_a_source_of_values_are_refused_by_name():
    with torch.device("meta"):
        model = make_tower(3, WIDTH)
    with pytest.raises(
        ConfigError, match=r"blocks\.0\.0\.weight is on the meta device and its val"
    ):
        zero_core.quantize_blocks(model, _quantize)


@pytest.mark.parametrize("has_file", [False, True])
def test_blocks_quantized_one_at_a_time_have_the_values_of_a_whole_model(tmp_path, has_file):
    model = make_tower(3, WIDTH)
    if has_file:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    for block in model.blocks:
        _quantize(block)
    for world_size in (1, 3):
        # Make the models before the ranks start, because deferred_init() sets global hooks.
        models = [_deferred() for _ in range(world_size)]
        found = simulate(_loaded, world_size, str(tmp_path) if has_file else None, models)
        assert set(found) == {model(_x(0, 0)).item()}
