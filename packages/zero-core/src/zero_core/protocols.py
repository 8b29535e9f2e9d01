"""Protocols of the parts that an engine is composed of.

A protocol describes only names and signatures, so a class can satisfy it without importing this
package. Other packages declare their classes and functions by entry points, for example:

=========================  =====================  =========================================
entry-point group          object                 asked for by the config key
=========================  =====================  =========================================
``zero_core.collectives``  `CollectivesFactory`   ``zero_optimization``: quantized weights and
                                                  gradients, secondary shards
``zero_core.state_tiers``  `StateTierFactory`     ``zero_optimization.offload_optimizer``
``zero_core.param_tiers``  `ParamTierFactory`     ``zero_optimization.offload_param``
``zero_core.adam_kernels`` `AdamKernel`           ``offload_optimizer`` with Adam, AdamW,
                                                  Adagrad, SGD or Lion
``zero_core.footprints``   footprint factories    no key: `zero_core.plan` calls them, see
                                                  `zero_core.footprint.footprints`
=========================  =====================  =========================================

[Note: the local flat space]
A rank's trainable elements form one flat index space ``[0, numel)``. It concatenates, for each unit
in order and each of the unit's trainable segments (one per dtype), the slice that this rank's
optimizer state covers, padding included. That slice is the whole segment at stage 0, and the rank's
shard at stages 1 to 3. A **piece** is one parameter's part of the space: ``(start, stop, group)``,
where ``group`` indexes the optimizer's ``param_groups``. Pieces are sorted, disjoint and without
padding. ``start`` and ``stop`` below are element offsets in this space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Gathered = Sequence[tuple[int, int, torch.dtype]]  # segment, elements of a shard, dtype
Reduced = Sequence[tuple[int, torch.dtype, torch.dtype]]  # elements, dtype, dtype of the sum
EXACT_GRADIENTS, EXACT_PARAMETERS = -1, -2
"""Negative values of ``version`` in `Collectives.all_gather`, which require exact values."""


@runtime_checkable
class Work(Protocol):
    """A pending collective. `torch.distributed.Work` satisfies this protocol."""

    def wait(self) -> object:
        """Block the caller (on CUDA, its current stream) until the result may be read."""


@runtime_checkable
class Reduction(Work, Protocol):
    """A reduction that exposes each rank's slice, to find ranks with non-finite values."""

    @property
    def contributions(self) -> Sequence[Tensor]:
        """Each rank's slice, in rank order, readable after ``wait``. Empty if unknown."""


@runtime_checkable
class StatisticsReduction(Work, Protocol):
    """A reduction that also computes statistics of its sum.

    The statistics are on the sum's device, readable after ``wait``. The engine does not compute
    them itself.
    """

    @property
    def norm(self) -> Tensor:
        """2-norm of this rank's sum: 0-dimensional, fp32 or wider."""

    @property
    def nonfinite(self) -> Tensor:
        """Whether the input of each rank has NaN or Inf: bool, [world_size].

        Covers only the slices that this rank reads. Each slice is read by at least one rank.
        """


@runtime_checkable
class InPlaceReduction(Reduction, Protocol):
    """A reduction whose input other ranks may read directly, in shared memory."""

    def acknowledge(self) -> Work:
        """Report to the other ranks that this rank has read their slices.

        The engine calls it once, after ``wait`` and its last read of ``contributions``. Until the
        returned `Work` has been waited for, other ranks may still read this reduction's input. The
        engine refuses an in-place reduction that is also a `StatisticsReduction`.
        """


@runtime_checkable
class Collectives(Protocol):
    """All-gathers of shards into units, and reduce-scatters of unit gradients into shards.

    Every rank of the group makes the same gathers in the same order, and the same reductions.
    Buffers are 1-D, contiguous and owned by the caller, who reads or reuses them only after
    ``wait``. The caller changes a ``shard`` only after all ranks have waited for its gather, so a
    rank may read another rank's shard in place. ``unit`` is the index of a segment (a unit has one
    per dtype and trainability): a stable key for private buffers. Subclasses of this protocol
    declare optional methods.
    """

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, in rank order.

        Args:
            out: ``world_size * shard.numel()`` elements, dtype of ``shard``.
            shard: any dtype, bytes included. May be a view of this rank's slice of ``out``. Not
                changed.
            version: grows whenever the values of ``shard`` may have changed. A negative version
                requires exact values: `EXACT_GRADIENTS` (reduced gradients, at stage 0) or
                `EXACT_PARAMETERS` (parameters to read, not to train with).
            backward: whether the gather serves a backward pass.
        """

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        The sum is taken in fp32 (float64 for float64 input) in a fixed order: over ranks, or within
        each node first and then over nodes. For an average, the caller has divided ``full``. The
        result may be a `Reduction`, an `InPlaceReduction` or a `StatisticsReduction`.

        Args:
            out: floating point, of the dtype that gradients accumulate in. Overwritten.
            full: ``world_size * out.numel()`` elements, floating point. Undefined afterwards.
        """


@runtime_checkable
class AddingCollectives(Collectives, Protocol):
    """Collectives that add to a sum, for the configuration key ``world_size_invariant``."""

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to add this rank's slice of every rank's ``full`` to ``out``, in rank order.

        Arguments as in `reduce_scatter`. Computes ``((out + slice 0) + slice 1) + ...``, each sum
        rounded to the dtype of ``out``. A `StatisticsReduction` has the statistics of ``out``.
        """


@runtime_checkable
class StatefulCollectives(Collectives, Protocol):
    """Collectives that store values or quantization errors between calls."""

    @property
    def private_nbytes(self) -> Mapping[str, int]:
        """Bytes held on this rank, by kind, for `Engine.memory_report`."""

    def forget_values(self) -> None:
        """Drop all stored weights, so that the next gathers start from exact values.

        All ranks call it when weights were replaced outside of a step (loaded, edited, states
        written), and when a checkpoint is saved, so that a resumed run equals a continued run.
        """

    def forget_errors(self) -> None:
        """Drop stored quantization errors after a skipped step, a save or replaced weights."""

    def begin_step(self, number: int) -> None:
        """Start step ``number``, from 0. Random numbers may depend on it, but not on past steps."""


@runtime_checkable
class InPlaceCollectives(Collectives, Protocol):
    """Collectives that may read gradients directly in other ranks' memory."""

    @property
    def reduces_in_place(self) -> bool:
        """Whether each ``reduce_scatter`` returns an `InPlaceReduction`.

        If true, CPU ranks of a node share the engine's gradient buffers, if they can share memory.
        """


@runtime_checkable
class PreparedCollectives(Collectives, Protocol):
    """Collectives that allocate buffers or compile kernels before the first step."""

    def prepare(self, gathered: Gathered, reduced: Reduced, device: torch.device) -> None:
        """Prepare gathers and reductions of the given sizes. `build` calls it on all ranks."""


class MessageChecks(Protocol):
    """Checks of messages that are decoded before the host knows whether they are sound."""

    def num_damaged(self) -> Tensor | None:
        """Return the number of damaged messages since the last `clear`, 0-dim. None without any."""

    def take(self) -> Sequence[tuple[int, str]]:
        """Return unit and description of each counted damaged message. Calls `clear`. May wait."""

    def clear(self) -> None:
        """Forget the messages that `num_damaged` has counted."""


@runtime_checkable
class CheckedCollectives(Collectives, Protocol):
    """Collectives whose checks the engine reads with a step's statistics, before it updates."""

    @property
    def checks(self) -> MessageChecks | None:
        """Checks of all messages received on an accelerator, or None if messages have no checks."""


@runtime_checkable
class AnnouncingCollectives(Collectives, Protocol):
    """Collectives that can agree on the lengths of gathers' messages in advance."""

    @property
    def announces(self) -> bool:
        """Whether lengths vary, so that `announce` is useful. Constant, and equal on all ranks."""

    def announce(self, shards: Sequence[tuple[int, int, Tensor | None, Tensor]]) -> Work:
        """Start to exchange lengths, so that the gathers of ``shards`` need not wait for them.

        ``shards``, for each gather: unit, version, ``out`` if the shard is a part of it, and shard.
        """


class SliceCodec(Protocol):
    """Lossless codec of gradient slices, which are 1-D, contiguous and on one device."""

    @property
    def checks(self) -> MessageChecks:
        """Checks of messages that `unpack` has decoded on an accelerator."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are encoded. All ranks return the same."""

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the largest size in bytes of a message with ``numel`` elements."""

    def pack(self, values: Tensor, message: Tensor) -> Tensor:
        """Encode ``values`` into ``message``, and return its length in bytes, a multiple of 16.

        ``message`` is uint8, has `max_nbytes` bytes and a 16-byte-aligned address. The length is
        0-dim, int64, on the same device. On an accelerator all later bytes are set to zero.
        """

    def unpack(self, message: Tensor, values: Tensor, *, sender: int, unit: int) -> None:
        """Decode ``message`` (uint8, 16-byte-aligned address) into ``values``.

        Raises:
            RuntimeError: on a host, if the message is damaged. The text names rank ``sender``.
        """


class TransportCollectives(InPlaceCollectives, PreparedCollectives, Protocol):
    """The engine's own collectives, over which a plug-in sends its bytes.

    Ranks are numbered within this instance's group. Any thread may call methods. The calls of each
    thread must be in the same order on all ranks. No two threads may use the same method and
    ``unit`` of an instance.
    """

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""

    @property
    def exchange_nbytes(self) -> int:
        """Bytes of buffers for reductions, kept from one reduction to the next."""

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice ``k`` of ``out`` with slice ``rank`` of rank ``k``'s ``parts``.

        Both tensors have ``world_size`` equal slices and one dtype, and do not overlap. When
        ``wait`` returns, ``parts`` may be overwritten, unlike a gather's ``shard``.

        Raises:
            ValueError: lengths or dtypes differ, or the length is no multiple of ``world_size``.
        """

    def coded(self, codec: SliceCodec) -> TransportCollectives:
        """Return these collectives with reductions that send messages of ``codec`` to other nodes.

        Sums, order and statistics stay the same. Every rank calls it with the same kind of codec.
        """

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        """Return collectives among ``ranks`` of this group, renumbered in that order.

        Every rank calls it equally often and in the same order, each with its own subgroup.
        Subgroups are independent, but share the queues of `launch`.

        Raises:
            ValueError: ``ranks`` lacks this rank, or has a duplicate or an unknown rank.
        """

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate 1-D zeros for a buffer that lives as long as the collectives.

        CPU ranks of a node that can share memory read its values in place: see `Collectives`.
        """

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job`` concurrently with the caller, after the earlier jobs of the same queue.

        There are two queues, for gathers and for reductions. A job waits for the collectives that
        it starts, so a second hop starts when the first has arrived. Jobs run with the caller's
        inference mode and without autograd. On hosts a queue is a thread. On an accelerator it is a
        stream: the job runs on the host at once, and its kernels are ordered after the caller's
        current stream. Memory that the job allocates is reused in the order of the queue's stream,
        so a reader on another stream must keep that memory alive. ``wait`` of the result returns
        when the job is done (on an accelerator: orders the current stream after the job), and
        raises the job's exception. A job launched by a job of the same queue runs at once.
        """


class CollectivesFactory(Protocol):
    """Entry point of ``zero_core.collectives``. Wraps the engine's own collectives."""

    def __call__(
        self,
        native: TransportCollectives,
        *,
        rank: int,
        world_size: int,
        config: Mapping[str, Any],
        ranks_per_node: int,
        frozen: Collection[int],
    ) -> Collectives:
        """Make collectives that send their bytes, of any dtype, over ``native``.

        Args:
            config: the resolved ``zero_optimization`` block as plain builtins.
            ranks_per_node: divides ``world_size``. Ranks of a node are consecutive.
            frozen: indices of the segments that are never trained.

        Raises:
            ValueError: a setting is not supported. The message names the setting.
        """


@runtime_checkable
class StateTier(Protocol):
    """Storage and update of master weights and optimizer state.

    See [Note: the local flat space] for offsets. No method is a collective, except for ``step`` of
    `zero_core.optim.whole_tier.WholeTier`.
    """

    @property
    def owns_grads(self) -> bool:
        """Whether `offer_grad` copies the gradient into the tier's memory.

        If true, the engine keeps no copy of the gradient.
        """

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Accept the final gradient of ``[start, start + grad.numel())`` for the next step.

        Called when a segment's gradient is reduced, or changed by the program. Without
        ``owns_grads`` and updates in backward, all segments are offered when the step's gradient is
        complete. ``grad`` belongs to the engine: 1-D, contiguous, floating point, on the engine's
        device. Without ``owns_grads``, the tier keeps ``grad``, which ``step`` may overwrite.
        ``grad`` then stays valid until a ``step`` that uses it or ``discard_grads`` has returned.
        With ``owns_grads``, the engine calls the returned function before it overwrites ``grad``,
        to wait for the tier's copy. If the tier returns None, it has read ``grad``. The last offer
        of a range counts.
        """

    def read_grad(self, start: int, stop: int) -> Tensor:
        """Return a CPU copy of the gradient offered for ``[start, stop)``: 1-D, in its dtype."""

    def discard_grads(self) -> None:
        """Discard offered gradients that no ``step`` has used."""

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces whose indices are in ``active``, which is sorted.

        Other pieces keep values, states and step counts. ``groups`` are the optimizer's
        ``param_groups`` without ``params``. Gradients are multiplied by ``grad_scale`` (unscale and
        clip). New values are written to the parameter shards given at construction, maybe after the
        call returns. The engine may call it several times per training step, also in backward, each
        time for pieces that were offered and not updated yet, and then calls `discard_grads`.
        """

    def wait_params(self, start: int, stop: int) -> None:
        """Make the caller (or its current stream) wait for new values of ``[start, stop)``."""

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Whether `wait_params` returns at once, without a stream wait. False if it would raise."""

    def state_names(self) -> Sequence[str]:
        """Return names of elementwise states: ``master_weight`` first, then e.g. ``exp_avg``."""

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return a CPU copy of ``[start, stop)`` of a state: 1-D, in its dtype."""

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``.

        A write of ``master_weight`` also publishes the rounded values to the parameter shards.

        Raises:
            KeyError: the optimizer cannot have a state of this name.
        """

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return per-parameter scalars: ``num_steps`` (updates applied) and e.g. ``mu_product``."""

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore a result of `read_scalars`. If ``num_steps`` is 0, reset the piece's states."""

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Raise what `write_state` or `write_scalars` would raise, and change nothing.

        ``scalars`` has one entry per piece.

        Raises:
            KeyError: the optimizer cannot have such a state.
            ValueError: the scalars belong to another optimizer.
        """


class ChangeWatcher(Protocol):
    """Observer that can read states before they change."""

    def before_change(self, start: int, stop: int) -> None:
        """Called before states of ``[start, stop)`` change, in the thread that will change them.

        The call may block. States of an announced range need not change, and a range may be
        announced repeatedly.
        """


@runtime_checkable
class SnapshotTier(StateTier, Protocol):
    """A state tier whose states at one point in time can be read while training goes on."""

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before each part of an update or write. Replaces an earlier watcher."""

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return the same as `read_state`. Any thread may call it while the range is unchanged."""


@runtime_checkable
class AccumulatingTier(StateTier, Protocol):
    """A state tier that owns gradients and accumulates them over a step's micro-steps.

    The sum is taken in fp32 (float64 for float64), in the order of the calls. ``offer_grad``
    replaces the sum, ``read_grad`` returns it, and a ``step`` or ``discard_grads`` ends it.
    """

    def expect_micro_steps(self, count: int) -> None:
        """Allocate memory for about ``count`` > 1 calls of `add_grad` per range and step.

        Called once, before the first `add_grad` and before state is written.
        """

    def add_grad(self, start: int, grad: Tensor, *, is_last: bool) -> Callable[[], None] | None:
        """Add to the gradient of ``[start, start + grad.numel())`` for the next step.

        Called in each micro-step's backward. ``grad`` and the result are as for ``offer_grad``.
        ``is_last`` means that the gradient is now complete, unless another backward of the last
        micro-step follows.
        """

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Start to compute the sum of squares of the gradient of ``[start, stop)``.

        The returned function waits for the sum: 0-dim, float64, on the CPU or the device, summed in
        double precision. The sum is not finite if an element is not finite.
        """


@runtime_checkable
class TimedTier(StateTier, Protocol):
    """A state tier that works concurrently with the caller, and counts time and bytes.

    Counts only grow. They are read between two steps, without waiting.
    """

    @property
    def host_numel(self) -> int:
        """Number of elements that the host updates."""

    def work_s(self) -> Mapping[str, float]:
        """Return seconds so far: "host" (updates), "file" (reads and writes) and "file wait"
        (updates that waited for a file).
        """

    def copied_bytes(self) -> tuple[int, int]:
        """Return bytes copied so far: (device to host, host to device)."""

    def recent_updates(self) -> Sequence[tuple[float, float]]:
        """Return start and end of the host's latest updates, in order, by `time.perf_counter`."""

    def time_copies(self, *, is_on: bool) -> None:
        """Start or stop timing copies between an accelerator and the host."""

    def take_copies(self) -> Sequence[tuple[str, torch.Event, torch.Event]]:
        """Return the copies timed since the last call.

        Each entry has the copy's content, and timed events before and after the copy. The events
        may be pending.
        """

    def host_memory_bytes(self) -> Mapping[str, int]:
        """Return bytes of host memory held now, by kind, as in a plan's ``memory.host``."""


@runtime_checkable
class ReservingTier(StateTier, Protocol):
    """A state tier that can allocate all of its memory before activations exist."""

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate buffers for gradients (copied or widened) and for transfers.

        Called once, on an accelerator only, before the first gradient. ``grads``: ``(start, stop,
        dtype)`` of each gradient that will be offered or added.
        """


@runtime_checkable
class SpeculativeTier(StateTier, Protocol):
    """A state tier that can begin a step before the step is decided, and undo the update.

    Speculation-then-validation of SuperOffload (arXiv 2509.21271). Until ``step``, parameters,
    states and gradients read as if no update had begun.
    """

    @property
    def undo_bytes(self) -> int:
        """Bytes of the undo log in host memory."""

    def enable_undo(self) -> bool:
        """Prepare for `speculate`. Called once. Return whether the tier's updates can be undone."""

    def speculate(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Begin to update offered pieces, as far as memory allows. Arguments as in ``step``.

        No piece is passed twice before a ``step``. A ``step`` over the pieces with the same
        ``groups`` and ``grad_scale`` completes the update. Any other use of the pieces undoes the
        update first: another step, an offer, access to states, or ``discard_grads``.
        """


@runtime_checkable
class ParamStore(Protocol):
    """Destination of new parameter shards that the tier cannot write directly."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``[start, start + values.numel())`` of the local flat space.

        Any thread may call it, one at a time. ``values`` is 1-D, on any device, in the compute
        dtype, within one shard. The caller may reuse ``values`` when the call returns.
        """


@runtime_checkable
class DeviceMemory(Protocol):
    """A tier, or collectives, whose device memory `Engine.offload_states` can free temporarily."""

    def device_tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return all long-lived tensors on the device, by the name of a `StatePart`.

        Called outside of forward and backward, while no exchange or update is pending. The engine
        copies the bytes that are still needed (not "buffers") to the host, and resizes storages to
        zero. A reload resizes them back: tensors stay the same objects, at new addresses.
        """


class StateTierFactory(Protocol):
    """Entry point of ``zero_core.state_tiers``."""

    def __call__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        adam_kernel: AdamKernel | None,
        device_tier: DeviceTierFactory,
        names: Sequence[str] = (),
        param_store: ParamStore | None = None,
        upload_codec: UploadCodec | None = None,
    ) -> StateTier:
        """Make a tier for the local flat space.

        Args:
            numel: length of the local flat space, padding included.
            pieces: ``(start, stop, group)`` of each parameter's part.
            params: ``(start, tensor)``: sorted 1-D parameter shards in the compute dtype, which
                receive new values. Each is on ``device``, on the CPU (if kept there), or on the
                meta device (for ``param_store``). The engine writes ``master_weight`` before the
                first step. Before that, the shards' contents are undefined.
            device: the compute device.
            optimizer_class: the torch optimizer class whose update is wanted.
            groups: the optimizer's ``param_groups`` without ``params``, with every default filled
                in.
            config: the resolved ``zero_optimization`` block as plain builtins.
            adam_kernel: the host kernel for the optimizer, if it has one
                (`zero_core.optim.factory.has_kernel_rule`). None for a factory passed to ``build``.
            device_tier: makes a tier on the compute device from torch's own optimizer.
            names: parameter names, one per piece. The engine always gives them.
            param_store: receives the new values of shards on the meta device, if there are any.
            upload_codec: encodes the differences that ``offload_optimizer.lossless_upload`` sends,
                if the key is on.

        Raises:
            ValueError: a setting or the optimizer is not supported. The message names it.
        """


class UploadCodec(Protocol):
    """Lossless codec of parameter differences, for uploads from host memory to a device.

    An entry point of ``zero_core.upload_codecs`` returns a codec. Tensors are 1-D and contiguous.
    Differences have even addresses.
    """

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the largest size of a difference in bytes, or 0 if ``itemsize`` has no codec."""

    def checksum(self, values: Tensor) -> Tensor:
        """Return an int64 checksum of the bytes, 0-dim, equal on all devices, without waiting."""

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Encode the difference from ``old`` to ``new`` into ``out``, and return its size in bytes.

        All are in host memory. ``out`` is uint8 and has `max_nbytes` bytes.
        """

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Apply ``difference`` to ``values`` in place, on the current stream of their device."""


class DeviceTierFactory(Protocol):
    """Factory of the engine's own tier: torch's optimizer on the compute device."""

    def __call__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        param_store: ParamStore | None = None,
        own_masters: Collection[torch.dtype] = ...,
    ) -> SnapshotTier:
        """Make a tier. ``pieces`` and ``params`` use offsets in ``[0, numel)``.

        ``own_masters``: dtypes of shards that are updated in place, by default fp32 and float64.
        """


@runtime_checkable
class ParamTier(Protocol):
    """Storage of this rank's parameter shards while no unit needs them, off the device.

    ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), section 5.1. The index of a segment
    identifies its shard. No method is a collective.
    """

    def expect(self, segments: Sequence[int]) -> None:
        """Announce the next segments to be fetched, in order, so that a tier can read ahead."""

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Start to copy the current values of a shard to ``out``, on the device or on the CPU.

        ``out`` is 1-D, contiguous, of the shard's length and dtype. On an accelerator the copy is
        ordered after the caller's current stream, and ``wait`` makes the current stream wait for
        the copy. On the CPU ``out`` is complete when ``wait`` returns.
        """

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite elements ``[start, start + values.numel())`` of a shard that no fetch reads.

        Any thread may call it, one at a time. ``values`` is 1-D, on any device, and is cast to the
        shard's dtype. The caller may reuse ``values`` when the call returns.
        """

    def home(self, segment: int) -> Tensor | None:
        """Return the shard, 1-D, on the CPU, if the caller may use it in place, else None.

        A `write` changes the returned tensor.
        """

    def report(self) -> Mapping[str, int]:
        """Return bytes held outside of the device, by kind."""


class ParamTierFactory(Protocol):
    """Entry point of ``zero_core.param_tiers``."""

    def __call__(
        self,
        *,
        shards: Sequence[tuple[int, int, torch.dtype]],
        device: torch.device,
        config: Mapping[str, Any],
    ) -> ParamTier:
        """Make a tier for ``shards``: ``(segment, numel, dtype)`` of each, in the order of use.

        ``config`` is the resolved ``zero_optimization`` block as plain builtins.

        Raises:
            ValueError: a setting is not supported. The message names the setting.
        """


class MicroBatchLoss(Protocol):
    """Function that computes the loss of one micro-batch, for `zero_core.Engine.train_batch`."""

    def __call__(self, batch: Any, /) -> Tensor:
        """Return the loss of ``batch``, 0-dim."""


class AdamKernel(Protocol):
    """Host kernel that updates master weights and moments in one pass over flat memory.

    Entry point of ``zero_core.adam_kernels``: a module with the function `adam_step`. The module
    may also have ``adagrad_step``, ``sgd_step`` and ``lion_step``, and, for
    ``offload_optimizer.state_dtype``, ``adam_step_8bit`` and ``adam_step_bf16``. If the module
    lacks a function, a tier uses torch's own optimizer instead, or refuses the ``state_dtype``.
    """

    def adam_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        grad_scale: float = 1.0,
        out: Any = None,
        num_threads: int | None = None,
    ) -> None:
        """Apply one Adam update (Kingma and Ba 2015, AdamW: Loshchilov and Hutter 2019) in place.

        ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32, 1-D, contiguous, in host memory, and
        are updated. Hyperparameters are those of torch.optim.AdamW.

        Args:
            grad: fp32, bf16 or fp16, same length. Multiplied by ``grad_scale`` first.
            step: number of this update, from 1.
            adamw_mode: decoupled weight decay instead of L2 regularization.
            bias_correction: divide the moments by ``1 - beta ** step``.
            out: fp32, bf16 or fp16, same length. Receives the rounded master weights.
            num_threads: None uses the default.
        """


@runtime_checkable
class PartitionedParam(Protocol):
    """A parameter without storage, whose value ``build`` requests.

    It is an ``nn.Parameter`` of the value's shape and dtype whose class has these members.
    DeepSpeed's ``zero.Init`` makes such parameters.
    """

    @property
    def is_deferred(self) -> bool:
        """Whether only rank 0 computes the value."""

    def full_value(self) -> Tensor:
        """Return the whole value on the CPU. Every rank must call it, unless `is_deferred`."""

    def free_value(self) -> None:
        """Free the value's memory until `set_value`. Not called if `is_deferred`."""

    def set_value(self, value: Tensor) -> None:
        """Store the whole ``value`` again, in the parameter's dtype. Every rank must call it."""

    def make_ordinary(self) -> None:
        """Drop the value and become a plain ``nn.Parameter`` on the CPU, without memory."""
