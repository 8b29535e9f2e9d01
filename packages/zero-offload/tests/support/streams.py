"""A device whose copies run late in their own threads, like an accelerator's.

A missing wait can then give wrong numbers even without an accelerator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from zero_offload.memory.streams import Checksum, HostStreams
from zero_offload.protocols import UploadCodec


class Fired(threading.Event):
    """Event that is set after an item of a `_Stream` has run."""

    def query(self) -> bool:
        return self.is_set()


class _Stream(ThreadPoolExecutor):
    """One thread that runs its items in order, each after a short delay."""

    def __init__(self, delay_s: float = 0.002) -> None:
        super().__init__(max_workers=1)
        self._delay_s = delay_s

    def put(self, item: Callable[[], object]) -> Any:
        done = Fired()

        def work() -> None:
            time.sleep(self._delay_s)
            item()
            done.set()

        self.submit(work)
        return done


class LateStreams(HostStreams):
    """Streams whose copies run late, in one queue per direction.

    The caller's thread is the caller's stream. Each copy to the device starts ``up_s`` seconds
    late.
    """

    def __init__(self, up_s: float = 0.002) -> None:
        self.down, self.up, self.checksums = _Stream(), _Stream(up_s), _Stream()

    def to_host(self, target: Tensor, source: Tensor) -> Any:
        return self.down.put(lambda: target.copy_(source))

    def to_device(self, target: Tensor, source: Tensor) -> Any:
        return self.up.put(lambda: target.copy_(source))

    def wait(self, event: Any) -> None:
        event.wait()

    release = arrive = wait

    def checksum(
        self, codec: UploadCodec, values: Tensor, value: Tensor, earlier: Iterable[Any]
    ) -> Checksum:
        before = list(earlier)

        def compute() -> None:
            for event in before:
                event.wait()
            value.copy_(codec.checksum(values))

        return Checksum(value, self.checksums.put(compute))

    def difference_to_device(self, codec: UploadCodec, target: Tensor, difference: Tensor) -> Any:
        return self.up.put(lambda: codec.decode(difference, target))

    def close(self) -> None:
        for stream in (self.down, self.up, self.checksums):
            stream.shutdown()
