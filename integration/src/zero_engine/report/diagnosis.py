"""Causes that limit a run, and the change with the largest predicted gain.

Each rule detects one cause, and predicts from the run's records what a step costs without it. The
verdict names the cause with the largest gain. Two causes precede all others: gradients that are not
finite, and memory that is nearly used up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from zero_core.footprint import format_bytes
from zero_engine.report.run import INSIDE, WAITS, Measured, RankStep
from zero_engine.terminal import count

_LEAST = 0.08
"""Smallest share of a step that counts as a cause."""
_FULL = 0.9
"""Share of the memory limit above which memory counts as a cause."""
_SKIPPED = 0.02
_SMALL = 4
_USUAL_SCALING = 0.85
"""Usual speedup by several threads, relative to the ideal."""
_COPY_RATIO = 3.0
"""Approximate speedup of copies by pinned memory."""


@dataclass(frozen=True)
class Cause:
    """Cause of lost time, memory or steps, and a change that removes it.

    Attributes:
        sentence: end of the sentence "the limit is ...".
        paste: key of the configuration, or command, that makes the change.
        before, after: cost now, and predicted after the change, in ``unit``.
        unit: "s" per update of the parameters, or "bytes" of the fullest rank.
        rank: priority: 0 precedes 1.
    """

    key: str
    sentence: str
    change: str
    paste: str
    before: float
    after: float
    why: str
    unit: str = "s"
    rank: int = 1

    @property
    def gain(self) -> float:
        return 1.0 - self.after / self.before if self.before else 0.0

    @property
    def gain_text(self) -> str:
        if self.unit == "bytes":
            now, then = format_bytes(round(self.before)), format_bytes(round(self.after))
            return f"{now} \u2192 {then} ({-self.gain:+.0%})"
        return f"{show_s(self.before)} \u2192 {show_s(self.after)} an update ({-self.gain:+.0%})"


def show_s(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.2g} \u00b5s"


def diagnose(found: Measured, memory_limit: int | None) -> list[Cause]:
    causes = [*_not_finite(found), *_memory(found, memory_limit)]
    rules = (_straggler, _threads, _file, _host, _pageable, _link, _small_batch, _outside)
    for rule in rules if found.has_times else ():
        causes += rule(found)
    return sorted(causes, key=lambda cause: (cause.rank, -cause.gain))


def _not_finite(found: Measured) -> Iterator[Cause]:
    steps = [step for step in found.run.ranks[0].steps if step.step > found.run.run.first_step]
    skipped = [step for step in steps if not step.is_taken]
    if len(skipped) <= max(_SKIPPED * len(steps), 1):
        return
    names = Counter(re.split(r"[:;]", step.why_skipped)[0] for step in skipped)
    ranks = Counter(
        rank
        for step in skipped
        for text in re.findall(r"batch(?:es)? of ranks? ([\d, ]+)", step.why_skipped)[:1]
        for rank in text.replace(",", " ").split()
    )
    culprits = [rank for rank, num in ranks.items() if num >= len(skipped) / 2]
    if not culprits or len(culprits) == found.run.run.world_size > 1:
        who = "on all ranks" if culprits else "on a rank that is not known"
    else:
        who = f"in the batches of rank {', '.join(sorted(culprits))}"
    name = names.most_common(1)[0][0]
    taken = len(steps) - len(skipped)
    per_update = found.seconds + found.skipped_s * len(skipped) / max(taken, 1)
    yield Cause(
        "nan",
        f"gradients that are not finite {who}: {len(skipped)} of {len(steps)} steps were skipped, "
        f"first because of {name}",
        f"look at the data and the loss {who}",
        "torch.autograd.set_detect_anomaly(True)  # on that rank, for one step",
        per_update,
        found.seconds,
        "time per update that is taken, if no step is skipped",
        rank=0,
    )


def _memory(found: Measured, limit: int | None) -> Iterator[Cause]:
    moment, transient = transient_bytes(found)[1], _activation_bytes(found)
    checkpointing = found.run.run.config.get("activation_checkpointing") or {}
    peak = max(rank.peak_bytes for rank in found.ranks)
    num_blocks = max(len(found.run.run.units) - 1, 1)
    if checkpointing.get("enabled") or num_blocks < 2 or not limit:
        return
    if peak < _FULL * limit or transient < _LEAST * peak:
        return
    # Recomputation keeps each block's input, about a twelfth of a transformer block's activations,
    # and all activations of one block.
    saved = transient * (1.0 - 1.0 / num_blocks) * (1.0 - 1.0 / 12.0)
    yield Cause(
        "recomputation",
        f"memory, {peak / limit:.0%} of which is used: activations take {format_bytes(transient)} "
        f"at the tallest moment, {moment}, as no block is recomputed",
        "recompute the blocks' activations in backward",
        '"activation_checkpointing": {"enabled": true}',
        float(peak),
        peak - saved,
        f"activations of {num_blocks} blocks less those of one and the blocks' inputs",
        unit="bytes",
        rank=0,
    )


def transient_bytes(found: Measured) -> tuple[int, str]:
    best, moment = 0, "a step"
    for rank in found.run.ranks:
        for detail in rank.details[-1:]:
            if detail.memory:
                base = detail.memory[0][1]
                _, top, name = max(detail.memory, key=lambda row: row[1])
                if top - base > best:
                    best, moment = top - base, name
    return best, moment


def _activation_bytes(found: Measured) -> int:
    """Estimate a step's bytes of activations by the growth of memory from block to block."""
    best, num_blocks = 0.0, len(found.run.run.units) - 1
    for rank in found.run.ranks:
        for detail in rank.details:
            held: dict[int, int] = {}
            for _, size, place in detail.memory:
                unit = re.match(r"forward of unit (\d+)", place)
                if unit is not None:
                    held.setdefault(int(unit[1]), size)
            blocks = sorted(number for number in held if number > 1)
            if len(blocks) > 1:
                first, last = blocks[0], blocks[-1]
                best = max(best, (held[last] - held[first]) / (last - first) * num_blocks)
    return round(max(best, transient_bytes(found)[0]))


def _straggler(found: Measured) -> Iterator[Cause]:
    if len(found.ranks) < 2:
        return
    own = [rank.own_s for rank in found.ranks]
    slow = max(range(len(own)), key=own.__getitem__)
    peers = [rank for number, rank in enumerate(found.ranks) if number != slow]
    usual = median(rank.own_s for rank in peers)
    excess = own[slow] - usual
    waits = median(sum(rank.waits.values()) for rank in peers)
    if excess < _LEAST * found.seconds or waits < excess / 2:
        return
    places = found.ranks[slow].places
    place = max(
        places, key=lambda name: places[name] - median(p.places.get(name, 0.0) for p in peers)
    )
    yield Cause(
        "straggler",
        f"a straggler: rank {slow} needs {own[slow] / usual:.2g} times as long as the "
        f"others for its own work, most of it in {place}, and they wait for it",
        f"give rank {slow} as much work and as fast a device as the others, or find what else runs "
        "there",
        f"top -b -n1 | head -15  # on the host of rank {slow}: "
        f"{found.run.ranks[slow].run.environment.get('host', '')}",
        found.seconds,
        found.seconds - excess,
        f"rank {slow}'s own work as long as the others' median",
    )


def _threads(found: Measured) -> Iterator[Cause]:
    run = found.run.run
    environment = run.environment
    threads, cores = int(environment.get("threads", 0)), int(environment.get("cores", 0))
    fair = cores // max(run.ranks_per_node, 1)
    if environment.get("device") != "cpu" or not threads or fair < 2 * threads:
        return
    scaling = _USUAL_SCALING * fair / threads
    compute = max(rank.compute_s for rank in found.ranks)
    after = found.seconds - compute * (1.0 - 1.0 / scaling)
    if found.seconds - after < _LEAST * found.seconds:
        return
    yield Cause(
        "threads",
        f"{count(threads, 'thread')} per rank where {fair} cores are there for it: "
        f"{1 - threads / fair:.0%} of the machine has nothing to do",
        f"compute with {fair} threads per rank",
        f"export OMP_NUM_THREADS={fair}",
        found.seconds,
        after,
        f"forward, backward and step {scaling:.2g} times as fast, as usual",
    )


def _offload(found: Measured) -> Mapping[str, Any]:
    return dict(found.run.run.config["zero_optimization"]["offload_optimizer"])


def _file(found: Measured) -> Iterator[Cause]:
    wait, on_file = found.wait("update"), found.lane("file wait")
    if _offload(found).get("device") != "nvme" or min(wait, on_file) < _LEAST * found.seconds:
        return
    # Without the disk, the part of the update that does not overlap the ranks' work remains.
    busy = found.lane("host")
    left = max(0.0, busy - on_file - max(0.0, busy - wait))
    yield Cause(
        "nvme",
        f"the disk: optimizer state on NVMe, for which the host's update waits "
        f"{show_s(on_file)} of each step and the ranks wait {show_s(wait)}",
        "keep the optimizer state in host memory, as far as it fits",
        '"offload_optimizer": {"device": "cpu"}',
        found.seconds,
        found.seconds - wait + left,
        f"of the wait for the host {show_s(left)} are left, in which it updates",
    )


def _host(found: Measured) -> Iterator[Cause]:
    wait, busy = found.wait("update"), found.lane("host")
    run = found.run.run
    numel = run.shares.get("host", 0)
    if not numel or wait < _LEAST * found.seconds or found.lane("file wait") > wait / 2:
        return
    if busy < wait / 2:  # the host itself waits for copies
        return
    # Moving an element to the device saves the host's time for it, and costs the device's.
    per_host = busy / numel
    per_device = per_host if run.environment.get("device") == "cpu" else per_host / 20.0
    moved = min(wait / (per_host + per_device), numel)
    ratio = (numel - moved) / max(sum(run.shares.values()), 1)
    yield Cause(
        "host",
        f"the host: it updates {numel:,} elements in {show_s(busy)}, and the ranks wait "
        f"{show_s(wait)} of each step for it",
        f"leave {1 - ratio:.0%} of the optimizer state on the device",
        f'"offload_optimizer": {{"device": "{_offload(found).get("device")}", '
        f'"ratio": {ratio:.2f}}}',
        found.seconds,
        found.seconds - wait + moved * per_device,
        f"{moved:,.0f} elements less for the host at {show_s(per_host * 1e6)} a million",
    )


def _pageable(found: Measured) -> Iterator[Cause]:
    run, offload = found.run.run, _offload(found)
    is_pageable = offload.get("device") == "cpu" and not offload.get("pin_memory", True)
    copies = found.lane("copies") or found.wait("update")
    if run.environment.get("device") == "cpu" or not is_pageable:
        return
    if copies < _LEAST * found.seconds:
        return
    yield Cause(
        "pageable",
        f"copies through pageable memory: {show_s(copies)} of each step, as "
        "offload_optimizer.pin_memory is false",
        "lock the pages of the buffers that are copied",
        '"offload_optimizer": {"device": "cpu", "pin_memory": true}',
        found.seconds,
        found.seconds - copies * (1.0 - 1.0 / _COPY_RATIO),
        f"copies {_COPY_RATIO:g} times as fast, as page-locked memory usually is",
    )


def _link(found: Measured) -> Iterator[Cause]:
    zero = found.run.run.config["zero_optimization"]
    gather, reduce = found.wait("all_gather"), found.wait("reduce_scatter")
    wait = gather + reduce
    if wait < _LEAST * found.seconds:
        return
    if zero["stage"] == 3 and gather >= wait / 4:
        yield Cause(
            "link",
            f"the link between the ranks: they wait {show_s(wait)} of each step for collectives of "
            "stage 3, which gathers the parameters in forward and once more in backward",
            "go back to stage 2 where the parameters fit, which gathers them once a step",
            '"zero_optimization": {"stage": 2}',
            found.seconds,
            found.seconds - gather / 2,
            "half of the waits for gathers, as half of their bytes are sent",
        )
        return
    yield Cause(
        "link",
        f"the link between the ranks: they wait {show_s(wait)} of each step for "
        f"{WAITS['reduce_scatter'] if reduce > gather else WAITS['all_gather']}",
        "send gradients in fewer bits",
        '"zero_optimization": {"zero_quantized_gradients": true}',
        found.seconds,
        found.seconds - reduce * 0.7,
        "8 bits within the node and 4 between nodes in place of 32 or 16",
    )


def _small_batch(found: Measured) -> Iterator[Cause]:
    rank, run = found.ranks[0], found.run.run
    micro = int(run.config["train_micro_batch_size_per_gpu"])
    factor = rank.micro_steps
    if factor < 2 or micro > _SMALL:
        return
    # One larger micro-step needs one exchange in place of one per micro-step.
    waits = sum(rank.waits.get(name, 0.0) for name in ("all_gather", "reduce_scatter"))
    saved = waits * (1.0 - 1.0 / factor)
    if saved < _LEAST * found.seconds:
        return
    yield Cause(
        "micro_batch",
        f"a tiny micro-batch: {factor} micro-steps of {count(micro, 'sample')} in each step, and "
        f"ranks wait {show_s(waits)} for what each of them exchanges",
        f"compute {micro * factor} samples in one micro-step, or as many as fit",
        f'"train_micro_batch_size_per_gpu": {micro * factor}, "gradient_accumulation_steps": 1',
        found.seconds,
        found.seconds - saved,
        "one exchange a step",
    )


def _outside(found: Measured) -> Iterator[Cause]:
    rank: RankStep = max(found.ranks, key=lambda rank: rank.outside_s)
    if rank.outside_s < _LEAST * found.seconds:
        return
    named = {name: s for name, s in rank.places.items() if name not in INSIDE}
    top = max(named, key=named.__getitem__, default="")
    yield Cause(
        "outside",
        f"the program outside of the engine: {show_s(rank.outside_s)} of each step"
        + f", most of it in {top}" * bool(top),
        "load data and log beside the step, or less often; a profiler names the lines",
        "DataLoader(..., num_workers=2, persistent_workers=True)",
        found.seconds,
        found.seconds - rank.outside_s,
        "a step without it",
    )
