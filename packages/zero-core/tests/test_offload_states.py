"""States offloaded from the device and reloaded with the same bits."""

import itertools
from contextlib import contextmanager
from threading import Barrier

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices

import zero_core
from zero_core.runtime import device_states
from zero_core.testing import Case, RootAndBlocks, alone, assert_same, batch, on_ranks, simulate
from zero_core.testing import train as trained
from zero_core.testing.equal import micro_step

CASES = [
    Case(stage=stage, dtype=dtype, accumulation=accumulation, clipping=0.5)
    for stage, (dtype, accumulation) in itertools.product(range(4), [("fp32", 1), ("bf16", 2)])
]
ALL = frozenset(zero_core.StatePart)


def train(ranks, case, parts, non_blocking, done):
    engine = case.build(ranks)
    losses = []
    for step, micro in itertools.product(range(2), range(case.accumulation)):
        losses.append(micro_step(engine, step, micro))
        if parts is not None:
            engine.offload_states(parts, pin_memory=step % 2 == 0, non_blocking=non_blocking)
            done.wait()
            assert engine.offloaded_states == parts
            engine.reload_states(non_blocking=non_blocking)
            assert not engine.offloaded_states
    values = engine.full_state_dict()
    engine.close()
    return [losses, values]


@pytest.mark.parametrize(
    ("device", "world_size"),
    [("cpu", 2), pytest.param("cuda", 2, marks=[pytest.mark.slow, pytest.mark.cuda])],
)
@alone
def test_training_goes_on_with_the_same_bits(device, world_size):
    run = simulate
    if device == "cuda":
        run = simulate_on_devices
        fake_cuda.set_delays(seed=1, kernel_s=5e-5, copy_s=5e-4)
    choices = itertools.cycle([ALL, *(frozenset([part]) for part in zero_core.StatePart), ALL])
    # torch's empty_cache waits for the devices of all ranks. No rank may use its device meanwhile.
    done = Barrier(world_size)
    for number, case in enumerate(CASES):
        expected = run(train, world_size, case, None, False, done)
        parts, is_late = next(choices), number % 2 == 1
        assert_same(run(train, world_size, case, parts, is_late, done), expected)


def _allocated(ranks):
    torch.accelerator.synchronize(ranks.device)
    return torch.accelerator.memory_allocated(ranks.device)


def _measure(ranks, stage, done):
    before = _allocated(ranks)
    engine = Case(stage=stage, dtype="bf16").build(ranks, RootAndBlocks(384, 3, 1.0))
    trained(engine, [torch.ones(1, 384, device=ranks.device)])
    held = _allocated(ranks) - before
    engine.offload_states()
    done.wait()
    assert _allocated(ranks) - before < 0.01 * held
    engine.reload_states()
    assert 0.9 * held < _allocated(ranks) - before <= 1.01 * held
    for part in zero_core.StatePart:
        engine.offload_states([part])
        done.wait()
    assert _allocated(ranks) - before < 0.01 * held
    engine.close()


@pytest.mark.cuda
@alone
def test_99_percent_of_the_device_is_free():
    for stage in range(4):
        simulate_on_devices(_measure, 2, stage, Barrier(2))


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_what_needs_the_states_says_so(ranks, stage):
    engine = Case(stage=stage).build(ranks)
    micro_step(engine, 0)
    inputs = batch(1, 0, ranks.rank)
    loss = engine(**inputs)["loss"]
    engine.offload_states()
    engine.offload_states()
    advice = "parameters.* are offloaded: call reload_states"
    verbs = [
        lambda: engine(**inputs),
        lambda: engine.module.head(torch.zeros(1, 11)),
        lambda: engine.backward(loss),
        engine.step,
        engine.idle_step,
        engine.publish,
        engine.full_state_dict,
        engine.gathered,
        lambda: engine.save_checkpoint("nowhere"),
        lambda: engine.load_checkpoint("nowhere"),
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.states.get_full("gain"),
        lambda: engine.own_part(engine.module.gain),
        engine.unwrap,
        engine.leave_shards,
    ]
    for verb in verbs:
        with pytest.raises(RuntimeError, match=advice):
            verb()
    with pytest.raises(RuntimeError, match=r"reload_states|inplace operation|full_state_dict"):
        engine.module.state_dict()
    for param in engine.module.parameters():
        with pytest.raises(RuntimeError, match="was read while parameters are offloaded"):
            param.sum()
    with pytest.raises(RuntimeError, match=f"inplace operation|{advice}"):
        loss.backward()
    engine.reload_states()
    engine.reload_states()
    with pytest.raises(ValueError, match=r"lp_params.*optimizer_states"):
        engine.offload_states(["lp_params"])
    with engine.gathered(), pytest.raises(RuntimeError, match=r"within .*gathered"):
        engine.offload_states()
    engine.offload_states(["optimizer_states"])
    assert torch.isfinite(engine(**inputs)["loss"])  # a forward needs only the parameters
    with pytest.raises(RuntimeError, match="optimizer_states are offloaded"):
        engine.step()
    engine.reload_states()
    micro_step(engine, 1)
    engine.close()


@contextmanager
def _without_memory(method, number):
    calls, plain = itertools.count(), getattr(device_states._HostCopy, method)

    def fail(self, *args, **keys):
        if next(calls) == number:
            raise RuntimeError("can't allocate memory")
        return plain(self, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_states._HostCopy, method, fail)
        with pytest.raises(RuntimeError, match="allocate"):
            yield


@pytest.mark.parametrize("stage", [0, 3])
def test_what_fails_for_lack_of_memory_loses_nothing_and_can_be_repeated(stage):
    engine, inputs = Case(stage=stage).build(), batch(0, 0, 0)
    trained(engine, [inputs])
    expected, loss = engine.full_state_dict(), engine(**inputs)["loss"].item()
    with _without_memory("__init__", 3):
        engine.offload_states()
    assert not engine.offloaded_states
    assert engine(**inputs)["loss"].item() == loss
    engine.offload_states()
    for number in (0, 3):
        with _without_memory("restore", number):
            engine.reload_states()
        assert engine.offloaded_states == ALL
        with pytest.raises(RuntimeError, match="reload_states"):
            engine(**inputs)
    engine.reload_states()
    assert engine(**inputs)["loss"].item() == loss
    assert_same(engine.full_state_dict(), expected)
    trained(engine, [inputs])
