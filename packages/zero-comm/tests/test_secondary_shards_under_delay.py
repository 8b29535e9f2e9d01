"""hpZ under random delays: jobs sleep, and works are waited for in any order."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.simulated_ranks import (
    FOUR_BIT,
    QWZ,
    TIMEOUT_S,
    Deferred,
    Network,
    SimulatedTransport,
    hpz,
    make_collectives,
    run_ranks,
)
from torch import Tensor

WORLD_SIZE, PER_NODE, NUMEL, NUM_UNITS, NUM_STEPS = 4, 2, 301, 5, 6
CPU = torch.device("cpu")
# Scale of the weights. Weights of another version differ by about a seventh of the scale.
LARGEST = 1e5 * NUM_STEPS + 1e5


class _Job:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(TIMEOUT_S)


class LateTransport(SimulatedTransport):
    """A transport that runs jobs in threads and sleeps before and after every exchange.

    Peers read the memory of `zeros` itself instead of a copy, like ranks with shared memory. If a
    rank overwrites the memory too early, a late peer reads wrong values.
    """

    def __init__(self, network: Network, ranks: Sequence[int], me: int, seed: int = 0) -> None:
        super().__init__(network, ranks, me)
        self._random = random.Random(seed * 1000 + me)
        self._queues = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def subgroup(self, ranks: Sequence[int]) -> SimulatedTransport:
        return LateTransport(self.network, [self._ranks[r] for r in ranks], self._me, 1)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = super().zeros(numel, dtype, device)
        assert isinstance(self.network, InPlace)
        self.network.shared.add(found.untyped_storage().data_ptr())
        return found

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Any:
        def late() -> None:
            self._sleep()
            job()

        return _Job(self._queues[is_reduction].submit(late))

    def _exchange(self, name: str, unit: int, rows: Tensor, given: Any) -> Deferred:
        self._sleep()
        work = super()._exchange(name, unit, rows, given)

        def finish() -> None:
            self._sleep()
            work.wait()

        return Deferred(finish)

    def _sleep(self) -> None:
        time.sleep(self._random.choice((0.0, 0.0, 0.001, 0.004)))


class InPlace(Network):
    """A network that passes memory of ``zeros`` without copying it."""

    def __init__(self, world_size: int, ranks_per_node: int) -> None:
        super().__init__(world_size, ranks_per_node)
        self.shared: set[int] = set()

    def send(self, key: Any, source: int, target: int, tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in self.shared:
            super().send(key, source, target, tensor)
            return
        with self._lock:
            box = self._boxes[key, source, target]
        box.put(tensor)


def shard_of(rank: int, unit: int, version: int) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 1e3 * rank + 1e4 * unit + 1e5 * version


HPZ = hpz(2)


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        (HPZ, 0),
        (HPZ, 1),
        ({**QWZ, **HPZ}, 2),
        ({**FOUR_BIT, **HPZ}, 3),
        (QWZ, 4),
    ],
)
def test_no_stale_or_half_written_shard_is_served(config: dict[str, Any], seed: int) -> None:
    exchange_of_all_ranks = threading.Barrier(WORLD_SIZE)

    def program(bare: SimulatedTransport) -> int:
        transport = LateTransport(bare.network, range(WORLD_SIZE), bare.rank, seed)
        collectives = make_collectives(transport, config, PER_NODE)
        order = random.Random(seed + 17 * transport.rank)
        shards = [transport.zeros(NUMEL, torch.float32, CPU) for _ in range(NUM_UNITS)]
        for unit, shard in enumerate(shards):
            shard.copy_(shard_of(transport.rank, unit, 0))
        num_right = 0
        for version in range(NUM_STEPS):
            for backward in (False, True):
                outs = [torch.full((WORLD_SIZE * NUMEL,), -1.0) for _ in shards]
                works = [
                    (
                        unit,
                        collectives.all_gather(
                            outs[unit], shards[unit], unit=unit, version=version, backward=backward
                        ),
                    )
                    for unit in range(NUM_UNITS)
                ]
                if version % 2 and not backward:  # gathers of this version are still running
                    collectives.forget_values()
                    exchange_of_all_ranks.wait(TIMEOUT_S)
                order.shuffle(works)  # each rank waits in another order
                for unit, work in works:
                    work.wait()
                    shards_now = [shard_of(r, unit, version) for r in range(WORLD_SIZE)]
                    error = (outs[unit] - torch.cat(shards_now)).abs().max()
                    num_right += bool(error <= (0.0 if config == HPZ else 0.01) * LARGEST)
            exchange_of_all_ranks.wait(TIMEOUT_S)
            for unit, shard in enumerate(shards):
                shard.copy_(shard_of(transport.rank, unit, version + 1))
        return num_right

    found = run_ranks(InPlace(WORLD_SIZE, PER_NODE), program)
    assert found == [2 * NUM_STEPS * NUM_UNITS] * WORLD_SIZE
