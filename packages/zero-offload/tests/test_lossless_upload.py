"""New parameters uploaded as differences: equal bits in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import NamedLion, ReferenceKernel
from support.streams import LateStreams
from support.tiers import (
    BF16,
    CPU,
    FP16,
    FP32,
    Space,
    assert_same,
    group_of,
    host_tier,
    make_tier,
    offer,
    snapshot,
)
from torch import Tensor, optim

from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import HostStreams
from zero_offload.optimizer import OffloadedOptimizer
from zero_offload.rules.resolve import resolve_rule
from zero_offload.steppers.file_stepper import FileStepper
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.transfers.mover import SHORTEST_NBYTES, HostMover, UploadDifferences, part_numel

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangedElements:
    """Codec that encodes the positions of changed elements and the differences of their bits."""

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
    """Two shards, so long that differences are uploaded. `Pair.train` skips piece 1 in step 3."""

    numel = 140_000

    def __init__(self, dtype: torch.dtype) -> None:
        self.pieces = [(0, 40_003, 0), (40_003, 79_000, 0), (80_000, 139_001, 0)]
        generator = torch.Generator().manual_seed(3)
        self.initial = torch.randn(self.numel, generator=generator).to(dtype).float()
        self.dtype = dtype
        first, second = self.initial.to(dtype).split([80_000, 60_000])
        self.params = [(0, first.clone()), (80_000, second.clone())]

    def grad(self, step: int) -> Tensor:
        """Return a gradient that is mostly nonzero in step 2 and mostly zero in other steps."""
        generator = torch.Generator().manual_seed(step)
        found = torch.randn(self.numel, generator=generator)
        share = 0.95 if step == 2 else 0.03
        return found.mul_(torch.rand(self.numel, generator=generator) < share).to(self.dtype)


GROUPS = [group_of(optim.SGD, lr=1e-2)]
PIECES = range(3)


class Pair:
    """Two tiers with equal training, of which only the first uploads differences."""

    def __init__(
        self,
        streams: HostStreams | None = None,
        dtype: torch.dtype = BF16,
        *,
        pieces: list[tuple[int, int, int]] | None = None,
        cls: type[optim.Optimizer] = optim.SGD,
        groups: list[dict[str, Any]] = GROUPS,
        published_numel: int = 70_000,
        **keys: Any,
    ) -> None:
        self.groups = groups
        self.space, self.plain = WideSpace(dtype), WideSpace(dtype)
        for space in (self.space, self.plain):
            space.pieces = pieces or space.pieces
        keys = {"is_staged": True, "published_numel": published_numel, **keys}
        codec = ChangedElements()
        self.tier, self.mover = host_tier(
            self.space, ReferenceKernel(), cls, groups, streams=streams, codec=codec, **keys
        )
        self.whole, self.whole_mover = host_tier(self.plain, ReferenceKernel(), cls, groups, **keys)

    @property
    def both(self) -> tuple[tuple[HostTier, WideSpace], tuple[HostTier, WideSpace]]:
        return (self.tier, self.space), (self.whole, self.plain)

    @property
    def differences(self) -> UploadDifferences:
        assert self.mover.differences is not None
        return self.mover.differences

    def train(self, steps: range = range(6)) -> None:
        """Train both tiers and compare all states."""
        for tier, space in self.both:
            for step in steps:
                offer(tier, space, step)
                tier.step(self.groups, PIECES if step != 3 else (0, 2), grad_scale=0.5)
                if step == 3:
                    tier.discard_grads()
                tier.wait_params(0, space.numel)
        self.check()

    def check(self) -> None:
        assert_same(snapshot(self.tier, self.space), snapshot(self.whole, self.plain))


@pytest.fixture(params=["at once", "late"])
def streams(request: pytest.FixtureRequest) -> Iterator[HostStreams]:
    found = LateStreams(up_s=0.01) if request.param == "late" else HostStreams()
    yield found
    if isinstance(found, LateStreams):
        found.close()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_steps_leave_the_bits_of_whole_values_and_send_less(
    streams: HostStreams, dtype: torch.dtype
) -> None:
    pair = Pair(streams, dtype)
    assert torch.equal(pair.space.flat_params(), pair.space.initial.to(dtype))
    sent, nbytes = [], pair.mover.bytes_h2d
    for step in range(6):
        pair.train(range(step, step + 1))
        sent.append(pair.mover.bytes_h2d - nbytes)
        nbytes = pair.mover.bytes_h2d
    per_step = 138_001 * dtype.itemsize
    assert pair.whole_mover.bytes_h2d > 5 * per_step
    assert all(n < per_step / 4 for step, n in enumerate(sent) if step != 2)
    assert sent[2] == per_step  # sent whole: the difference is longer
    assert pair.differences.num_changed == 2  # the first values of both shards are sent whole
    assert pair.differences.num_bytes == pair.space.numel * dtype.itemsize


def test_queued_steps_check_what_the_step_before_has_sent() -> None:
    streams = LateStreams(up_s=0.02)  # copies end after the next step's checksums
    pair = Pair(streams)
    for found, of in pair.both:
        for step in (0, 1, 3, 4):
            offer(found, of, step)
            found.step(GROUPS, [2], grad_scale=0.5)  # one run never waits for a staging buffer
            found.discard_grads()
        found.wait_params(0, of.numel)
    pair.check()
    assert pair.differences.num_changed == 2  # the first values of both shards are sent whole
    assert pair.differences.num_differences == 4
    streams.close()


def test_parts_of_a_span_wait_for_the_buffer_that_they_share() -> None:
    space, published_numel = Space(), 35_200
    space.numel = 5 * part_numel(published_numel)
    shard = torch.zeros(space.numel, dtype=BF16)
    space.pieces, space.params = [(0, shard.numel(), 0)], [(0, shard)]
    geometry = space.geometry(published_numel=published_numel)
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
    pair = Pair(streams)
    pair.train(range(2))
    before = pair.differences.num_changed
    pair.space.params[1][1][17] += 1.0  # other code writes to the shard
    pair.train(range(3, 4))
    assert pair.differences.num_changed == before + 1  # the edited part was sent whole
    nbytes = pair.mover.bytes_h2d
    pair.train(range(4, 5))
    assert pair.mover.bytes_h2d - nbytes < 138_001 / 2
    assert pair.differences.num_changed == before + 1


def test_restored_master_weights_arrive(streams: HostStreams) -> None:
    pair = Pair(streams)
    pair.train(range(2))
    for found, _ in pair.both:
        found.write_state("master_weight", 30_000, torch.ones(60_001))
    pair.train(range(4, 6))


ADAM = {"cls": optim.AdamW, "groups": [group_of(optim.AdamW, lr=1e-5)]}


@pytest.mark.parametrize(
    "keys",
    [
        # A run is a whole shard and is sent in several parts.
        {**ADAM, "state_dtype": "int8", "published_numel": 36_000},
        {**ADAM, "state_dtype": "bfloat16", "published_numel": 36_000},
        # Spans may begin at any element.
        {"pieces": [(3, 40_003, 0), (40_006, 79_001, 0), (80_001, 139_002, 0)]},
    ],
)
def test_split_master_weights_and_spans_that_begin_anywhere_go_up_as_differences(
    streams: HostStreams, keys: dict[str, Any]
) -> None:
    pair = Pair(streams, **keys)
    pair.train()
    assert pair.differences.num_differences > 6
    assert pair.mover.bytes_h2d < pair.whole_mover.bytes_h2d / 2


def test_short_spans_are_sent_whole_without_a_check(streams: HostStreams) -> None:
    pair = Pair(streams, published_numel=SHORTEST_NBYTES // 2 - 1)
    pair.train(range(2))
    assert pair.differences.num_differences == 0
    assert pair.mover.bytes_h2d == 2 * (pair.space.numel + 2 * 138_001)


def test_elements_that_the_codec_does_not_serve_are_sent_whole() -> None:
    space, memory = WideSpace(torch.float64), HostMemory(should_pin=False)
    mover = HostMover(space.geometry(), CPU, memory, is_staged=True, codec=ChangedElements())
    assert mover.differences is not None
    assert mover.differences.num_bytes == 0
    view = space.params[0][1]
    values = view + 1
    mover.open_spans([(0, 80_000)])
    mover.out(0, 80_000).copy_(values)
    mover.publish(0, 80_000)
    assert torch.equal(view, values)
    assert mover.bytes_h2d == 640_000


def test_a_host_that_is_the_device_sends_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    space, codec = WideSpace(BF16), ChangedElements()
    block: dict[str, Any] = {"upload_codec": codec, "lossless_upload": True}
    tier = make_tier(space, optim.SGD, GROUPS, kernel=ReferenceKernel(), **block)
    offer(tier, space, 0)
    tier.step(GROUPS, PIECES, grad_scale=1.0)
    tier.wait_params(0, space.numel)
    assert tier.bytes_h2d == 2 * (space.numel + 138_001)
    assert "published weights" not in {kind for kind, n in tier.host_memory_bytes().items() if n}
    caplog.clear()
    OffloadedOptimizer(optim.SGD, [torch.nn.Parameter(torch.zeros(3))], upload_codec=codec)
    assert "lossless_upload has no effect: no shard" in caplog.text


def test_a_codec_that_is_not_there_is_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match="needs a codec: pip install packages/zero-comm "):
        make_tier(Space(), on=torch.device("cuda"), lossless_upload=True)
    params = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="no upload codec 'other' is installed"):
        OffloadedOptimizer(optim.SGD, params, upload_codec="other")
    with pytest.raises(ValueError, match="needs max_nbytes, checksum, encode and decode; 3 lacks"):
        OffloadedOptimizer(optim.SGD, params, upload_codec=3)  # type: ignore[arg-type]


def test_a_wide_span_waits_for_a_short_one_that_is_under_way() -> None:
    """A short run is sent whole, without a checksum. The next step's run contains it."""
    # Lion merges pieces with unequal step counts into one run.
    groups = [group_of(NamedLion, lr=0.1)]
    streams = LateStreams(up_s=0.05)
    pieces = [(0, 1_000, 0), (1_000, 79_000, 0), (80_000, 139_001, 0)]
    made: dict[str, Any] = {"cls": NamedLion, "groups": groups, "published_numel": 100_000}
    pair = Pair(streams, pieces=pieces, **made)
    for found, of in pair.both:
        for step, active in ((0, [0]), (1, [0, 1])):
            offer(found, of, step)
            found.step(groups, active, grad_scale=1.0)
            found.discard_grads()
        found.wait_params(0, of.numel)
    pair.check()
    assert pair.differences.num_differences == 1
    assert pair.differences.num_changed == 2  # the first values of both shards are sent whole
    streams.close()


def test_states_in_a_file_go_with_differences(streams: HostStreams, tmp_path: Path) -> None:
    """Chunks of a file contain several runs."""
    pair = Pair(streams)
    geometry = pair.space.geometry()
    memory, codec = HostMemory(should_pin=False), ChangedElements()
    pair.mover = HostMover(geometry, CPU, memory, streams=streams, is_staged=True, codec=codec)
    rule = resolve_rule(ReferenceKernel(), optim.SGD, GROUPS, "float32")
    assert rule is not None
    stepper = FileStepper(geometry, rule, GROUPS, folder=str(tmp_path), buffer_count=3)
    pair.tier = HostTier(geometry, stepper, pair.mover)
    pair.tier.write_state("master_weight", 0, pair.space.initial)
    for step in range(6):
        pair.train(range(step, step + 1))
    assert pair.differences.num_differences > 6
