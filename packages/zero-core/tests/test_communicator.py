"""Failed and hanging collectives: errors and logs name the collective, its unit and the rank."""

import gc
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from support import fake_cuda
from support.board import Board

from zero_core.comm.communicator import Communicator
from zero_core.comm.control import ControlGroup
from zero_core.comm.place import Place
from zero_core.comm.watch import Beat, DeviceWaits, Watch, start
from zero_core.errors import CollectiveError, ConfigError
from zero_core.testing import alone

EMPTY = torch.empty(0)


class _Work:
    def __init__(self, error=None):
        self._error = error

    def wait(self):
        if self._error is not None:
            raise self._error


class _Reduction(_Work):
    contributions = (torch.ones(1), torch.zeros(1))


class _InPlaceReduction(_Reduction):
    def acknowledge(self):
        return _Work(RuntimeError("Connection reset"))


def _communicator(work, watch=None):
    def start(*args, **keys):
        if isinstance(work, Exception):
            raise work
        return work

    transport = SimpleNamespace(all_gather=start, reduce_scatter=start)
    library = SimpleNamespace(rank=1, world_size=2, all_reduce=lambda values: _Work())
    control = ControlGroup(library, torch.device("cpu"), watch=watch)
    return Communicator(transport, control, {7: "unit 3 (blocks.2)"})


def _gather(communicator):
    return communicator.all_gather(EMPTY, EMPTY, 7, version=1, backward=False)


CLOSED = RuntimeError("Connection closed")
NAMED = r"rank 1: all_gather of unit 3 \(blocks.2\) failed or timed out: Connection closed"


@pytest.mark.parametrize("work", [_Work(CLOSED), CLOSED], ids=["it fails", "it cannot start"])
def test_a_failure_is_named_where_values_are_needed(work):
    communicator = _communicator(work)
    gathered = _gather(communicator)
    for _ in range(2):
        with pytest.raises(CollectiveError, match=NAMED):
            gathered.wait()
    with pytest.raises(CollectiveError, match=r"rank 1: reduce_scatter of unit 3"):
        communicator.reduce_scatter(EMPTY, EMPTY, 7).wait()


@pytest.mark.parametrize("when", ["start", "wait"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 2 GiB"),
        ValueError("message of rank 0: its scale is not finite"),
    ],
    ids=["memory", "value"],
)
def test_errors_that_are_no_failures_of_ranks_stay_what_they_are(error, when):
    communicator = _communicator(error if when == "start" else _Work(error))
    with pytest.raises(type(error), match=f"^{error}$"):
        _gather(communicator).wait()
    with pytest.raises(type(error), match=f"^{error}$"):
        communicator.reduce_scatter(EMPTY, EMPTY, 7).wait()


def test_acknowledgements_are_named_when_they_fail_or_are_missing():
    reading = _communicator(_InPlaceReduction()).reduce_scatter(EMPTY, EMPTY, 7).acknowledge()
    with pytest.raises(CollectiveError, match="acknowledgement of the reduce_scatter of unit 3"):
        reading.wait()
    has_both = type("_WithStatistics", (_InPlaceReduction,), {"norm": EMPTY, "nonfinite": EMPTY})
    for work in (_Reduction(), has_both()):
        communicator = _communicator(work)
        communicator.transport.reduces_in_place = True
        named = rf"unit 3 \(blocks.2\): the collectives .* acknowledges no {type(work).__name__}"
        with pytest.raises(ConfigError, match=named):
            communicator.reduce_scatter(EMPTY, EMPTY, 7)


class _Event:
    def __init__(self):
        self.has_fired = False
        self.error = None

    def query(self):
        if self.error is not None:
            raise self.error
        return self.has_fired


@pytest.fixture
def events(monkeypatch):
    made = []

    def record():
        made.append(_Event())
        return made[-1]

    stream = SimpleNamespace(record_event=record)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    return made


def _watched(device="xpu:1"):
    board, place = Board({}, 1), Place()
    board.take, place.num_steps = lambda: board.table, 2
    waits = DeviceWaits(torch.device(device))
    watch = Watch(board, place, rank=1, world_size=2, within_s=10.0, device_waits=waits)
    return _communicator(_Work(), watch), watch, board


def test_a_collective_that_hangs_on_a_device_is_logged_by_name_once(events, caplog):
    communicator, watch, board = _watched()
    _gather(communicator).wait()
    communicator.reduce_scatter(EMPTY, EMPTY, 7).wait()
    events[0].has_fired = True
    communicator.sum_statistics(EMPTY)
    for now in range(1, 40):
        place = "forward of unit 2 (blocks.1) of step 5"
        peer = Beat(now, place, "", 3, float(now), "", False, 1, "")
        board.table[0] = json.dumps(peer)
        watch.tick(1e6 + now)
    (record,) = caplog.records
    assert "rank 1: reduce_scatter of unit 3 (blocks.2) has not ended for" in record.getMessage()
    assert "rank 0 has been in forward of unit 2 (blocks.1) of step 5 for" in record.getMessage()
    events[1].has_fired = True
    assert watch.device_waits.oldest()[0].endswith(
        "(sum of 0 bytes) in sum of the step's statistics"
    )
    events[2].has_fired = True
    communicator.close()


def test_a_watch_ends_when_the_device_has_failed(events, caplog):
    communicator, watch, _ = _watched()
    _gather(communicator).wait()
    events[0].error = RuntimeError("an illegal memory access was encountered")
    watch.tick(1e6)
    (record,) = caplog.records
    named = "xpu:1 has failed: an illegal memory access was encountered. These collectives may "
    assert record.getMessage() == f"{named}not have ended: all_gather of unit 3 (blocks.2)"
    _gather(communicator).wait()  # does not raise the failure
    communicator.close()
    assert len(caplog.records) == 1


def test_nothing_is_noted_while_a_cuda_graph_is_captured(events, monkeypatch):
    # Events of a captured graph cannot be queried.
    communicator, _, _ = _watched("cuda:1")
    for is_capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=is_capturing: c)
        _gather(communicator).wait()
        assert len(events) == int(not is_capturing)
    events[0].has_fired = True
    communicator.close()


def test_the_thread_of_a_process_ends_with_its_last_watch():
    def threads():
        return [t for t in threading.enumerate() if t.name == "zero_core watch"]

    watches = [Watch(Board({}, 1), Place(), rank=1, world_size=2, within_s=0.1) for _ in range(3)]
    for watch in watches:
        start(watch)
    (thread,) = threads()
    assert thread.daemon
    del watch, watches
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()


def test_collectives_are_ranges_of_a_profile():
    communicator = _communicator(_Work())
    with torch.autograd.profiler.profile() as profile:
        _gather(communicator).wait()
        communicator.reduce_scatter(EMPTY, EMPTY, 7).wait()
    names = {event.name for event in profile.function_events}
    assert {f"rank 1: {v} of unit 3 (blocks.2)" for v in ("all_gather", "reduce_scatter")} <= names


@pytest.mark.cuda
@alone
def test_the_thread_of_a_watch_touches_no_other_device():
    torch.accelerator.set_device_index(1)
    values = torch.zeros(8, device="cuda:1")
    waits = DeviceWaits(torch.device("cuda", 1))
    watch = Watch(Board({}, 1), Place(), rank=1, world_size=2, within_s=0.1, device_waits=waits)
    start(watch)
    fake_cuda.set_delays(seed=1, kernel_s=0.02)
    for _ in range(5):
        values.add_(1)
        waits.note("a collective")
    waits.close()
    assert torch.accelerator.current_stream().query()
    assert fake_cuda.contexts() == [1]
