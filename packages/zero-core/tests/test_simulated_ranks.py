"""Simulated ranks compute like real ones. The fake CUDA has a device's stream hazards."""

import pytest
import torch
from support import fake_cuda

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
