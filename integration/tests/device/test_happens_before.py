"""Ordering of accesses to memory shared by streams and threads, and necessity of each wait."""

from __future__ import annotations

import ast
import gc
import linecache
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support import fake_cuda
from support.fake_cuda import TraceRecord
from support.fake_cuda.simulated import simulate_on_devices
from support.happens_before import Race, find_races, wait_of
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cpu_adam
import zero_core
import zero_offload
from zero_core.comm.queues import HostQueues
from zero_core.optim.device_tier import DeviceTier
from zero_core.protocols import Work
from zero_core.runtime.host_inputs import HostInputs
from zero_core.testing import Case, SimulatedRanks, Tower, make_tower, rows, run_alone
from zero_core.vertical.segments import PartialGrads
from zero_offload import OffloadedOptimizer
from zero_offload.flat import geometry
from zero_offload.flat.grads import GradLedger
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.stepper import Chunk, SpanMemory
from zero_offload.tier import create_tier, make_device_tier
from zero_offload.tiers.worker import Progress, Published, Worker
from zero_offload.transfers import mover as accumulation
from zero_offload.transfers import mover as differences

WIDTH = 48
GROUP = {**optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2).defaults}
_ROOTS = tuple(package.__path__[0] for package in (zero_core, zero_offload))
_HINTS = ("<genexpr>", "make_way")
"""Functions whose event queries only give hints, so that they order nothing. For example, a
prefetch that would block is postponed."""
_BETWEEN_STEPS = ("offload", "reload")
"""Functions that synchronise the device before another program uses its memory."""

_WAITED_BEFORE = ("stream_after", " begin")
"""Functions whose wait may be superfluous in all `PROGRAMS`, because the host already waited for
the device. They must still run."""


class _PinnedAccesses(TorchDispatchMode):
    """Dispatch mode that traces host accesses of torch operators to pinned memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [(a, a.alias_info) for a in func._schema.arguments]
        values = dict(zip((a.name for a, _ in given), args, strict=False)) | (kwargs or {})
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        reads_none = (torch.ops.aten.empty_like.default, torch.ops.aten.is_pinned.default)
        has_access = not is_view and func not in reads_none
        is_on_host = all(t.is_cpu for t in tensors) and any(t.is_pinned() for t in tensors)
        if has_access and is_on_host:
            written = [values[a.name] for a, alias in given if alias and alias.is_write]
            read = [t for t in tensors if t.is_pinned() and not any(t is w for w in written)]
            fake_cuda.note_host_access(
                str(func), reads=read, writes=[w for w in written if isinstance(w, Tensor)]
            )
        return func(*args, **(kwargs or {}))


def _noted(owner: Any, name: str, before: Any = None, after: Any = None) -> Any:
    """Patch a function to call ``before(*args)`` first and ``after(result, *args)`` at its end."""
    original = getattr(owner, name)

    def run(*args: Any, **keys: Any) -> Any:
        if before is not None:
            before(*args)
        found = original(*args, **keys)
        if after is not None:
            after(found, *args)
        return found

    return mock.patch.object(owner, name, run)


def _hand(how: str, *things: object) -> None:
    for thing in things:
        fake_cuda.note_handover(how, id(thing))


_send, _receive = partial(_hand, "send"), partial(_hand, "receive")


def _handed(job: Callable[..., Any]) -> tuple[Callable[..., Any], object]:
    """Return ``job`` for another thread, and a token that is sent in the trace when it ends."""
    start, end = object(), object()
    _send(start)

    def run(*args: Any) -> Any:
        _receive(start)
        found = job(*args)
        _send(end)
        return found

    return run, end


class _Launched(NamedTuple):
    """A queued job, whose waiters are ordered after its end."""

    work: Work
    end: object

    def wait(self) -> None:
        self.work.wait()
        _receive(self.end)


@contextmanager
def _host_kernels() -> Iterator[None]:
    """Add to the trace the host kernels and thread waits, which the fake device cannot see."""
    ends: dict[int, tuple[Future[Any], object]] = {}
    entries: dict[tuple[int, int, int], Published] = {}
    update, submit, launch = MemoryStepper.update, ThreadPoolExecutor.submit, HostQueues.launch

    def noted_update(
        stepper: MemoryStepper, chunk: Chunk, grads: GradLedger, scale: float, out: SpanMemory
    ) -> None:
        written: list[Tensor] = []

        def noted(start: int, stop: int) -> Tensor:
            written.append(out(start, stop))
            return written[-1]

        read = tree_leaves([grads.segments(run.start, run.stop) for run in chunk.runs])
        read = [part for part in read if isinstance(part, Tensor)]
        fake_cuda.note_host_access("update, gradients", reads=read)
        update(stepper, chunk, grads, scale, noted)
        fake_cuda.note_host_access("update, parameters", writes=written)

    def noted_submit(executor: ThreadPoolExecutor, job: Callable[..., Any], *args: Any) -> Any:
        run, end = _handed(job)
        future = submit(executor, run, *args)
        ends[id(future)] = (future, end)
        return future

    def noted_launch(queues: HostQueues, job: Callable[[], None], *, is_reduction: bool) -> Any:
        run, end = _handed(job)
        return _Launched(launch(queues, run, is_reduction=is_reduction), end)

    def received_result(found: Any, future: Future[Any], *_: Any) -> None:
        if id(future) in ends:
            _receive(ends[id(future)][1])

    def begun(found: Any, progress: Progress, runs: Sequence[tuple[int, int]]) -> None:
        for run, entry in zip(runs, found[0], strict=True):
            entries[id(progress), *run] = entry

    def waited(found: Any, progress: Progress, start: int, stop: int) -> None:
        for (owner, low, high), entry in list(entries.items()):
            if owner == id(progress) and low < stop and start < high:
                _receive(entry)

    access = fake_cuda.note_host_access
    with ExitStack() as stack:
        for context in (
            _PinnedAccesses(),
            mock.patch.object(MemoryStepper, "update", noted_update),
            mock.patch.object(ThreadPoolExecutor, "submit", noted_submit),
            mock.patch.object(HostQueues, "launch", noted_launch),
            _noted(MemoryStepper, "square_sum", lambda _, terms: access("sum", reads=terms)),
            _noted(
                *(accumulation, "add_up"),
                lambda terms, out: access("fold", reads=terms, writes=[out]),
            ),
            # `tolist` reads memory without an operator.
            _noted(
                Tensor, "tolist", lambda t: access("tolist", reads=[t] if t.is_pinned() else [])
            ),
            _noted(Future, "result", after=received_result),
            _noted(Worker, "add", lambda worker, *_: _send(worker)),
            _noted(Worker, "run_next", _receive),
            _noted(Progress, "begin", after=begun),
            _noted(Progress, "publish", lambda progress, entry, _: _send(entry, progress)),
            _noted(Progress, "wait", after=waited),
            _noted(Progress, "drain", after=lambda _, progress: _receive(progress)),
        ):
            stack.enter_context(context)
        yield


def _config(stage: int, accumulation: int = 1, dtype: str = "bf16", **zero: Any) -> dict[str, Any]:
    top = {"gradient_clipping": zero.pop("clipping", 0.0)}
    zero["stage3_param_persistence_threshold"] = 0
    return Case(stage, dtype, accumulation, zero=zero, top=top).config()


OFFLOAD = {"device": "cpu", "pin_memory": True}
STATES = {"offload_optimizer": OFFLOAD}
RESTING = _config(3, offload_param=OFFLOAD, **STATES)
QUANTIZED = _config(
    3, zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz_partition_size=1
)
CASES = {
    "offloaded and clipped": _config(2, clipping=1.0, **STATES),
    "offloaded in fp32": _config(2, dtype="fp32", **STATES),
    "accumulated": _config(2, 2, **STATES),
    "folded": _config(2, 5, clipping=1.0, **STATES),
    "twin": _config(2, offload_optimizer={**OFFLOAD, "ratio": 0.6}),
    "parameters too": RESTING,
    "parameters alone": _config(3, offload_param=OFFLOAD),
}
ON_RANKS = {
    "stage 0": (_config(0), 2),
    "stage 1": (_config(1, 2), 2),
    "stage 2, offloaded": (_config(2, **STATES), 2),
    "stage 3": (_config(3), 2),
    "stage 3, offloaded": (_config(3, **STATES), 2),
    "quantized": (QUANTIZED, 2),
    "quantized, a node each": (QUANTIZED, 1),
    "lossless": (_config(3, zero_lossless_weights=True, zero_lossless_gradients=True), 1),
}


def _net(device: torch.device | str = "cuda:0", depth: int = 3) -> Tower:
    return make_tower(depth, WIDTH).to(device)


def _batch(step: int, device: torch.device | str = "cuda:0") -> Tensor:
    return rows(step, 0, WIDTH).to(device)


def _train(config: dict[str, Any], ranks: SimulatedRanks | None = None) -> None:
    device = torch.device("cuda:0") if ranks is None else ranks.device
    depth = 3 if ranks is None else 2
    engine = zero_core.build(_net(device, depth), config, process_group=ranks)
    for step in range(2):
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(_batch(step, device)))
            engine.step()
    engine.close()


def _train_on_ranks(config: dict[str, Any], per_node: int) -> None:
    def program(ranks: SimulatedRanks) -> None:
        with _PinnedAccesses():  # a mode applies to one thread
            _train(config, ranks)

    simulate_on_devices(program, 2, ranks_per_node=per_node)


def _offloaded_optimizer(ratio: float) -> None:
    """Train in a plain loop, and drop the model while updated values are still being copied."""
    net = _net().bfloat16()
    optimizer = OffloadedOptimizer(optim.AdamW, net.parameters(), lr=1e-2, ratio=ratio)
    for step in range(3):
        optimizer.zero_grad()
        net(_batch(step).bfloat16()).backward()
        optimizer.step()
    optimizer.tier.file_traffic()  # waits for the host


class _SmallSteps:
    """A codec of one byte per element, whose decode() never waits for the device."""

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def checksum(self, values: Tensor) -> Tensor:
        places = torch.arange(values.numel(), device=values.device)
        return (values.view(torch.int16) * (2 * places + 1)).sum()

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        steps = new.view(torch.int16) - old.view(torch.int16)
        fake_cuda.note_host_access("encode", reads=[new], writes=[out])
        out[: steps.numel()].view(torch.int8).copy_(steps)
        is_small = bool((steps.abs() < 128).all())
        return (
            steps.numel() if is_small else 2 * steps.numel()
        )  # twice the size makes the tier send whole values

    def decode(self, difference: Tensor, values: Tensor) -> None:
        values.view(torch.int16).add_(difference.view(torch.int8))


def _tier(ratio: float, codec: _SmallSteps | None = None, units: int = 4) -> None:
    """Step a tier twice, with gradients on another stream. ``codec`` uploads differences."""
    side = torch.Stream("cuda:0")
    numel = 4096 if units > 1 else 900
    flat = (1.0 + torch.rand(units * numel)).to("cuda:0", torch.bfloat16)
    shards = [(i * numel, flat[i * numel : (i + 1) * numel].clone()) for i in range(units)]
    block = {"pin_memory": True, "ratio": ratio, "lossless_upload": codec is not None}
    tier = create_tier(
        numel=units * numel,
        pieces=[(start, start + numel, 0) for start, _ in shards],
        params=shards,
        device=torch.device("cuda:0"),
        optimizer_class=optim.AdamW,
        groups=[GROUP],
        config={"offload_optimizer": block},
        adam_kernel=cpu_adam,
        device_tier=make_device_tier,
        upload_codec=codec,
    )
    if codec is not None:
        tier.write_state("master_weight", 0, flat.float())
    for _ in range(2):
        if units > 1:
            tier.wait_params(0, tier.geometry.numel)
        side.wait_stream(torch.accelerator.current_stream())
        for start, shard in reversed(shards):
            with side:
                tier.offer_grad(start, torch.ones_like(shard))
        for _, shard in shards if units > 1 else ():
            shard.square()
        tier.step([GROUP], range(units), grad_scale=1.0)
    tier.file_traffic()  # waits for the host
    side.wait_stream(torch.accelerator.current_stream())  # before its memory is reused


def _device_tier() -> None:
    """Run two steps and a write of a device tier with shards on the host, without synchronising."""
    shard = torch.zeros(1024, dtype=torch.bfloat16).pin_memory()
    tier = DeviceTier(
        numel=1024,
        pieces=[(0, 1024, 0)],
        params=[(0, shard)],
        device=torch.device("cuda:0"),
        optimizer_class=optim.AdamW,
        groups=[GROUP],
    )
    for _ in range(2):
        tier.offer_grad(0, torch.ones(1024).to("cuda:0"))
        tier.step([GROUP], [0], grad_scale=1.0)
    tier.write_state("master_weight", 0, torch.zeros(1024))
    tier.wait_params(0, 1024)


def _fill(sizes: range) -> None:
    for nbytes in sizes:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda:0").fill_(1)


def _reused_memory() -> None:
    """Gather all units into buffers whose memory was just freed by other work."""
    engine = zero_core.build(_net(), RESTING)
    _fill(range(512, 32768, 512))
    with engine.gathered():
        pass
    engine.close()


def _offloaded_states() -> None:
    """Offload states whose memory another stream allocated and reuses during the copy."""
    other = torch.Stream(device="cuda:0")
    with other:
        engine = zero_core.build(_net(), _config(3))
        torch.accelerator.synchronize()
    engine.offload_states(non_blocking=True)
    with other:
        _fill(range(512, 131072, 512))
    engine.reload_states()
    engine.close()


def _edited_parameters() -> None:
    """Overwrite values on the host right after a forward that fetched them."""
    engine = zero_core.build(_net(), RESTING)
    with torch.no_grad():
        engine(_batch(0))
    for flat in engine.sharded_state.params:
        flat.write(0, torch.zeros(flat.segment.padded_numel))
    engine.close()


def _inputs_on_the_host() -> None:
    """Keep saved inputs on the host. One input is fetched ahead and never used."""
    inputs = HostInputs(torch.device("cuda:0"))
    kept = []
    for is_kept in (True, False):  # whether the input's device memory stays in use
        xs = [torch.ones(1024, device="cuda:0", requires_grad=True) for _ in range(2)]
        outs = []
        for x in xs:
            with inputs.context():
                y = 2 * x
                outs.append(y.square())
            kept += [y] * is_kept
        del y
        torch.ones(1024, device="cuda:0").square()  # may reuse fetched memory
        outs.pop().sum().backward()
        outs.clear()


def _accumulated_with_late_copies() -> None:
    """Accumulate while copies are slow. A query that finds a copy done orders accesses too."""
    fake_cuda.set_delays(seed=1, copy_s=0.02)
    _train(CASES["accumulated"])
    fake_cuda.set_delays()


def _fetched_on_another_stream() -> None:
    copies = HostInputs(torch.device("cuda:0"))
    stored = copies.store(torch.ones(1024, device="cuda:0").square())
    assert stored is not None
    with torch.Stream("cuda:0"):
        copies.take(stored).square()
    copies.store(torch.ones(1024, device="cuda:0").square())  # dropped at once
    torch.ones(1024, device="cuda:0").square()  # may reuse its memory


def _gradients_on_the_host() -> None:
    sums = PartialGrads(3, HostInputs(torch.device("cuda:0")))
    for _ in range(2):
        for number in range(3):
            sums.put(number, 0, torch.full((1024,), float(number), device="cuda:0").square())
            sums.end_turn(number)
        for number in range(3):
            sums.prefetch((number + 1) % 3, [0])
            for _, grad in sums.take_all(number):
                grad.add_(1.0)
            sums.end_turn(number)
    sums.settle()


def _saved_beside_training() -> None:
    """Save asynchronously: threads copy a step's states while the next steps change the states."""
    engine = zero_core.build(_net(), _config(3))
    with TemporaryDirectory() as folder:
        for step in range(2):
            engine.backward(engine(_batch(step)))
            engine.step()
            saved = engine.async_save(folder)
        saved.result()
    engine.close()


PROGRAMS: dict[str, Callable[[], None]] = {
    **{name: partial(_train, config) for name, config in CASES.items()},
    **{f"2 ranks, {name}": partial(_train_on_ranks, *how) for name, how in ON_RANKS.items()},
    "plain loop": partial(_offloaded_optimizer, 1.0),
    "plain loop, twin": partial(_offloaded_optimizer, 0.5),
    "tier": partial(_tier, 1.0),
    "twin tier": partial(_tier, 0.5),
    "tier, differences up": partial(_tier, 1.0, _SmallSteps()),
    "one run, differences up": partial(_tier, 1.0, _SmallSteps(), 1),
    "device tier": _device_tier,
    "inputs on the host": _inputs_on_the_host,
    "accumulated, late copies": _accumulated_with_late_copies,
    "fetched on another stream": _fetched_on_another_stream,
    "gradients on the host": _gradients_on_the_host,
    "reused memory": _reused_memory,
    "offloaded states": _offloaded_states,
    "saved beside training": _saved_beside_training,
    "edited parameters": _edited_parameters,
}


NUM_TRIES = 3
"""Runs of which one must show a race if a wait is dropped. Whether memory is reused before its copy
ends depends on the threads' timing."""


def _check() -> None:
    geometry.PUBLISHED_NUMEL = 1024
    differences.SHORTEST_NBYTES = 256
    gc.freeze()  # excludes imported objects from each collection
    ran = {name: set[str]() for name in PROGRAMS}
    shown, names = set[str](), list(PROGRAMS)
    for _ in range(NUM_TRIES):
        for name in names:
            with _host_kernels():
                fake_cuda.start_trace()
                PROGRAMS[name]()
                gc.collect()  # frees memory held by reference cycles within the trace
                trace = fake_cuda.stop_trace()
            sites, hints = _sites(trace)
            races = list(_races(trace, hints))
            assert not races, f"{name}: {'; '.join(map(str, races[:5]))}"
            ran[name] |= sites.keys()
            shown |= _shown(trace, {s: n for s, n in sites.items() if s not in shown}, hints)
        all_ran = set().union(*ran.values())
        missed = {site for site in all_ran - shown if not site.endswith(_WAITED_BEFORE)}
        names = [name for name in names if ran[name] & missed]
    assert not missed, f"dropping these waits is not noticed: {sorted(missed)}"
    not_run = sorted(_waits_in_source() - {site.split(" ")[1] for site in all_ran})
    assert not not_run, f"these waits did not run: {not_run}"


def _sites(trace: Sequence[TraceRecord]) -> tuple[dict[str, list[int]], list[int]]:
    """Return trace positions of waits by source line, and of event queries that are only hints."""
    sites: dict[str, list[int]] = defaultdict(list)
    hints = []
    for position, record in enumerate(trace):
        # Frames of the fake device are found too, and dropped below.
        site = wait_of(record, (*_ROOTS, fake_cuda.__path__[0]))
        if record.kind == "event_query" and site.endswith(_HINTS):
            hints.append(position)
        elif record.kind == "device_synchronize" and site.endswith(_BETWEEN_STEPS):
            continue
        elif record.kind == "event_query" and ".query(" not in _line(site):
            continue  # torch's allocator of pinned memory searches for free blocks
        elif site.startswith(_ROOTS) and "/testing/" not in site:
            sites[f"{record.kind} {site}"].append(position)
    return sites, hints


def _line(site: str) -> str:
    path, _, place = site.partition(":")
    return linecache.getline(path, int(place.split(" ")[0])) if place else ""


def _races(trace: Sequence[TraceRecord], without: list[int]) -> Iterator[Race]:
    workers = {record.thread for record in trace if record.kind == "host_access"} - {
        record.thread for record in trace if record.kind == "launch" and record.stream == 0
    }
    return find_races(trace, workers=workers, without=without)


def _shown(
    trace: Sequence[TraceRecord], sites: Mapping[str, list[int]], hints: list[int]
) -> set[str]:
    """Return the sites whose removal alone leaves a race, found by bisection."""
    dropped = [*hints, *chain.from_iterable(sites.values())]
    if not sites or not any(True for _ in _races(trace, dropped)):
        return set()
    if len(sites) == 1:
        return set(sites)
    names, half = list(sites), len(sites) // 2
    return set().union(
        *(_shown(trace, {s: sites[s] for s in of}, hints) for of in (names[:half], names[half:]))
    )


def _waits_in_source() -> set[str]:
    """Return each stream wait in the packages' sources as ``file:line``."""
    found: set[str] = set()
    waits = ("wait_event", "wait_stream", "record_stream")
    for path in chain.from_iterable(Path(root).rglob("*.py") for root in _ROOTS):
        text = path.read_text()
        if "testing" in path.parts or not any(name in text for name in waits):
            continue
        for node in ast.walk(ast.parse(text)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in waits:
                found.add(f"{path}:{node.lineno}")
    return found


@pytest.mark.cuda
def test_nothing_is_unordered_and_every_wait_is_needed() -> None:
    run_alone(_check)
