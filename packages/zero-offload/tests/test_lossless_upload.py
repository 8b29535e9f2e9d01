"""New parameters that go up as differences: the bits of whole ones, in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import NamedLion, ReferenceKernel
from support.streams import LateStreams
from support.tiers import CPU, Space, assert_same, group_of, make_tier, snapshot
from torch import Tensor, optim

from zero_offload.flat.geometry import Geometry
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import HostStreams
from zero_offload.optimizer import OffloadedOptimizer
from zero_offload.rules.resolve import resolve_rule
from zero_offload.steppers.file_stepper import FileStepper
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.tier import create_tier, make_device_tier
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.tiers.twin import TwinTier
from zero_offload.transfers.differences import SHORTEST_NBYTES, UploadDifferences, part_numel
from zero_offload.transfers.mover import HostMover

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangedElements:
    """A codec: the positions of the changed elements, then what is added to their bits."""

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        return numel * (4 + itemsize) if itemsize in (2, 4) else 0

    def checksum(self, values: Tensor) -> Tensor:
        bits = values.view(_INTEGERS[values.element_size()]).long()
        return (bits * (2 * torch.arange(bits.numel()) + 1)).sum()

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        width = _INTEGERS[old.element_size()]
        changed = (old.view(width) != new.view(width)).nonzero().flatten()
        found = (changed.int(), (new.view(width) - old.view(width))[changed])
        nbytes = torch.cat([part.contiguous().view(torch.uint8) for part in found])
        out[: nbytes.numel()] = nbytes
        return nbytes.numel()

    def decode(self, difference: Tensor, values: Tensor) -> None:
        bits = values.view(_INTEGERS[values.element_size()])
        count = difference.numel() // (4 + values.element_size())
        where = difference[: 4 * count].clone().view(torch.int32).long()
        bits[where] += difference[4 * count :].clone().view(bits.dtype)


class WideSpace(Space):
    """Two shards, long enough for differences, with pieces that some steps leave out."""

    numel = 140_000
    sizes = (40_003, 38_997, 59_001)

    def __init__(self, dtype: torch.dtype) -> None:
        self.pieces = [(0, 40_003, 0), (40_003, 79_000, 0), (80_000, 139_001, 0)]
        generator = torch.Generator().manual_seed(3)
        self.initial = torch.randn(self.numel, generator=generator).to(dtype).float()
        self.dtype = dtype
        first, second = self.initial.to(dtype).split([80_000, 60_000])
        self.params = [(0, first.clone()), (80_000, second.clone())]

    def grad(self, step: int) -> Tensor:
        """Of few elements, of most in step 2."""
        generator = torch.Generator().manual_seed(step)
        found = torch.randn(self.numel, generator=generator)
        share = 0.95 if step == 2 else 0.03
        return found.mul_(torch.rand(self.numel, generator=generator) < share).to(self.dtype)


GROUPS = [group_of(optim.SGD, lr=1e-2)]
PIECES = range(3)


def build(
    space: WideSpace,
    streams: HostStreams | None = None,
    codec: ChangedElements | None = None,
    cls: type[torch.optim.Optimizer] = optim.SGD,
    groups: list[dict[str, Any]] = GROUPS,
    state_dtype: str = "float32",
    published_numel: int = 70_000,
) -> tuple[HostTier, HostMover]:
    """Return a tier whose shards are on a device of its own, as far as it can tell."""
    geometry = Geometry(space.numel, space.pieces, space.params, 1, published_numel=published_numel)
    memory = HostMemory(should_pin=False)
    mover = HostMover(geometry, CPU, memory, streams=streams, is_staged=True, codec=codec)
    rule = resolve_rule(ReferenceKernel(), cls, groups, state_dtype)
    assert rule is not None
    stepper = MemoryStepper(geometry, rule, groups, is_in_place=False, upper=mover.hold)
    tier = HostTier(geometry, stepper, mover)
    tier.write_state("master_weight", 0, space.initial)
    return tier, mover


def differences_of(mover: HostMover) -> UploadDifferences:
    assert mover.differences is not None
    return mover.differences


def offer(tier: TwinTier | HostTier, space: WideSpace, step: int) -> None:
    """Offer a step's gradient. It may be overwritten as soon as that returns."""
    grad = space.grad(step)
    for start, stop in ((80_000, space.numel), (0, 80_000)):
        release = tier.offer_grad(start, grad[start:stop])
        if release is not None:
            release()


def train(
    tier: HostTier, space: WideSpace, groups: list[dict[str, Any]], steps: range = range(6)
) -> None:
    for step in steps:
        offer(tier, space, step)
        tier.step(groups, PIECES if step != 3 else (0, 2), grad_scale=0.5)
        if step == 3:
            tier.discard_grads()
        tier.wait_params(0, space.numel)


@pytest.fixture(params=["at once", "late"])
def streams(request: pytest.FixtureRequest) -> Iterator[HostStreams]:
    found = LateStreams(up_s=0.01) if request.param == "late" else HostStreams()
    yield found
    if isinstance(found, LateStreams):
        found.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_steps_leave_the_bits_of_whole_values_and_send_less(
    streams: HostStreams, dtype: torch.dtype
) -> None:
    space, plain = WideSpace(dtype), WideSpace(dtype)
    tier, mover = build(space, streams, ChangedElements())
    whole, whole_mover = build(plain)
    assert torch.equal(space.flat_params(), space.initial.to(dtype))
    sent, nbytes = [], mover.bytes_h2d
    for step in range(6):
        train(tier, space, GROUPS, range(step, step + 1))
        train(whole, plain, GROUPS, range(step, step + 1))
        assert torch.equal(space.flat_params(), plain.flat_params())
        sent.append(mover.bytes_h2d - nbytes)
        nbytes = mover.bytes_h2d
    per_step = 138_001 * dtype.itemsize
    assert whole_mover.bytes_h2d > 5 * per_step
    assert all(n < per_step / 4 for step, n in enumerate(sent) if step != 2)
    assert sent[2] == per_step  # a difference would be longer
    assert differences_of(mover).num_changed == 2  # the first values
    assert differences_of(mover).num_bytes == space.numel * dtype.itemsize


def test_queued_steps_check_what_the_step_before_has_sent() -> None:
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    streams = LateStreams(up_s=0.02)  # later than the next step's checks
    tier, mover = build(space, streams, ChangedElements())
    whole, _ = build(plain)
    for found, of in ((tier, space), (whole, plain)):
        for step in (0, 1, 3, 4):
            offer(found, of, step)
            found.step(GROUPS, [2], grad_scale=0.5)  # one run: no staging has to be waited for
            found.discard_grads()
        found.wait_params(0, of.numel)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert differences_of(mover).num_changed == 2  # the first values
    assert differences_of(mover).num_differences == 4
    streams.close()


def test_parts_of_a_span_wait_for_the_buffer_that_they_share() -> None:
    published_numel = 35_200
    shard = torch.zeros(5 * part_numel(published_numel), dtype=torch.bfloat16)
    pieces = [(0, shard.numel(), 0)]
    geometry = Geometry(shard.numel(), pieces, [(0, shard)], 1, published_numel=published_numel)
    streams, memory = LateStreams(up_s=0.03), HostMemory(should_pin=False)
    found = UploadDifferences(geometry, [0], ChangedElements(), memory, streams)
    values = torch.zeros_like(shard)
    values[::40] = torch.arange(1, values[::40].numel() + 1).bfloat16()
    found.open(0, shard.numel())
    event, nbytes = found.send(0, shard, values)
    assert event is not None
    streams.arrive(event)
    streams.close()
    assert found.num_differences == 5
    assert nbytes == 6 * values[::40].numel()
    assert torch.equal(shard, values)


def test_values_that_others_changed_are_sent_whole_and_then_as_differences(
    streams: HostStreams,
) -> None:
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    tier, mover = build(space, streams, ChangedElements())
    whole, _ = build(plain)
    for found in (tier, whole):
        train(found, space if found is tier else plain, GROUPS, range(2))
    before = differences_of(mover).num_changed
    space.params[1][1][17] += 1.0  # behind the tier's back: its next values replace it
    train(tier, space, GROUPS, range(3, 4))
    assert differences_of(mover).num_changed == before + 1  # the part that holds it
    train(whole, plain, GROUPS, range(3, 4))
    assert torch.equal(space.flat_params(), plain.flat_params())
    nbytes = mover.bytes_h2d
    train(tier, space, GROUPS, range(4, 5))
    assert mover.bytes_h2d - nbytes < 138_001 / 2
    assert differences_of(mover).num_changed == before + 1


def test_restored_master_weights_arrive(streams: HostStreams) -> None:
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    tier, _ = build(space, streams, ChangedElements())
    whole, _ = build(plain)
    for found, of in ((tier, space), (whole, plain)):
        train(found, of, GROUPS, range(2))
        found.write_state("master_weight", 30_000, torch.ones(60_001))
        train(found, of, GROUPS, range(4, 6))
    assert torch.equal(space.flat_params(), plain.flat_params())


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_split_master_weights_go_up_as_differences(streams: HostStreams, state_dtype: str) -> None:
    groups = [group_of(optim.AdamW, lr=1e-5)]
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    made: dict[str, Any] = {"cls": optim.AdamW, "groups": groups, "state_dtype": state_dtype}
    made["published_numel"] = 36_000  # a run is a whole shard, sent in several parts
    tier, mover = build(space, streams, ChangedElements(), **made)
    whole, whole_mover = build(plain, **made)
    for found, of in ((tier, space), (whole, plain)):
        train(found, of, groups)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert_same(snapshot(tier, space), snapshot(whole, plain))
    assert differences_of(mover).num_differences > 6
    assert mover.bytes_h2d < whole_mover.bytes_h2d / 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_steps_that_begin_before_their_decision_go_up_as_differences(
    streams: HostStreams, *, is_kept: bool
) -> None:
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    tier, mover = build(space, streams, ChangedElements())
    whole, _ = build(plain)
    assert tier.enable_undo(None)
    factor = 0.5 if is_kept else 0.25
    for step in (0, 1, 3):
        for found, of in ((tier, space), (whole, plain)):
            offer(found, of, step)
            if found is tier:
                tier.speculate(GROUPS, PIECES, grad_scale=0.5)
            found.step(GROUPS, PIECES, grad_scale=factor)
            found.wait_params(0, of.numel)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert differences_of(mover).num_differences >= 6


def test_short_spans_are_sent_whole_without_a_check(streams: HostStreams) -> None:
    space = WideSpace(torch.bfloat16)
    tier, mover = build(space, streams, ChangedElements(), published_numel=SHORTEST_NBYTES // 2 - 1)
    train(tier, space, GROUPS, range(2))
    assert differences_of(mover).num_differences == 0
    assert mover.bytes_h2d == 2 * (space.numel + 2 * 138_001)


def test_elements_that_the_codec_does_not_serve_are_sent_whole() -> None:
    space, plain = WideSpace(torch.float64), WideSpace(torch.float64)
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    mover = HostMover(
        geometry, CPU, HostMemory(should_pin=False), is_staged=True, codec=ChangedElements()
    )
    assert differences_of(mover).num_bytes == 0
    view, values = space.params[0][1], plain.params[0][1]
    mover.open_spans([(0, 80_000)])
    mover.out(0, 80_000).copy_(values)
    mover.publish(0, 80_000)
    assert torch.equal(view, values)
    assert mover.bytes_h2d == 640_000


def test_a_host_as_the_device_has_nothing_to_send() -> None:
    space = WideSpace(torch.bfloat16)
    tier = make_tier(
        space,
        optim.SGD,
        GROUPS,
        kernel=ReferenceKernel(),
        upload_codec=ChangedElements(),
        lossless_upload=True,
    )
    offer(tier, space, 0)
    tier.step(GROUPS, PIECES, grad_scale=1.0)
    tier.wait_params(0, space.numel)
    assert tier.bytes_h2d == 2 * (space.numel + 138_001)
    assert "published weights" not in {kind for kind, n in tier.host_memory_bytes().items() if n}


def test_a_codec_that_is_not_there_is_asked_for_by_name() -> None:
    space = WideSpace(torch.bfloat16)
    with pytest.raises(ValueError, match="lossless_upload needs a codec: install zero-comm"):
        create_tier(
            numel=space.numel,
            pieces=space.pieces,
            params=space.params,
            device=torch.device("cuda"),
            optimizer_class=optim.SGD,
            groups=GROUPS,
            config={"offload_optimizer": {"device": "cpu", "lossless_upload": True}},
            adam_kernel=ReferenceKernel(),
            device_tier=make_device_tier,
        )
    params = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="no upload codec 'other' is installed"):
        OffloadedOptimizer(optim.SGD, params, upload_codec="other")
    with pytest.raises(ValueError, match="needs max_nbytes, checksum, encode and decode; 3 lacks"):
        OffloadedOptimizer(optim.SGD, params, upload_codec=3)  # type: ignore[arg-type]


def test_a_host_that_is_the_device_is_said_to_send_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    OffloadedOptimizer(optim.SGD, params, upload_codec=ChangedElements())
    assert "lossless_upload has no effect: no shard" in caplog.text


def test_a_wide_span_waits_for_a_short_one_that_is_under_way() -> None:
    """A short run is sent whole, without a checksum. The next step's run has it within."""
    groups = [group_of(NamedLion, lr=0.1)]  # runs of pieces with unequal counts of steps are joined
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    for of in (space, plain):
        of.pieces = [(0, 1_000, 0), (1_000, 79_000, 0), (80_000, 139_001, 0)]
    streams = LateStreams(up_s=0.05)
    made: dict[str, Any] = {"cls": NamedLion, "groups": groups, "published_numel": 100_000}
    tier, mover = build(space, streams, ChangedElements(), **made)
    whole, _ = build(plain, **made)
    for found, of in ((tier, space), (whole, plain)):
        for step, active in ((0, [0]), (1, [0, 1])):
            offer(found, of, step)
            found.step(groups, active, grad_scale=1.0)
            found.discard_grads()
        found.wait_params(0, of.numel)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert differences_of(mover).num_differences == 1
    assert differences_of(mover).num_changed == 2  # the first values
    streams.close()


def test_spans_that_begin_anywhere_have_the_bits_of_whole_values(streams: HostStreams) -> None:
    """Of a share of the elements, or after a parameter that has no gradient."""
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    for of in (space, plain):
        of.pieces = [(3, 40_003, 0), (40_006, 79_001, 0), (80_001, 139_002, 0)]
    tier, mover = build(space, streams, ChangedElements())
    whole, whole_mover = build(plain)
    for found, of in ((tier, space), (whole, plain)):
        train(found, of, GROUPS)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert differences_of(mover).num_differences > 6
    assert mover.bytes_h2d < whole_mover.bytes_h2d / 2


def test_states_in_a_file_go_with_differences(streams: HostStreams, tmp_path: Path) -> None:
    """Its chunks have several runs."""
    space, plain = WideSpace(torch.bfloat16), WideSpace(torch.bfloat16)
    geometry = Geometry(space.numel, space.pieces, space.params, 1)
    memory = HostMemory(should_pin=False)
    codec = ChangedElements()
    mover = HostMover(geometry, CPU, memory, streams=streams, is_staged=True, codec=codec)
    rule = resolve_rule(ReferenceKernel(), optim.SGD, GROUPS, "float32")
    assert rule is not None
    stepper = FileStepper(geometry, rule, GROUPS, folder=str(tmp_path), buffer_count=3)
    tier = HostTier(geometry, stepper, mover)
    tier.write_state("master_weight", 0, space.initial)
    whole, _ = build(plain)
    for found, of in ((tier, space), (whole, plain)):
        train(found, of, GROUPS)
    assert torch.equal(space.flat_params(), plain.flat_params())
    assert differences_of(mover).num_differences > 6
