"""Initial values on their way from the model to the engine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from zero_core.comm.control import ControlGroup
from zero_core.core.params import FlatParams
from zero_core.core.pool import BufferPool, allocator
from zero_core.errors import CollectiveError, ConfigError, RankMismatchError
from zero_core.init.former import FormerModel
from zero_core.init.slices import forget_slice
from zero_core.init.values import InitialValues
from zero_core.layout.discovery import Discovered, compute_dtype
from zero_core.sharded.sharded_state import ShardedState


@torch.no_grad()
def fill(
    found: Discovered,
    state: ShardedState,
    initial: InitialValues,
    former: FormerModel,
    *,
    rounds_masters: bool,
) -> None:
    """Write rank 0's values to the engine's memory, unrounded ones to the master weights.

    With ``rounds_masters`` these are rounded to the compute dtype, too. ``former`` gives up what is
    in shards. What fails on one rank alone fails on all of them.
    """
    layout, all_params, control = state.layout, state.params, state.control
    # In these dtypes a segment's original values lose nothing.
    dtypes = [
        s.dtype
        if s.is_opaque
        else reduce(torch.promote_types, (found.params[x.param].dtype for x in s.slots), s.dtype)
        for s in layout.segments
    ]
    sizes = [s.padded_numel * d.itemsize for s, d in zip(layout.segments, dtypes, strict=True)]
    # One buffer for all: the heap stays whole.
    pool = BufferPool(allocator(all_params[0].device), max(sizes))
    is_deferred = _is_any_recorded(found, control, initial)
    num_differing = torch.zeros(
        len(layout.segments), dtype=torch.int64, device=all_params[0].device
    )
    for segment, of_segment, dtype in zip(layout.segments, all_params, dtypes, strict=True):
        params = [found.params[slot.param] for slot in segment.slots]
        in_parts = [initial.is_in_parts(param) for param in params]
        flat = pool.acquire(segment.padded_numel, dtype, segment.index)
        with _on_all_ranks(control, RuntimeError):
            try:
                for low, high in segment.gaps():
                    flat[low:high].zero_()
                for slot, param, is_shared in zip(segment.slots, params, in_parts, strict=True):
                    if is_shared or control.rank == 0 or not is_deferred:
                        spec = layout.params[slot.param]
                        flat[slot.start : slot.stop].copy_(spec.to_elements(initial.of(param)))
            finally:  # the other ranks wait
                if not all(in_parts):
                    (control.broadcast if is_deferred else control.equalize)(flat)
            of_segment.write(0, flat)
            if of_segment.source.span is not None:
                start, stop = of_segment.source.span
                is_sharded = stop - start == segment.shard_numel
                low, high = layout.state_range(segment, control.rank, is_sharded=is_sharded)
                masters = flat[low:high]
                if rounds_masters:
                    masters = masters.to(segment.dtype)
                state.tier.write_state("master_weight", start, masters)
                if is_sharded and control.world_size > 1 and of_segment.full is not None:
                    rounded = of_segment.full[low:high]
                    num_differing[segment.index] = rounded.ne(masters.to(rounded.dtype)).sum()
        adopt(of_segment, former)
        pool.release(flat)
    # A tier may round its own part otherwise, as ties of a master weight that is kept split.
    for of_segment, number in zip(all_params, control.sum(num_differing).tolist(), strict=True):
        if number:
            of_segment.invalidate()  # the other ranks gather it


def _is_any_recorded(found: Discovered, control: ControlGroup, initial: InitialValues) -> bool:
    """Return whether a value has to be computed first on some rank: then rank 0 alone does so."""
    num_recorded = sum(initial.is_recorded(p) for p in found.params)
    num_in_parts = sum(initial.is_in_parts(p) for p in found.params)
    rows = control.gather(torch.tensor([num_recorded, num_in_parts])).view(-1, 2)
    if bool((rows[:, 1] != rows[0, 1]).any()):
        raise RankMismatchError(
            f"ranks have {rows[:, 1].tolist()} parameters that were sharded before build(): make "
            "and load the model in the same way on every rank"
        )
    return bool((rows[:, 0] > 0).any())


def adopt(flat: FlatParams, former: FormerModel) -> None:
    """Give a segment's parameters the engine's memory. ``former`` drops what is in shards."""
    flat.adopt()
    if not flat.is_kept:
        former.give_up(flat)
    for param in flat.params:
        forget_slice(param)


def adopt_buffers(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    control: ControlGroup,
    initial: InitialValues,
) -> None:
    """Move buffers to ``device`` and rank 0's values to them. Cast floating ones to ``dtype``."""
    adopted: dict[int, Tensor] = {}  # modules may share one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            moved = adopted.get(id(buffer))
            if moved is None:
                moved = initial.of(buffer).to(device, compute_dtype(buffer, dtype)).contiguous()
                control.broadcast(moved)
                adopted[id(buffer)] = adopted[id(moved)] = moved
            module._buffers[name] = moved


def check_values(control: ControlGroup, initial: InitialValues, *, has_pretrained: bool) -> None:
    """Refuse on all ranks a model whose values are not known on one of them."""
    with _on_all_ranks(control, ConfigError):
        initial.check(has_pretrained=has_pretrained)


@contextmanager
def _on_all_ranks(control: ControlGroup, kind: type[Exception]) -> Iterator[None]:
    """Have an error of one rank in this context raise a ``kind`` on the others, at its end."""
    failure: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise  # the others get one of their own
    except Exception as error:
        failure = error
    said = "" if failure is None else str(failure) or type(failure).__name__
    rows = control.gather_bytes(said.encode())
    if failure is not None:
        raise failure
    for rank, row in enumerate(rows):
        if row:
            raise kind(f"rank {rank}: {row.decode()}")
