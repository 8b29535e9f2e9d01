"""Moments of 8 and 16 bits on the host, and split master weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import ReferenceAdam, ReferenceKernel
from support.tiers import (
    ADAM,
    BF16,
    FP16,
    FP32,
    Space,
    assert_same,
    copy_state,
    group_of,
    host_tier,
    make_tier,
    snapshot,
    train,
    trained,
)
from torch import nn, optim

from zero_offload import OffloadedOptimizer
from zero_offload.rules import compact
from zero_offload.rules.compact import Bf16AdamRule

compact_dtypes = pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@compact_dtypes
def test_ties_of_split_masters_are_rounded_when_they_are_written_as_by_a_step(
    kernel: Any, state_dtype: str, device: str, tmp_path: Path
) -> None:
    space = Space(BF16)
    space.initial = (space.initial.view(torch.int32) & -65536 | 0x8000).view(torch.float32)
    groups = [group_of(optim.AdamW, lr=0.0, weight_decay=0.0)]
    place = {"device": device, "nvme_path": str(tmp_path), "state_dtype": state_dtype}
    tier = make_tier(space, kernel=kernel, **place)
    written = space.flat_params()
    train(tier, space, groups, range(1))
    updated = space.covered()
    assert torch.equal(written[updated], space.flat_params()[updated])
    assert (written.float().abs() > space.initial.abs())[updated].all()
    masters = tier.read_state("master_weight", 0, space.numel)
    assert torch.equal(masters[updated], space.initial[updated])


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@compact_dtypes
def test_training_stays_close_to_fp32_states(
    kernel: Any, state_dtype: str, dtype: torch.dtype
) -> None:
    found, expected = (
        trained(space=Space(dtype), steps=range(30), kernel=kernel, state_dtype=name)
        for name in (state_dtype, "float32")
    )
    assert torch.equal(found["params"], found["master_weight"].to(dtype))
    moved = (expected["master_weight"] - Space().initial).norm()
    assert 0 < (found["master_weight"] - expected["master_weight"]).norm() < 0.05 * moved


@pytest.mark.parametrize(("ratio", "dtype"), [(0.0, BF16), (0.4, FP32), (0.4, BF16), (1.0, BF16)])
@compact_dtypes
def test_resumed_run_is_bit_identical(
    kernel: Any, state_dtype: str, dtype: torch.dtype, ratio: float
) -> None:
    space, resumed = Space(dtype), Space(dtype)
    options: dict[str, Any] = {"ratio": ratio, "kernel": kernel, "state_dtype": state_dtype}
    tier, other = make_tier(space, **options), make_tier(resumed, **options)
    train(tier, space, steps=range(5), active=[0, 2, 3])
    train(other, resumed, steps=range(20, 22))  # earlier state must be overwritten
    copy_state(tier, other, space, [a for a, _, _ in Space().pieces][1:])
    for name in tier.state_names():
        assert tier.read_state(name, 0, space.numel).dtype == FP32
    for step in (5, 8):
        train(tier, space, steps=range(step, step + 3))
        train(other, resumed, steps=range(step, step + 3))
        expected = snapshot(tier, space, padding=False)
        assert_same(snapshot(other, resumed, padding=False), expected)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_masters_follow_written_weights_and_equal_them_when_synced(state_dtype: str) -> None:
    weight = nn.Parameter(torch.linspace(0.1, 0.9, 200).bfloat16())
    settings: dict[str, Any] = {"adam_kernel": ReferenceKernel(), "state_dtype": state_dtype}
    optimizer = OffloadedOptimizer(optim.AdamW, [weight], **settings)
    weight.grad = weight.detach().clone()
    optimizer.step()
    with torch.no_grad():
        weight.fill_(0.3)
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"].bfloat16(), weight)
    weight.data.fill_(0.5)  # autograd does not count this write
    optimizer.sync_from_params()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], weight.float())


@compact_dtypes
def test_state_goes_to_fp32_states_and_back_unchanged(kernel: Any, state_dtype: str) -> None:
    spaces = [Space(BF16) for _ in range(3)]
    dtypes = (state_dtype, "float32", state_dtype)
    pairs = zip(spaces, dtypes, strict=True)
    source, wide, back = (make_tier(s, kernel=kernel, state_dtype=name) for s, name in pairs)
    train(source, spaces[0])
    expected = snapshot(source, spaces[0], padding=False)
    for first, second, space in ((source, wide, spaces[1]), (wide, back, spaces[2])):
        copy_state(first, second, space)
        assert_same(snapshot(second, space, padding=False), expected)


def test_block_that_is_overwritten_in_part_keeps_the_rest() -> None:
    space = Space()
    tier = make_tier(space, kernel=ReferenceKernel(), state_dtype="int8")
    train(tier, space)
    before = tier.read_state("exp_avg", 42, 253)
    tier.write_state("exp_avg", 60, torch.zeros(11))
    after = tier.read_state("exp_avg", 42, 253)
    assert not after[18:29].any()
    torch.testing.assert_close(after[29:], before[29:], rtol=0.05, atol=1e-4)
    assert torch.equal(after[128:], before[128:])  # the next block is unchanged


@compact_dtypes
def test_staging_copy_is_the_upper_half_on_the_way_to_a_device(
    kernel: Any, state_dtype: str
) -> None:
    """The upload buffer has the upper halves of the masters, as on an accelerator."""
    space, plain = Space(BF16), Space(BF16)
    tier, mover = host_tier(space, kernel, state_dtype=state_dtype, is_staged=True)
    other = make_tier(plain, kernel=kernel, state_dtype=state_dtype)
    train(tier, space)
    train(other, plain)
    assert_same(snapshot(tier, space), snapshot(other, plain))
    assert mover.out(0, 256).data_ptr() != space.params[0][1].data_ptr()
    assert torch.equal(mover.out(0, 256), space.params[0][1])
    assert tier.report().host_bytes == other.host_bytes


def test_mixed_dtypes_split_the_bf16_parameters_alone() -> None:
    space = Space()
    space.params = [(0, space.params[0][1]), (256, space.params[1][1].bfloat16())]
    space.flat_params = lambda: torch.cat([t.float() for _, t in space.params])  # type: ignore[method-assign]
    tier = make_tier(space, kernel=ReferenceKernel(), state_dtype="int8")
    train(tier, space)
    master = tier.read_state("master_weight", 0, space.numel)
    assert torch.equal(space.params[0][1], master[:256])
    assert torch.equal(space.params[1][1], master[256:].bfloat16())
    lengths = [stop - start for start, stop, _ in space.pieces]
    moments = sum(2 * n + 8 * -(-n // 128) for n in lengths)
    assert tier.host_bytes == moments + 4 * 256 + 2 * 104 + 2 * sum(lengths[3:])


@pytest.mark.parametrize(
    ("cls", "options", "kernel", "dtype", "match"),
    [
        (optim.SGD, {}, ReferenceKernel(), FP32, "int8.*not SGD"),
        (optim.Adagrad, {}, ReferenceKernel(), FP32, "int8.*not Adagrad"),
        (optim.AdamW, {"amsgrad": True}, ReferenceKernel(), FP32, "int8.*amsgrad"),
        (optim.AdamW, {}, None, FP32, "needs a host kernel with adam_step_8bit, and there is no"),
        (optim.AdamW, {}, ReferenceAdam(), FP32, "host kernel with adam_step_8bit.*has none"),
        (optim.AdamW, {}, ReferenceKernel(), torch.float64, "float64"),
    ],
)
def test_what_8_bits_cannot_serve_is_refused_by_name(
    cls: Any, options: dict[str, Any], kernel: Any, dtype: torch.dtype, match: str
) -> None:
    groups = [group_of(cls, **options)]
    with pytest.raises(ValueError, match=match):
        make_tier(Space(dtype), cls, groups, kernel=kernel, state_dtype="int8")


def test_rounding_of_16_bit_moments_starts_again_at_each_block(monkeypatch: Any) -> None:
    """A range that starts at a block boundary rounds to the same bits as the whole space."""
    monkeypatch.setattr(Bf16AdamRule, "block", 64)
    rule = Bf16AdamRule.of(ReferenceKernel(), optim.AdamW)
    grad, hyper = torch.randn(200), rule.hyper(ADAM[0], 1)
    results = []
    for bounds in ([0, 200], [0, 64, 192, 200]):
        stored = {n: torch.zeros(k, dtype=d) for n, (d, k) in rule.stored(200).items()}
        master = torch.zeros(200)
        for a, b in pairwise(bounds):
            part = {name: value[a:b] for name, value in stored.items()}
            rule.update(master[a:b], grad[a:b], part, hyper, 1.0, None)
        results.append((master, *stored.values()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


_exponents = st.integers(-45, 40)


@given(st.lists(_exponents, min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_decoded_moments_are_stored_as_they_were(
    exponents: list[int], numel: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = 2.0 ** torch.tensor(exponents, dtype=torch.float32)
    rows = torch.arange(numel) // 128 % len(exponents)
    spread = torch.exp(2 * torch.randn(numel, generator=generator))
    values = torch.randn(numel, generator=generator) * spread * factors[rows]
    values[torch.rand(numel, generator=generator) < 0.1] = 0
    for encode, decode, given_values in (
        (compact.encode_exp_avg, compact.decode_exp_avg, values),
        (compact.encode_exp_avg_sq, compact.decode_exp_avg_sq, values.square()),
    ):
        found, scales = encode(given_values)
        assert scales.numel() == -(-numel // compact.BLOCK_NUMEL)
        again, same_scales = encode(decode(found, scales))
        assert torch.equal(again, found)
        assert torch.equal(same_scales, scales)


def test_a_block_that_is_not_finite_is_lost_alone() -> None:
    values = torch.ones(300)
    values[130] = float("inf")
    for encode, decode in (
        (compact.encode_exp_avg, compact.decode_exp_avg),
        (compact.encode_exp_avg_sq, compact.decode_exp_avg_sq),
    ):
        found = decode(*encode(values))
        assert found[128:256].isnan().all()
        assert torch.equal(found[:128], values[:128])
        assert torch.equal(found[256:], values[256:])


def test_a_write_of_equal_values_keeps_split_masters_at_ties(kernel: Any) -> None:
    weight, tie = nn.Parameter(torch.ones(4, dtype=BF16)), torch.full((4,), 1 + 2**-8)
    keys = {"adam_kernel": kernel, "state_dtype": "bfloat16", "ratio": 0.5}
    optimizer = OffloadedOptimizer(optim.AdamW, [weight], lr=0.1, **keys)
    state = {0: {"master_weight": tie, "num_steps": 0}}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    with torch.no_grad():
        weight.clamp_(-9, 9)
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], tie)
