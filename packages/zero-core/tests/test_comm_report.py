"""Bytes that a step sends: reported, planned, and counted at the process boundary."""

import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import zero_core
import zero_core.comm.device
from zero_core.testing import Case, make_tower, on_ranks, rows, simulate, spawn, train


def _net():
    net = make_tower()
    net.blocks[2].requires_grad_(False)
    return net


CASES = [
    *(Case(stage) for stage in (0, 2)),
    *(Case(stage, dtype="bf16", accumulation=2) for stage in (1, 3)),
]


def _train(engine, steps):
    num_micro_steps = steps * engine.gradient_accumulation_steps
    train(engine, [rows(n, engine.rank) for n in range(num_micro_steps)])


class _Postman:
    def __init__(self, rank, per_node):
        self.bytes = Counter()
        group = dist.ProcessGroup
        send, receive = group.send, group.recv

        def count(kind, tensor, peer):
            link = "within" if peer // per_node == rank // per_node else "between"
            self.bytes[f"{kind} {link}"] += tensor.nbytes

        def counted_send(own, tensors, peer, tag):
            count("sent", tensors[0], peer)
            return send(own, tensors, peer, tag)

        def counted_receive(own, tensors, peer, tag):
            count("received", tensors[0], peer)
            return receive(own, tensors, peer, tag)

        group.send, group.recv = counted_send, counted_receive


class _NothingShared:
    def __init__(self, *args, **further):
        self.peers = frozenset[int]()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_a_step_sends_what_was_planned(case, world_size, per_node):
    def program(ranks):
        engine = case.build(ranks, _net())
        assert engine.comm_report() == ()
        _train(engine, 2)
        assert engine.comm_report() == planned
        engine.close()

    planned = zero_core.plan(
        _net(), case.config(), world_size, ranks_per_node=per_node, device_type="cpu"
    ).traffic
    assert (len(planned) > 1) == (world_size > 1)
    simulate(program, world_size, ranks_per_node=per_node)


def _check_on_the_wire(rank, world_size, per_node):
    zero_core.comm.device.SharedMemory = _NothingShared  # shared memory bypasses the counter
    postman = _Postman(rank, per_node)
    for stage in range(4):
        engine = Case(stage).build(model=_net())
        _train(engine, 1)
        engine.publish()
        postman.bytes.clear()
        _train(engine, 1)
        engine.publish()
        rows = engine.comm_report()
        within = sum(row.within_node_bytes for row in rows)
        between = sum(row.between_nodes_bytes for row in rows)
        assert within + between > 0
        expected = Counter({"sent within": within, "sent between": between})
        expected.update({"received within": within, "received between": between})
        assert postman.bytes == expected, stage
        # A thread runs the gathers only with several nodes of several ranks each.
        has_thread = "zero_core gathers" in [t.name for t in threading.enumerate()]
        assert has_thread == (1 < per_node < world_size)
        engine.close()


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 2), (4, 2)])
def test_the_report_counts_the_bytes_that_leave_the_process(world_size, per_node):
    spawn(_check_on_the_wire, world_size, per_node, ranks_per_node=per_node)


@on_ranks(2)
def test_bytes_sent_between_steps_count_for_the_second(ranks):
    engine = Case(3).build(ranks, _net())
    _train(engine, 2)
    whole = engine.comm_report()
    with torch.no_grad():
        engine(rows(0, engine.rank))
    assert engine.comm_report() == whole
    _train(engine, 1)
    (before, *others), (after, *same) = whole, engine.comm_report()
    assert after.num_calls == before.num_calls + len(engine.layout.segments)
    assert others == same
    engine.backward(engine(rows(0, engine.rank)))
    engine.clip_grad_norm_(1.0)  # all-reduces the norm, which step() then reuses
    engine.step()
    assert engine.comm_report()[-1].num_calls == 1
    engine.close()
