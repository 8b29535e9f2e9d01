"""Simulated ranks: one thread each, with collectives that copy tensors between threads.

The network counts the bytes that each rank sends within its node and to other nodes. Tensors are
copied when a collective starts.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_comm import create_collectives

TIMEOUT_S = 60.0
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
FOUR_BIT = {**QWZ, "zero_quantized_weights_format": "int4_difference"}


def hpz(size: int) -> dict[str, Any]:
    return {"zero_hpz_partition_size": size}


def make_collectives(
    transport: SimulatedTransport, config: dict[str, Any], per_node: int, frozen: Sequence[int] = ()
) -> Any:
    return create_collectives(
        transport,
        rank=transport.rank,
        world_size=transport.world_size,
        config=config,
        ranks_per_node=per_node,
        frozen=frozen,
    )


class Deferred:
    """Work whose effect happens at the first ``wait``."""

    def __init__(self, effect: Callable[[], None]) -> None:
        self._effect: Callable[[], None] | None = effect

    def wait(self) -> None:
        effect, self._effect = self._effect, None
        if effect is not None:
            effect()


class Network:
    """Copies tensors between ranks. ``within`` and ``between`` count bytes sent by each rank."""

    def __init__(self, world_size: int, ranks_per_node: int) -> None:
        self.world_size = world_size
        self.ranks_per_node = ranks_per_node
        self.within = [0] * world_size
        self.between = [0] * world_size
        self.calls: dict[str, int] = defaultdict(int)
        self.tamper: Callable[[int, Tensor], None] | None = None
        self._lock = threading.Lock()
        self._boxes: dict[Any, queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def send(self, key: Any, source: int, target: int, tensor: Tensor) -> None:
        carried = tensor.clone()
        if self.tamper is not None:
            self.tamper(source, carried)
        with self._lock:
            is_near = source // self.ranks_per_node == target // self.ranks_per_node
            (self.within if is_near else self.between)[source] += tensor.nbytes
            box = self._boxes[key, source, target]
        box.put(carried)

    def receive(self, key: Any, source: int, target: int) -> Tensor:
        with self._lock:
            box = self._boxes[key, source, target]
        return box.get(timeout=TIMEOUT_S)


class SimulatedTransport:
    """`TransportCollectives` of one simulated rank. Jobs run immediately."""

    reduces_in_place = False

    def __init__(self, network: Network, ranks: Sequence[int], me: int) -> None:
        self.network = network
        self._ranks = list(ranks)
        self._me = me

    @property
    def rank(self) -> int:
        return self._ranks.index(self._me)

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Deferred:
        return self._exchange(
            "all_gather", unit, out.view(self.world_size, -1), [shard] * self.world_size
        )

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Deferred:
        rows = parts.view(self.world_size, -1)
        return self._exchange("all_to_all", unit, out.view(self.world_size, -1), rows)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Deferred:
        rows = torch.empty_like(full).view(self.world_size, -1)
        work = self._exchange("reduce_scatter", unit, rows, full.view(self.world_size, -1))

        def finish() -> None:
            work.wait()
            out.copy_(rows.float().sum(0))

        return Deferred(finish)

    def subgroup(self, ranks: Sequence[int]) -> SimulatedTransport:
        return SimulatedTransport(self.network, [self._ranks[r] for r in ranks], self._me)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Deferred:
        job()
        return Deferred(lambda: None)

    def _exchange(
        self, name: str, unit: int, rows: Tensor, given: Sequence[Tensor] | Tensor
    ) -> Deferred:
        if self._me == 0:
            self.network.calls[name] += 1
        key = (name, unit, tuple(self._ranks))
        rows[self.rank].copy_(given[self.rank])
        for place, peer in enumerate(self._ranks):
            if peer != self._me:
                self.network.send(key, self._me, peer, given[place])

        def finish() -> None:
            for place, peer in enumerate(self._ranks):
                if peer != self._me:
                    rows[place].copy_(self.network.receive(key, peer, self._me))

        return Deferred(finish)


def run_ranks(network: Network, program: Callable[[SimulatedTransport], Any]) -> list[Any]:
    """Return the results of ``program`` on every rank, or raise the first error."""
    results: list[Any] = [None] * network.world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = SimulatedTransport(network, range(network.world_size), rank)
        try:
            results[rank] = program(transport)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(network.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
