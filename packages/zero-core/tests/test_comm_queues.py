"""Queues of collectives: job order, threads and streams, and exceptions raised by jobs."""

import threading
from functools import partial
from unittest import mock

import pytest
import torch
from support import fake_cuda

from zero_core.comm.queues import HostQueues, StreamQueues
from zero_core.testing import alone

LIMIT_S = 20.0


def _fail():
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_jobs_of_one_queue_run_in_order_and_the_queues_do_not_wait_for_each_other():
    queues, log, may_go = HostQueues(), [], threading.Event()

    def slow():
        assert may_go.wait(LIMIT_S)
        log.append("gather 0")

    gathers = [queues.launch(slow, is_reduction=False)]
    gathers += [
        queues.launch(lambda i=i: log.append(f"gather {i}"), is_reduction=False) for i in (1, 2, 3)
    ]
    queues.launch(lambda: log.append("reduction"), is_reduction=True).wait()
    assert log == ["reduction"]
    may_go.set()
    for work in reversed(gathers):
        work.wait()
    assert log == ["reduction", "gather 0", "gather 1", "gather 2", "gather 3"]


def test_a_job_has_the_modes_of_its_caller_and_no_gradients():
    queues, seen = HostQueues(), []

    def look():
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    queues.launch(look, is_reduction=False).wait()
    with torch.inference_mode():
        buffer = torch.zeros(3)
        queues.launch(look, is_reduction=False).wait()
        queues.launch(lambda: buffer.add_(1), is_reduction=False).wait()
    assert seen == [(False, False), (True, False)]
    assert buffer.tolist() == [1.0, 1.0, 1.0]


def test_a_failed_job_raises_for_each_waiter_and_the_queue_continues():
    _check_failed_job(HostQueues())


def _check_failed_job(queues):
    done = []
    failed = queues.launch(_fail, is_reduction=True)
    queues.launch(lambda: done.append(1), is_reduction=True).wait()
    assert done == [1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            failed.wait()


@pytest.mark.cuda
@alone
def test_queues_of_a_device_are_streams_that_wait_for_the_caller_and_readers_for_the_job():
    device = torch.device("cuda:0")
    queues, reader = StreamQueues(device), torch.Stream(device)
    source, *outs = (torch.zeros(4, device=device) for _ in range(4))
    streams = []

    def job(number):
        assert not torch.is_grad_enabled()
        streams.append(torch.accelerator.current_stream(device))
        outs[number].copy_(source * 2)

    made = mock.patch.object(torch, "Stream", wraps=torch.Stream)
    with made as make, fake_cuda.held("kernels"):  # a host wait would hang
        source.add_(1)  # the jobs read the new value of source
        works = [queues.launch(lambda n=n: job(n), is_reduction=n > 0) for n in range(2)]
        inner = partial(queues.launch, lambda: job(2), is_reduction=False)
        works.append(queues.launch(lambda: inner().wait(), is_reduction=False))
        with reader:
            works[0].wait()
            copied = outs[0].clone()
        for work in works:
            work.wait()
        found = [out + 0 for out in outs]
    reader.synchronize()
    assert [tensor.tolist() for tensor in (copied, *found)] == [[2.0] * 4] * 4
    assert [call.kwargs for call in make.call_args_list] == [{"priority": -1}] * 2
    gathers, reductions, nested = streams
    assert gathers == nested != reductions
    assert torch.accelerator.current_stream(device) not in streams
    _check_failed_job(queues)
