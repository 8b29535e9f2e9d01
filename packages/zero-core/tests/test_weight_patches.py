"""Weight patches, which make a receiver's weights bit-identical to the engine's."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import zero_core
from zero_core.sharded.changes import (
    Form,
    Kind,
    ShardChanges,
    compare,
    decode,
    decode_gaps,
    encode,
    encode_gaps,
    from_low_bits,
    pack_bits,
    to_low_bits,
    unpack_bits,
)
from zero_core.testing import Case, assert_same, make_model, on_ranks, seeded, simulate, train_steps

PATCHES = {"weight_patches": {"versions": 8}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _case(stage, dtype, lr=1e-5, **zero):
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return Case(stage, dtype, zero=zero, top={**PATCHES, "optimizer": optimizer})


def _bits(value):
    return value.reshape(-1).view(torch.uint8)


def _assert_same(engine, receiver):
    """Compare the weights on rank 0. All ranks must call it."""
    found = receiver.state_dict()
    for name, value in engine.full_state_dict(rank=0).items():
        assert found[name].dtype == value.dtype
        assert torch.equal(_bits(found[name]), _bits(value)), name


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"),
    [(1, 0, "fp32"), (2, 1, "bf16"), (2, 2, "fp16"), (1, 3, "bf16"), (3, 3, "fp32")],
)
@on_ranks()
def test_a_receiver_follows_every_version(ranks, tmp_path, stage, dtype):
    steps = 11
    engine = _case(stage, dtype).build(ranks)
    # The first receiver gets all versions, the second every fifth.
    receivers = [make_model().to(DTYPES[dtype]) for _ in range(2)]
    versions = [0, 0]
    for step in range(steps):
        train_steps(engine, step, step + 1)
        if step == steps // 3:
            engine.save_checkpoint(tmp_path)
        if step == steps // 2:
            engine.load_checkpoint(tmp_path)
        if step == steps // 2 + 2:
            for name in ("embed.weight", "frozen.0.up.weight"):
                param = engine.module.get_parameter(name)
                with engine.gathered(params=[param], modifier_rank=0):
                    if ranks.rank == 0:
                        param.data[0] = 2.0
        for number in range(1 if step % 5 else 2):
            patch = engine.weight_patch(since=versions[number])
            versions[number] = patch.version
            if ranks.rank == 0:
                known = None if step else 0
                zero_core.apply_patch(receivers[number], patch, version=known)
        if step % 5 == 0:
            for receiver in receivers:
                _assert_same(engine, receiver)
    assert versions[0] == engine.patch_version
    assert engine.patch_version >= steps - engine.skipped_steps


def _mlp(seed=0, width=128):
    with seeded(seed):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
    return model


def _mlp_config(stage, **top):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}}
    return Case(stage, "bf16", top={"optimizer": optimizer, **PATCHES, **top}).config()


def _build_mlp(ranks, stage, width=128, **top):
    return zero_core.build(_mlp(0, width), _mlp_config(stage, **top), process_group=ranks)


def _train(engine, steps=1, width=128):
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps + 100 * engine.rank)
        x = torch.randn(4, width, generator=generator)
        engine.backward(engine(x).float().sub(1.0).square().mean())
        engine.step()


@on_ranks(2)
def test_a_patch_is_small_at_a_small_rate(ranks):
    engine = _build_mlp(ranks, 3, 512)
    whole = sum(2 * p.numel() for p in _mlp(0, 512).parameters())
    shares = []
    for _ in range(5):
        _train(engine, width=512)
        shares.append(engine.weight_patch(since=engine.patch_version).nbytes / whole)
    held = engine.memory_report()["weight patches"]
    assert 0 < held < 0.15 * whole / ranks.size
    # Bytes per element in the plan: 1/4 for marks, 1/2 for pinned memory of marks from a device
    # (1/4, rounded up to a power of two), 5/32 for each of eight versions.
    most, bounded = (
        zero_core.plan(_mlp(0, 512), _mlp_config(3, **more), ranks.size).memory.host
        for more in ({}, {"weight_patches": {"versions": 8, "max_bytes": 1000}})
    )
    numel = whole / 2 / ranks.size
    assert most["weight patches"] == pytest.approx(numel * (1 / 4 + 1 / 2 + 8 * 5 / 32), rel=0.1)
    assert held <= most["weight patches"]
    assert bounded["weight patches"] < numel * 0.8
    if ranks.rank == 0:
        assert shares[0] < 0.04
        assert sum(shares) / len(shares) < 0.03


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_receiver_that_is_too_far_behind_takes_all(ranks):
    engine = _build_mlp(ranks, 2, weight_patches={"versions": 2})
    for _ in range(3):
        _train(engine)
        patch = engine.weight_patch(since=engine.patch_version)
    assert patch.version == engine.patch_version == 3
    with pytest.raises(zero_core.PatchGapError, match="known since version 1 alone"):
        engine.weight_patch(since=0)
    with pytest.raises(ValueError, match="the newest version is 3"):
        engine.weight_patch(since=4)
    if ranks.size > 1:
        with pytest.raises(ValueError, match="differs between ranks"):
            engine.weight_patch(since=9 * ranks.rank)
    assert engine.weight_patch(since=3).version == 3
    late = engine.weight_patch(since=1)
    whole = engine.weight_patch()
    if ranks.rank != 0:
        assert whole.source is None
        return
    receiver = _mlp(1).bfloat16()
    with pytest.raises(zero_core.CheckpointError, match="not known"):
        zero_core.apply_patch(receiver, late)
    with pytest.raises(zero_core.PatchGapError, match=r"weight_patch\(since=0\)"):
        zero_core.apply_patch(receiver, late, version=0)
    with pytest.raises(zero_core.CheckpointError, match="newer"):
        zero_core.apply_patch(receiver, late, version=9)
    assert zero_core.apply_patch(receiver, whole) == 3
    assert zero_core.apply_patch(receiver, late) == 3
    expected = {n: p.detach() for n, p in engine.module.named_parameters()}
    if engine.world_size == 1:
        assert all(torch.equal(p, expected[n]) for n, p in receiver.named_parameters())


def test_patches_of_another_engine_and_missing_logs_are_refused():
    receiver = _mlp().bfloat16()
    zero_core.apply_patch(receiver, _build_mlp(None, 0).weight_patch())
    engine = _build_mlp(None, 0)
    _train(engine)
    with pytest.raises(zero_core.CheckpointError, match="another engine"):
        zero_core.apply_patch(receiver, engine.weight_patch(since=0))
    with pytest.raises(zero_core.CheckpointError, match="belongs to an engine"):
        zero_core.apply_patch(engine.module, engine.weight_patch())
    without = Case().build(model=_mlp())
    with pytest.raises(RuntimeError, match="set weight_patches"):
        without.weight_patch(since=0)
    assert without.weight_patch().version == 0
    with without.gathered(), pytest.raises(RuntimeError, match="within gathered"):
        without.weight_patch()


def test_a_damaged_or_foreign_patch_changes_nothing():
    engine = _build_mlp(None, 0)
    _train(engine)
    patch = engine.weight_patch(since=0)
    data = patch.source
    assert isinstance(data, bytes)
    receiver = _mlp().bfloat16()
    before = copy.deepcopy(receiver.state_dict())
    places = [9, len(data) // 3, len(data) // 2, len(data) - 1]
    places += [data.index(word) for word in (b"zero_patch", b"pieces", b"since", b"U8")]
    broken = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for changed in (*broken, *(data[:length] for length in (0, 4, 100, len(data) - 1))):
        with pytest.raises(zero_core.CheckpointError):
            zero_core.apply_patch(receiver, changed, version=0)
    larger = nn.Sequential(*_mlp().bfloat16(), nn.Linear(2, 2))
    for other, taken, message in (
        (nn.Sequential(nn.Linear(128, 128)).bfloat16(), patch, "the model lacks"),
        (_mlp(), patch, r"torch.float32 in the model, .*bfloat16"),
        (larger, engine.weight_patch(), r"none for \['4.weight'"),
    ):
        with pytest.raises(zero_core.CheckpointError, match=message):
            zero_core.apply_patch(other, taken, version=None if other is larger else 0)
    assert_same(receiver.state_dict(), before)
    with torch.no_grad():
        receiver[0].weight.mul_(1.5)
    before = copy.deepcopy(receiver.state_dict())
    with pytest.raises(zero_core.CheckpointError, match="something else has changed it"):
        zero_core.apply_patch(receiver, patch, version=0)
    assert_same(receiver.state_dict(), before)
    zero_core.apply_patch(receiver, engine.weight_patch())
    _assert_same(engine, receiver)


def _in_folder(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


def _to_folder(ranks, folder, num_files):
    engine = _build_mlp(ranks, 3)
    engine.export_safetensors(folder)
    version = engine.patch_version
    for number in range(3):
        _train(engine)
        patch = engine.weight_patch(since=version, path=folder.parent / "patch.safetensors")
        version = patch.version
        if ranks.rank == 0:
            there = set(folder.iterdir())
            given = None if number else 0  # later patches find the version in the folder
            zero_core.apply_patch(folder, folder.parent / "patch.safetensors", version=given)
            if num_files > 1 and number:
                assert len(set(folder.iterdir()) - there) == num_files
            assert zero_core.apply_patch(folder, patch) == version
            assert len(list(folder.glob("*.safetensors"))) == num_files
            assert not list(folder.glob("*.tmp"))
        values = engine.full_state_dict(rank=0)
        if ranks.rank == 0:
            assert_same(_in_folder(folder), values)
    loaded = Case(dtype="bf16").build(ranks, _mlp(1), pretrained=folder)
    assert_same(loaded.full_state_dict(), engine.full_state_dict())


def _whole_into_folder(ranks, folder):
    """Patch a folder with whole weights of two engines without a patch log, both at version 0."""
    for seed in range(2):
        engine = _build_mlp(ranks, 0, weight_patches=None)
        if not seed:
            engine.export_safetensors(folder)
        for _ in range(2):
            _train(engine, 1 + seed)
            patch = engine.weight_patch()
            assert patch.version == 0
            zero_core.apply_patch(folder, patch)
            assert_same(_in_folder(folder), engine.full_state_dict())
    with pytest.raises(zero_core.CheckpointError, match="pass the folder that has the files"):
        zero_core.apply_patch(next(folder.glob("*.safetensors")), patch)
    path = next(folder.glob("*.safetensors"))
    held = load_file(path)
    save_file({**held, "foreign": torch.ones(3)}, path)
    with pytest.raises(zero_core.CheckpointError, match=r"none for .*foreign"):
        zero_core.apply_patch(folder, patch)
    assert all(torch.equal(value, load_file(path)[name]) for name, value in held.items())


@pytest.mark.parametrize("num_files", [1, 4])
def test_a_folder_is_replaced_file_by_file_by_patches_in_turn(tmp_path, monkeypatch, num_files):
    if num_files > 1:
        monkeypatch.setattr("zero_core.checkpoint.safetensors_files.MAX_FILE_BYTES", 34_000)
    simulate(_to_folder, 2, tmp_path / "model", num_files)
    simulate(_whole_into_folder, 1, tmp_path / "one number")


def test_a_folder_in_which_nothing_could_be_written_keeps_its_values(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    engine = _build_mlp(None, 0)
    engine.export_safetensors(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    _train(engine)
    patch = engine.weight_patch(since=0)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(zero_core.CheckpointFailedError, match="no space left"):
            zero_core.apply_patch(tmp_path, patch, version=0)
    assert_same(load_file(tmp_path / "model.safetensors"), before)
    zero_core.apply_patch(tmp_path, patch, version=0)


@on_ranks(2)
def test_buffers_travel_when_they_change(ranks):
    norm, out = nn.BatchNorm1d(128), nn.Linear(128, 128)
    receiver = nn.Sequential(copy.deepcopy(norm), copy.deepcopy(out))
    model = nn.Sequential(norm, out)
    engine = _case(1, "fp32").build(ranks, model)
    whole = engine.weight_patch()
    _train(engine)
    patch = engine.weight_patch(since=whole.version)
    assert patch.version == whole.version + 1
    assert engine.weight_patch(since=patch.version).version == patch.version
    if ranks.rank == 0:
        zero_core.apply_patch(receiver, whole)
        zero_core.apply_patch(receiver, patch)
        assert receiver[0].num_batches_tracked == 1
    _assert_same(engine, receiver)


@st.composite
def masks(draw):
    numel = draw(st.integers(1, 3000))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 0.97, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(numel, generator=generator) < share


@given(masks(), st.sampled_from([None, 2, 4]))
def test_an_encoding_decodes_to_its_positions(mask, value_bytes):
    positions = mask.nonzero().view(-1)
    assert torch.equal(decode_gaps(encode_gaps(positions)), positions)
    assert torch.equal(unpack_bits(pack_bits(mask), mask.numel()), mask)
    kind, encoded = encode(mask, value_bytes)
    found = torch.zeros_like(mask)
    found[decode(kind, encoded, mask.numel())] = True
    assert torch.equal(found, mask) or (value_bytes and kind is Kind.ALL and found.all())
    if value_bytes:
        assert encoded.numel() + int(found.sum()) * value_bytes <= mask.numel() * value_bytes


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=200), st.data())
def test_a_comparison_finds_every_differing_bit(bits, data):
    numel = len(bits)
    old = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    new = old.clone()
    where = sorted(data.draw(st.sets(st.integers(0, numel - 1))))
    flips = [1 << data.draw(st.integers(0, 14)) for _ in where]
    for place, flip in zip(where, flips, strict=True):
        new[place] ^= flip
    shift = data.draw(st.integers(0, min(3, numel - 1)))
    for dtype in (torch.bfloat16, torch.float16):  # random bits include NaN
        changed, far = compare(old.view(dtype)[shift:], new.view(dtype)[shift:])
        found = changed.nonzero().view(-1).tolist()
        assert found == [place - shift for place in where if place >= shift]
        moved = (old.to(torch.int32) - new.to(torch.int32)).abs()[shift:]
        assert not bool((~far & (moved > 7)).any())


def test_values_that_changed_their_sign_are_far():
    """The NaN 0x7FFF and -0.0 (0x8000) are neighbours as 16-bit integers modulo 2**16."""
    ends = torch.tensor([0x7FFF, 0x7FFE, -0x7FFF, -0x8000], dtype=torch.int32).to(torch.int16)
    changed, far = compare(ends, ends.flip(0))
    assert changed.tolist() == far.tolist() == [True, True, True, True]


@given(st.integers(1, 2000), st.lists(masks(), min_size=1, max_size=8), st.randoms())
def test_marks_are_the_union_of_what_was_added(numel, added, random):
    changes, expected = ShardChanges(numel), torch.zeros(numel, dtype=torch.bool)
    for mask in added:
        start = random.randrange(numel)
        part = mask[: numel - start]
        changes.add(start, start + part.numel(), [pack_bits(part, start % 8)] * 2)
        expected[start : start + part.numel()] |= part
    assert changes.is_marked == bool(expected.any())
    found = torch.zeros((4, numel), dtype=torch.bool)
    changes.mark(*found[:2])
    changes.compact()
    changes.mark(*found[2:])
    assert torch.equal(found, expected.expand(4, -1))


@pytest.mark.parametrize(
    ("kind", "encoded", "numel"),
    [
        (Kind.ALL, [1], 3),
        (Kind.BITS, [1], 9),
        (Kind.BITS, [0b1000], 3),
        (Kind.GAPS, [3], 3),
        (Kind.GAPS, [0, 255], 3),
    ],
)
def test_an_encoding_of_other_positions_is_refused(kind, encoded, numel):
    with pytest.raises(ValueError, match="encode no positions"):
        decode(kind, torch.tensor(encoded, dtype=torch.uint8), numel)


@given(st.integers(-(2**15), 2**15 - 1), st.integers(-127, 127), st.integers(0, 127))
def test_low_bits_lead_to_the_new_value_from_any_old_one_nearby(new, distance, between):
    def value(ordered):
        bits = ordered ^ 0x7FFF if ordered < 0 else ordered
        return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)

    for form, limit in ((Form.LOW4, 7), (Form.LOW8, 127)):
        old = min(max(new + max(-limit, min(limit, distance)), -(2**15)), 2**15 - 1)
        nearer = new + (old - new) * between // 127  # between the old and the new value
        for start in (old, nearer):
            found = from_low_bits(value(start), to_low_bits(value(new), form), form)
            assert torch.equal(found.view(torch.int16), value(new).view(torch.int16))
