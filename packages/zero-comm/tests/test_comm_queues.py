"""Asynchronous jobs on the host queue."""

import threading

import pytest
import torch

from zero_comm.transport.queues import HostQueue, open_queue


def test_the_caller_goes_on_while_a_job_runs() -> None:
    queue, may_end = HostQueue(), threading.Event()

    def job() -> torch.Tensor:
        assert may_end.wait(60)
        return torch.ones(2)

    future = queue.run(job)
    assert not future.done()
    may_end.set()
    assert future.wait().tolist() == [1, 1]


def test_jobs_run_one_after_another_in_order() -> None:
    queue = open_queue(torch.device("cpu"))
    order: list[int] = []

    def job(i: int) -> torch.Tensor:
        order.append(i)
        return torch.tensor(i)

    futures = [queue.run(lambda i=i: job(i)) for i in range(20)]  # type: ignore[misc]
    assert [f.wait().item() for f in futures] == order == list(range(20))


def test_jobs_record_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not HostQueue().run(lambda: weight * 2).wait().requires_grad


def test_after_a_job_that_failed_no_other_runs() -> None:
    queue, ran = HostQueue(), []

    def fail() -> torch.Tensor:
        raise ValueError("rank 3 is damaged")

    def later() -> torch.Tensor:
        ran.append(1)
        return torch.ones(1)

    failed, next_one = queue.run(fail), queue.run(later)
    with pytest.raises(RuntimeError, match="ValueError: rank 3 is damaged"):
        failed.wait()
    with pytest.raises(RuntimeError, match="an earlier one failed: ValueError: rank 3 is damaged"):
        next_one.wait()
    assert not ran
