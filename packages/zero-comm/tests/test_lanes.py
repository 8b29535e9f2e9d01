"""Jobs beside their caller, on hosts."""

import threading

import pytest
import torch

from zero_comm.lanes import HostLane, open_lane


def test_the_caller_goes_on_while_a_job_runs() -> None:
    lane, may_end = HostLane(), threading.Event()

    def job() -> torch.Tensor:
        assert may_end.wait(60)
        return torch.ones(2)

    future = lane.run(job)
    assert not future.done()
    may_end.set()
    assert future.wait().tolist() == [1, 1]


def test_jobs_run_one_after_another_in_order() -> None:
    lane = open_lane(torch.device("cpu"))
    order: list[int] = []

    def job(i: int) -> torch.Tensor:
        order.append(i)
        return torch.tensor(i)

    futures = [lane.run(lambda i=i: job(i)) for i in range(20)]  # type: ignore[misc]
    assert [f.wait().item() for f in futures] == order == list(range(20))


def test_jobs_record_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not HostLane().run(lambda: weight * 2).wait().requires_grad


def test_after_a_job_that_failed_no_other_runs() -> None:
    lane, ran = HostLane(), []

    def fail() -> torch.Tensor:
        raise ValueError("rank 3 is damaged")

    def later() -> torch.Tensor:
        ran.append(1)
        return torch.ones(1)

    failed, next_one = lane.run(fail), lane.run(later)
    with pytest.raises(RuntimeError, match="ValueError: rank 3 is damaged"):
        failed.wait()
    with pytest.raises(RuntimeError, match="an earlier one failed: ValueError: rank 3 is damaged"):
        next_one.wait()
    assert not ran
