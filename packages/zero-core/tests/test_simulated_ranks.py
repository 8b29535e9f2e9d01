"""Simulated ranks compute like real ones. The fake CUDA has a device's stream hazards."""

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices

from zero_core.comm.control import Lane
from zero_core.testing.oracle import Case, run_ddp, run_engine
from zero_core.testing.ranks import alone, run_on_processes
from zero_core.testing.simulated import SimulatedRanks, simulate
from zero_core.testing.training import assert_same

STEPS = 5  # in the fifth, only rank 0 uses each block's side branch
CASE = Case(stage=3, accumulation=2, clipping=0.5)
OF_DDP = [
    Case(accumulation=2),
    Case(accumulation=3, is_local=True),
    Case(dtype="bf16", accumulation=2),
    Case(dtype="fp16"),
]


def _save(ranks, folder):
    is_simulated = isinstance(ranks, SimulatedRanks)
    traces = [run_engine(CASE, ranks.rank, STEPS, process_group=ranks)]
    if ranks.size == 2:
        traces += [
            run_ddp(case, ranks.rank, STEPS, ranks if is_simulated else None) for case in OF_DDP
        ]
    name = f"{'simulated' if is_simulated else 'process'} {ranks.rank}.pt"
    torch.save([(trace.losses, trace.values) for trace in traces], folder / name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_simulated_ranks_compute_the_bits_of_processes_and_of_ddp(world_size, tmp_path):
    run_on_processes(_save, world_size, tmp_path)
    simulate(_save, world_size, tmp_path)
    for rank in range(world_size):
        found, expected = (
            torch.load(tmp_path / f"{kind} {rank}.pt") for kind in ("simulated", "process")
        )
        assert_same(found, expected)


DEVICE = "cuda:1"


@pytest.mark.cuda
@alone
def test_a_missing_wait_or_record_stream_shows():
    side = torch.Stream(DEVICE, priority=-1)
    source = torch.arange(1000.0, device=DEVICE)
    out = torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)

    def use(*, waits, records, late):
        main = torch.accelerator.current_stream(DEVICE)
        with fake_cuda.held(late):
            value = source * 2
            if waits:
                side.wait_stream(main)
            with side:
                out.copy_(value)
            if records:
                value.record_stream(side)
            del value
            for _ in range(3):  # reuse the freed memory
                _ = source * 3
            (main if late == "copies" else side).synchronize()  # the stream that is not held
        torch.accelerator.synchronize(DEVICE)
        return torch.equal(out.cpu(), torch.arange(1000.0) * 2)

    torch.accelerator.set_device_index(1)
    assert use(waits=True, records=True, late="copies")
    assert not use(waits=True, records=False, late="copies")
    assert not use(waits=False, records=True, late="kernels")


@pytest.mark.cuda
@alone
def test_only_pinned_copies_do_not_block():
    host = torch.arange(100.0).pin_memory()
    assert host.is_pinned()
    assert not torch.zeros(1).is_pinned()
    fake_cuda.reset_counters()
    with fake_cuda.held("copies"):
        device = host.to(DEVICE, non_blocking=True)
        address = host.data_ptr()
        del host
        other = torch.zeros(100, pin_memory=True)
        assert other.data_ptr() != address
        assert fake_cuda.counters(1).syncs == {}
    assert device.tolist() == list(range(100))
    fake_cuda.reset_counters()
    torch.zeros(100).to(DEVICE, non_blocking=True)  # counts as a staged copy
    device.to("cpu", non_blocking=False)
    device.to("cpu", torch.float64, non_blocking=True)  # goes to pinned memory, without a wait
    found = fake_cuda.counters(1).syncs
    assert found == {"staged copy": 1, "copy": 1}, found


def _launch_in_another_order(ranks):
    fake_cuda.set_one_collective_at_a_time(True)
    groups = [ranks.library().subgroup(range(2), Lane.GATHERS) for _ in range(2)]
    outs = [torch.zeros(8, device=ranks.device) for _ in groups]
    for k in (0, 1) if ranks.rank else (1, 0):
        groups[k].all_gather(outs[k], torch.ones(4, device=ranks.device))


@pytest.mark.cuda
@alone
def test_communicators_used_in_different_orders_hang_where_they_share_a_full_device():
    with pytest.raises(RuntimeError, match="waited too long for its peers"):
        simulate_on_devices(_launch_in_another_order, 2, timeout_s=1.0)
