"""One process's view of qwZ: what is sent, kept, reused and refused."""

import pytest
import torch
from native_collectives import DelayedNative
from torch import Tensor

from zero_comm import dequantize, quantize, quantized_nbytes
from zero_comm.collectives import NativeWork, QuantizedWeights


def gather(
    collectives: QuantizedWeights,
    shard: Tensor,
    *,
    unit: int = 0,
    version: int = 0,
    world_size: int = 1,
    backward: bool = False,
) -> tuple[Tensor, NativeWork]:
    out = torch.full((world_size * shard.numel(),), 9, dtype=shard.dtype)
    work = collectives.all_gather(out, shard, unit=unit, version=version, backward=backward)
    return out, work


def received(x: Tensor) -> Tensor:
    return dequantize(quantize(x), x.numel(), dtype=x.dtype)


def make(world_size: int = 1) -> tuple[QuantizedWeights, DelayedNative]:
    native = DelayedNative(world_size)
    return QuantizedWeights(native, world_size=world_size), native


def test_out_is_filled_by_wait_and_not_before() -> None:
    collectives, _ = make(2)
    shard = torch.randn(1000)
    out, work = gather(collectives, shard, world_size=2)
    assert (out == 9).all()
    work.wait()
    assert torch.equal(out, received(shard).repeat(2))


def test_waiting_twice_fills_out_once() -> None:
    collectives, _ = make()
    out, work = gather(collectives, torch.randn(1000))
    work.wait()
    out.zero_()
    work.wait()
    assert not out.any()


def test_unit_version_and_direction_reach_the_native_collectives() -> None:
    collectives, native = make()
    gather(collectives, torch.randn(512), unit=5, version=8, backward=True)
    (call,) = native.calls
    assert (call.unit, call.version, call.backward) == (5, 8, True)
    assert call.dtype == torch.uint8
    assert call.nbytes == quantized_nbytes(512)


def test_shard_may_change_as_soon_as_the_call_returns() -> None:
    collectives, _ = make()
    shard = torch.randn(1000)
    kept = shard.clone()
    out, work = gather(collectives, shard)
    shard.zero_()
    work.wait()
    assert torch.equal(out, received(kept))


def test_a_new_version_does_not_disturb_a_gather_under_way() -> None:
    collectives, _ = make()
    first, second = torch.randn(1000), torch.randn(1000)
    shard = first.clone()
    early, early_work = gather(collectives, shard, version=1)
    shard.copy_(second)
    late, late_work = gather(collectives, shard, version=2)
    late_work.wait()
    early_work.wait()
    assert torch.equal(early, received(first))
    assert torch.equal(late, received(second))


def test_many_gathers_under_way_have_buffers_of_their_own() -> None:
    collectives, _ = make(3)
    shards = [torch.randn(300 + 50 * i) for i in range(6)]
    pending = [gather(collectives, s, unit=i, world_size=3) for i, s in enumerate(shards)]
    for i in (3, 0, 5, 1, 4, 2):
        out, work = pending[i]
        work.wait()
        assert torch.equal(out, received(shards[i]).repeat(3))


def test_the_same_version_is_quantized_once() -> None:
    collectives, _ = make()
    shard = torch.randn(1000)
    kept = shard.clone()
    gather(collectives, shard, version=3)[1].wait()
    shard.zero_()  # against the rules, to see whether it's read again
    out, work = gather(collectives, shard, version=3, backward=True)
    work.wait()
    assert torch.equal(out, received(kept))
    out, work = gather(collectives, shard, version=4)
    work.wait()
    assert not out.any()


def test_units_and_shards_are_never_mistaken_for_each_other() -> None:
    collectives, _ = make()
    a, b = torch.randn(1000), torch.randn(1000)
    for unit, shard in ((0, a), (1, b), (0, b), (1, a)):
        out, work = gather(collectives, shard, unit=unit)
        work.wait()
        assert torch.equal(out, received(shard))
    doubles = a.double()
    out, work = gather(collectives, doubles, unit=0)
    work.wait()
    assert torch.equal(out, received(doubles))


def test_buffers_stop_growing_after_the_first_steps() -> None:
    collectives, _ = make(2)
    shards = [torch.randn(n) for n in (5000, 300, 2000, 301)]

    def step(version: int) -> int:
        ahead: list[NativeWork] = []
        for unit, shard in enumerate(shards):
            ahead.append(gather(collectives, shard, unit=unit, version=version, world_size=2)[1])
            if len(ahead) == 2:
                ahead.pop(0).wait()
        ahead.pop().wait()
        return collectives.private_nbytes

    sizes = [step(version) for version in range(5)]
    parts = sum(quantized_nbytes(len(s)) for s in shards)
    assert sizes[1:] == [sizes[1]] * 4
    assert sizes[1] <= parts + 2 * 2 * quantized_nbytes(5000)


def test_a_work_that_is_dropped_costs_later_gathers_nothing() -> None:
    collectives, _ = make()
    shard = torch.randn(1000)
    for version in range(3):
        gather(collectives, shard, version=version)
    shard.mul_(2)
    out, work = gather(collectives, shard, version=3)
    work.wait()
    assert torch.equal(out, received(shard))


def test_a_failed_carrier_leaves_the_next_gather_whole() -> None:
    collectives, native = make()
    shard = torch.randn(1000)
    out = torch.empty(1000)
    native.world_size = 7  # the copy of 1008 bytes into 7 rows can't broadcast
    work = collectives.all_gather(out, shard, unit=0, version=0, backward=False)
    with pytest.raises(RuntimeError):
        work.wait()
    native.world_size = 1
    work = collectives.all_gather(out, shard, unit=0, version=1, backward=False)
    work.wait()
    assert torch.equal(out, received(shard))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_what_is_not_a_float_goes_as_it_is(dtype: torch.dtype) -> None:
    collectives, native = make()
    shard = torch.arange(1000).to(dtype)
    out, work = gather(collectives, shard)
    work.wait()
    assert torch.equal(out, shard)
    assert native.calls[0].dtype == dtype


@pytest.mark.parametrize(("numel", "is_quantized"), [(0, False), (60, False), (80, True)])
def test_a_shard_that_would_not_shorten_goes_as_it_is(numel: int, is_quantized: bool) -> None:
    collectives, native = make()
    shard = torch.randn(numel)
    out, work = gather(collectives, shard)
    work.wait()
    assert (native.calls[0].dtype == torch.uint8) is is_quantized
    assert torch.equal(out, received(shard) if is_quantized else shard)


def test_values_without_a_version_are_neither_quantized_nor_kept() -> None:
    collectives, native = make()
    shard = torch.randn(1000)
    for _ in range(2):
        shard.add_(1)
        out, work = gather(collectives, shard, version=-1, backward=True)
        work.wait()
        assert torch.equal(out, shard)
    assert native.calls[0].dtype == torch.float32
    assert collectives.private_nbytes == 0


def test_a_shard_inside_out_is_refused() -> None:
    collectives, native = make(2)
    out = torch.randn(2000)
    for shard in (out[:1000], out[1000:]):
        with pytest.raises(ValueError, match="overlap"):
            collectives.all_gather(out, shard, unit=0, version=0, backward=False)
    assert not native.calls


def test_a_neighbour_in_the_same_memory_is_not_refused() -> None:
    collectives, _ = make()
    arena = torch.randn(2000)
    shard, out = arena[:1000], arena[1000:]
    collectives.all_gather(out, shard, unit=0, version=0, backward=False).wait()
    assert torch.equal(out, received(shard))


def test_an_exact_shard_inside_out_is_left_to_the_native_collectives() -> None:
    collectives, native = make()
    out = torch.arange(1000)
    collectives.all_gather(out, out[:1000], unit=0, version=0, backward=False).wait()
    assert len(native.calls) == 1


@pytest.mark.parametrize(
    ("out", "named"),
    [
        (torch.empty(999), "out"),
        (torch.empty(1000, dtype=torch.float64), "out"),
        (torch.empty(1000, device="meta"), "out"),
        (torch.empty(10, 100), "out"),
        (torch.empty(2000)[::2], "out"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: Tensor, named: str) -> None:
    collectives, native = make()
    with pytest.raises(ValueError, match=f"^{named} must"):
        collectives.all_gather(out, torch.randn(1000), unit=0, version=0, backward=False)
    assert not native.calls


def test_a_shard_that_is_not_flat_is_refused() -> None:
    collectives, _ = make()
    with pytest.raises(ValueError, match=r"^shard must"):
        collectives.all_gather(
            torch.empty(1000), torch.randn(10, 100), unit=0, version=0, backward=False
        )


def test_parameters_need_no_detaching() -> None:
    collectives, _ = make()
    shard = torch.nn.Parameter(torch.randn(1000))
    out, work = gather(collectives, shard)
    work.wait()
    assert torch.equal(out, received(shard))
    assert shard.grad is None


def test_reduce_scatter_is_passed_on_unchanged() -> None:
    collectives, native = make(2)
    full, out = torch.randn(200), torch.empty(100)
    collectives.reduce_scatter(out, full, unit=4).wait()
    ((passed_out, passed_full, unit),) = native.reductions
    assert passed_out is out
    assert passed_full is full
    assert unit == 4
