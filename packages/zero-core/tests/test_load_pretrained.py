"""Weights loaded from safetensors: byte ranges that each rank reads, and refused files."""

import json
import threading
from collections import Counter

import pytest
import torch
from safetensors.torch import _TYPES, save_file
from torch import nn

import zero_core
from zero_core.checkpoint import safetensors_files as weight_files
from zero_core.testing import Case, Hard, assert_same, batch, simulate, train_steps


class Model(Hard):
    """A model with buffers. The buffer ``scale`` is not persistent, so no file holds it."""

    base_model_prefix = "base"

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.arange(4).float().cos(), persistent=False)


def _source(seed=1):
    torch.manual_seed(seed)
    model = Model()
    for param in model.parameters():
        nn.init.normal_(param)
    model.seen.normal_()
    model.count.fill_(7)
    return model


def _weights(model):
    state = model.state_dict()
    del state["embed.weight"]
    return {name: value.clone() for name, value in state.items()}


def _write_folder(folder, weights):
    folder.mkdir()
    where = {}
    for index in range(3):
        part = dict(list(weights.items())[index::3])
        name = f"model-{index + 1:05d}-of-00003.safetensors"
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def _fresh(how):
    torch.manual_seed(2)
    if how == "meta":
        with torch.device("meta"):
            model = Model()
        model.scale = torch.arange(4).float().cos()
    elif how == "deferred":
        with zero_core.deferred_init():
            model = Model()
    else:
        model = Model()
    model.frozen.requires_grad_(False)
    return model


def _load(ranks, case, how, folder, model, source):
    want = {name: value.float() for name, value in source.state_dict().items()}
    rounded = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    config = case.config()
    if how == "real":
        engine = zero_core.build(model, config, process_group=ranks)
        assert zero_core.load_pretrained(engine, folder) == zero_core.Loaded((), ())
    else:
        engine = zero_core.build(model, config, pretrained=folder, process_group=ranks)
    # Master weights are the file's values. Frozen values and ``seen`` have the compute dtype.
    for name, value in engine.full_state_dict(dtype=torch.float32).items():
        is_rounded = "frozen" in name or name == "seen"
        expected = want[name].to(rounded).float() if is_rounded else want[name]
        assert torch.equal(value.float(), expected), name
    assert torch.equal(model.scale, torch.arange(4).float().cos().to(rounded))
    with engine.gathered(), torch.no_grad():
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, want[name].to(rounded)), name
    engine(**batch(0, 0, ranks.rank))
    engine.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["real", "deferred", "meta"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_values_of_the_files_are_in_masters_parameters_and_buffers(
    tmp_path, world_size, stored, compute, stage, how
):
    source = _source().to(torch.bfloat16) if stored == "bf16" else _source()
    folder = _write_folder(tmp_path / "weights", _weights(source))
    # Make the models before the simulated ranks start, because deferred_init() sets global hooks.
    models = [_fresh(how) for _ in range(world_size)]

    def load(ranks):
        _load(ranks, Case(stage, compute), how, folder, models[ranks.rank], source)

    simulate(load, world_size)


def _engine():
    return Case().build(model=_fresh("real"))


def _is_untouched(engine):
    want = _fresh("real").state_dict()
    return all(torch.equal(v, want[n]) for n, v in engine.full_state_dict().items())


@pytest.mark.parametrize("is_in_files", [True, False])
def test_the_base_models_prefix_may_be_there_or_not(tmp_path, is_in_files):
    inner, whole = nn.Linear(3, 2), nn.ModuleDict({"base": nn.Linear(3, 2)})
    source, target = (whole, inner) if is_in_files else (inner, whole)
    target.base_model_prefix = "base"
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    full = Case().build(model=target, pretrained=tmp_path).full_state_dict()
    assert_same([*full.values()], [*source.state_dict().values()])


def test_missing_and_unexpected_names_are_listed_and_nothing_changes(tmp_path):
    weights = _weights(_source())
    del weights["gain"], weights["seen"]
    save_file(weights | {"extra": torch.ones(1)}, tmp_path / "model.safetensors")
    engine = _engine()
    with pytest.raises(
        zero_core.CheckpointError,
        match=r"missing \[gain, seen\], unexpected \[extra\].*strict=False",
    ):
        zero_core.load_pretrained(engine, tmp_path)
    assert _is_untouched(engine)
    loaded = zero_core.load_pretrained(engine, tmp_path, strict=False)
    assert loaded == zero_core.Loaded(("gain", "seen"), ("extra",))
    full = engine.full_state_dict()
    assert torch.equal(full["gain"], torch.ones(1))
    assert torch.equal(full["embed.weight"], _source().embed.weight)
    model = _fresh("real")
    model._keys_to_ignore_on_load_missing = [r"^(gain|seen)$"]
    model._keys_to_ignore_on_load_unexpected = [r"ext.a"]
    loaded = zero_core.load_pretrained(Case().build(model=model), tmp_path)
    assert loaded == zero_core.Loaded((), ())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gain", torch.ones(2), r"gain has shape \(2,\) in .* and \(1,\) in the model"),
        ("gain", torch.ones(1, dtype=torch.int8), "gain is torch.int8 .* dequantized"),
        ("gain", torch.ones(1).to(torch.float8_e4m3fn), "gain is torch.float8.* dequantized"),
        ("base.gain", torch.ones(1), "hold gain twice, with 'base.' and without"),
        ("embed.weight", torch.ones(37, 11), r"are one weight in the model and two in the files"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path, name, value, message):
    save_file(_weights(_source()) | {name: value}, tmp_path / "model.safetensors")
    engine = _engine()
    with pytest.raises(zero_core.CheckpointError, match=message):
        zero_core.load_pretrained(engine, tmp_path)
    assert _is_untouched(engine)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-3]), "not a whole safetensors file"),
        (lambda p: p.write_bytes(b"\xff" * 40), "not a whole safetensors file"),
        (lambda p: torch.save({}, p), "is a zip archive, as torch.save writes"),
        (lambda p: p.unlink(), "there is no file"),
        (
            lambda p: [f.rename(f.with_suffix(".bin")) for f in p.parent.glob("*")],
            r"but \['model-00001-of-00003.bin'",
        ),
        (
            lambda p: next(p.parent.glob("*.json")).write_text('{"weight_map": {"a": "../b"}}'),
            "outside its folder",
        ),
    ],
)
def test_a_damaged_folder_is_refused_before_anything_changes(tmp_path, damage, message):
    folder = _write_folder(tmp_path / "weights", _weights(_source()))
    damage(folder / "model-00002-of-00003.safetensors")
    engine = _engine()
    with pytest.raises(zero_core.CheckpointError, match=message):
        zero_core.load_pretrained(engine, folder)
    assert _is_untouched(engine)


def test_several_files_are_read_as_one_and_none_has_a_tensor_of_another(tmp_path):
    tied = _source().embed.weight.detach()
    weights = list((_weights(_source()) | {"embed.weight": tied}).items())
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    engine = _engine()
    save_file(dict(weights[:6]), files[0])
    save_file(dict(weights[5:]), files[1])
    with pytest.raises(zero_core.CheckpointError, match=r"is in .*a.safetensors and in .*b.safe"):
        zero_core.load_pretrained(engine, files)
    save_file(dict(weights[6:]), files[1])
    zero_core.load_pretrained(engine, files)
    found = engine.full_state_dict()
    assert torch.equal(found["gain"], _source().gain)
    assert torch.equal(found["head.weight"], tied)


def test_an_engine_that_has_stepped_is_refused(tmp_path):
    engine = _engine()
    train_steps(engine, 0, 1)
    with pytest.raises(zero_core.CheckpointError, match="after 1 micro-steps"):
        zero_core.load_pretrained(engine, tmp_path)


def test_pretrained_weights_do_not_fill_a_meta_buffer_that_no_file_holds(tmp_path):
    save_file(_weights(_source()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(zero_core.ConfigError, match="scale is on the meta device"):
        Case().build(model=model, pretrained=tmp_path)


def test_a_build_that_fails_after_the_load_says_that_the_model_has_the_files_values(
    tmp_path, monkeypatch
):
    source, models = _source(), [_fresh("real") for _ in range(2)]
    _write_folder(tmp_path / "files", _weights(source))
    monkeypatch.setattr(zero_core.Engine, "publish", lambda engine: 1 / 0)

    def build(ranks):
        with pytest.raises(ZeroDivisionError) as caught:
            Case(3).build(ranks, models[ranks.rank], pretrained=tmp_path / "files")
        assert "have the values of the pretrained files already" in str(caught.value.__notes__)
        assert_same(list(models[ranks.rank].parameters()), list(source.parameters()))

    simulate(build, 2)


def test_what_fails_on_one_rank_fails_on_all(tmp_path):
    weights = _weights(_source())
    whole = _write_folder(tmp_path / "whole", weights)
    damaged = _write_folder(tmp_path / "damaged", weights) / "model-00001-of-00003.safetensors"
    damaged.write_bytes((whole / damaged.name).read_bytes()[:-1])
    wider = {n: v.double() if v.is_floating_point() else v for n, v in weights.items()}
    _write_folder(tmp_path / "other", wider)
    models = [_fresh("real") for _ in range(2)]

    def load(ranks):
        engine = Case(3).build(ranks, models[ranks.rank])
        before = engine.full_state_dict()
        for other, told in (("damaged", "failed on rank 1"), ("other", "ranks see different file")):
            with pytest.raises(zero_core.CheckpointError, match=told):
                zero_core.load_pretrained(engine, tmp_path / (other if ranks.rank else "whole"))
            assert_same(engine.full_state_dict(), before)

    simulate(load, 2)


def test_a_rank_reads_no_more_than_its_shards(tmp_path, monkeypatch):
    save_file(_weights(_source()), tmp_path / "model.safetensors")
    models, read_range = [_fresh("real") for _ in range(3)], weight_files.StoredTensor.read
    read = Counter()

    def counted(tensor, first, last):
        read[threading.current_thread().name] += last - first
        return read_range(tensor, first, last)

    def load(ranks):
        engine = Case(stage=3).build(ranks, models[ranks.rank])
        zero_core.load_pretrained(engine, tmp_path / "model.safetensors")
        shards = sum(flat.segment.shard_numel for flat in engine.sharded_state.params)
        buffers = 4
        assert 0 < read[threading.current_thread().name] <= shards + buffers

    monkeypatch.setattr(weight_files.StoredTensor, "read", counted)
    simulate(load, 3)


def test_a_range_of_every_dtype_is_read_as_it_was_written(tmp_path):
    values = torch.arange(12).remainder(2)  # 0 and 1 exist in every dtype
    kinds = set(_TYPES.values())
    save_file({str(kind): values.view(3, 4).to(kind) for kind in kinds}, tmp_path / "all")
    stored = weight_files.read_header(tmp_path / "all")
    assert {tensor.dtype for tensor in stored.values()} == kinds
    for tensor in stored.values():
        assert tensor.value().shape == (3, 4)
        assert torch.equal(tensor.value().flatten().to(torch.complex64), values.to(torch.complex64))
        assert torch.equal(tensor.read(1, 3).to(torch.complex64), values[1:3].to(torch.complex64))
