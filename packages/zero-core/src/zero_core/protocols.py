"""Protocols of the parts that the engine is composed from.

Signatures use only builtins and torch types, so that a part satisfies a protocol by shape alone and
never has to import this package. Parts announce themselves by entry points:

=========================  =====================  =========================================
entry-point group          object                 asked for by the config key
=========================  =====================  =========================================
``zero_core.collectives``  `CollectivesFactory`   ``zero_optimization``: quantized weights and
                                                  gradients, secondary shards
``zero_core.state_tiers``  `StateTierFactory`     ``zero_optimization.offload_optimizer``
``zero_core.param_tiers``  `ParamTierFactory`     ``zero_optimization.offload_param``
``zero_core.adam_kernels`` `AdamKernel`           ``offload_optimizer`` with Adam, AdamW,
                                                  Adagrad, SGD or Lion
``zero_core.footprints``   factories of           a plan, for what collectives and tiers send
                           `plan.footprints`      and keep
=========================  =====================  =========================================

[Note: the local flat space]
A rank's trainable elements form one flat index space ``[0, numel)``: for each unit in order, for
each of its trainable segments (one per dtype), the slice that this rank's optimizer state covers,
padding included. At stage 0 that is the whole segment, at stages 1 to 3 the rank's shard.
A **piece** is the part of one parameter that lies in that space: ``(start, stop, group)``, where
``group`` indexes the optimizer's ``param_groups``. Pieces are sorted, disjoint and never cover
padding. All of ``start`` and ``stop`` below are element offsets into this space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

EXACT_GRADIENTS, EXACT_PARAMETERS = -1, -2
"""Versions of what must arrive exact."""


@runtime_checkable
class Work(Protocol):
    """A collective under way. `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the result may be read by the caller (on CUDA: by its current stream)."""


@runtime_checkable
class Reduction(Work, Protocol):
    """A reduction that shows each rank's part: the engine names the rank that is not finite."""

    @property
    def contributions(self) -> Sequence[Tensor]:
        """Each rank's part, in rank order, readable after ``wait``. Empty if it is not known."""


@runtime_checkable
class StatisticsReduction(Work, Protocol):
    """A reduction that computes the statistics of its sum on the way.

    Both are on the sum's device, readable after ``wait``. The engine reads neither sum nor parts.
    """

    @property
    def norm(self) -> Tensor:
        """2-norm of this rank's sum: 0-dimensional, fp32 or wider."""

    @property
    def nonfinite(self) -> Tensor:
        """Whether a rank's part of this sum, or of one that this rank helped with, has NaN or Inf.

        bool, [world_size]. Each rank whose part is not finite is found on some rank.
        """


@runtime_checkable
class InPlaceReduction(Reduction, Protocol):
    """A reduction whose input other ranks read where it is, in shared memory."""

    def acknowledge(self) -> Work:
        """Report to the other ranks that this rank has read their parts.

        The engine calls it once, after ``wait`` and its last read of ``contributions``. Until the
        result has been waited for, other ranks may be reading the reduction's input.
        """


@runtime_checkable
class Collectives(Protocol):
    """Gathers of shards into units, and reductions of unit gradients into shards.

    Every rank of the group calls the same methods in the same order. Buffers are 1-D, contiguous,
    the caller's, and read or reused only after ``wait``. A ``shard`` is changed only after an
    exchange that each rank entered after its ``wait``, so a rank may read another's in place.
    ``unit`` is the index of a segment (a unit has one per dtype and trainability): a stable key for
    private buffers. `StatefulCollectives` and `InPlaceCollectives` declare further abilities.
    """

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """Start to fill ``out`` with every rank's ``shard``, in rank order.

        Args:
            out: ``world_size * shard.numel()`` elements, dtype of ``shard``.
            shard: any dtype (bytes too), maybe a view of this rank's slice of ``out``; not changed.
            version: grows whenever the values of ``shard`` may have changed. Negative: they must
                arrive exact; `EXACT_GRADIENTS` (reduced ones, at stage 0) or `EXACT_PARAMETERS`
                (to be read, not to be trained with).
            backward: whether the gather serves a backward pass.
        """

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        The sum is taken in fp32 (float64 for float64 input) in a fixed order: that of ranks, or
        within each node first and then that of nodes. Gradients are already divided by the world
        size. The result may be a `Reduction`, an `InPlaceReduction` or a `StatisticsReduction`.

        Args:
            out: floating point, of the dtype that gradients accumulate in; overwritten.
            full: ``world_size * out.numel()`` elements, floating point; undefined afterwards.
        """


@runtime_checkable
class AddingCollectives(Collectives, Protocol):
    """Collectives that add to a sum. The configuration key ``world_size_invariant`` needs them."""

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """Start to add this rank's slice of every rank's ``full`` to ``out``, in rank order.

        As `reduce_scatter`, whatever the nodes are: ``((out + slice 0) + slice 1) + ...``, each
        term rounded to the dtype of ``out``, of which a `StatisticsReduction` has the statistics.
        """


@runtime_checkable
class StatefulCollectives(Collectives, Protocol):
    """Collectives that keep values or errors from one call to the next."""

    @property
    def private_nbytes(self) -> Mapping[str, int]:
        """Bytes held on this rank, by kind, as `Engine.memory_report` shows them."""

    def forget_values(self) -> None:
        """Drop all that is kept of weights and gradients: the next gathers start from exact values.

        All ranks call it when weights were replaced outside of a step (loaded, edited, states
        written), and when a checkpoint is saved, so that a resumed run equals one that continued.
        """

    def forget_errors(self) -> None:
        """Drop what is kept of a skipped step's gradients. All ranks call it, after reductions."""


@runtime_checkable
class InPlaceCollectives(Collectives, Protocol):
    """Collectives that may read gradients in the other ranks' memory."""

    @property
    def reduces_in_place(self) -> bool:
        """Whether ``reduce_scatter`` returns `InPlaceReduction` for shared memory.

        If so, the engine shares its gradient buffers with the ranks of the node.
        """


class SliceCodec(Protocol):
    """Codes slices of gradients, 1-D, contiguous, of one device, so that every bit arrives."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are coded. All ranks answer alike."""

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the most bytes that a message of ``numel`` elements may have."""

    def pack(self, values: Tensor, message: Tensor) -> int:
        """Write the message of ``values``, and return its bytes, a multiple of 16.

        ``message`` is uint8, `max_nbytes` long, at a multiple of 16 bytes. On an accelerator the
        host waits for the result.
        """

    def unpack(self, message: Tensor, values: Tensor, *, sender: int) -> None:
        """Fill ``values`` from a message, uint8, at a multiple of 16 bytes.

        Raises:
            RuntimeError: the message is damaged. The text names rank ``sender``.
        """


class TransportCollectives(InPlaceCollectives, Protocol):
    """The engine's own collectives, over which a plug-in sends its bytes.

    A rank is numbered within the instance's group. Any thread may call methods, in the same order
    on all ranks, each thread by itself. No two use the same method and ``unit`` of an instance.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""

    @property
    def exchange_nbytes(self) -> int:
        """Bytes of buffers for what arrives in reductions, kept from one to the next."""

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """Start to fill slice ``k`` of ``out`` with slice ``rank`` of rank ``k``'s ``parts``.

        Both have ``world_size`` equal slices and one dtype, any, and do not overlap. When ``wait``
        returns, ``parts`` may be overwritten (a gather promises less: see `Collectives`).

        Raises:
            ValueError: they differ, or do not divide by the number of ranks.
        """

    def coded(self, codec: SliceCodec) -> TransportCollectives:
        """Return these collectives with reductions that send ``codec``'s messages to other nodes.

        Sums, order and statistics are as before. Every rank calls it with a codec of one kind.
        """

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        """Return collectives among ``ranks`` of this group, renumbered in that order.

        Every rank calls it equally often, in one order, each with the subgroup that it is in.
        Subgroups do not disturb each other, and share `launch`.

        Raises:
            ValueError: this rank is not among ``ranks``, or one is given twice or does not exist.
        """

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate 1-D memory, held as long as the collectives: on hosts, shared within the node.

        Other ranks read what is gathered from it in place: see `Collectives`.
        """

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """Run ``job`` beside the caller, after the earlier jobs of the same queue.

        There are two queues, for gathers and for reductions. A job waits for its works: a second
        hop starts when the first has arrived, whatever the caller does meanwhile. On hosts a queue
        is a thread, in which the caller's grad and inference modes hold. On an accelerator it is a
        stream: the job runs at once, on the host, and what it enqueues is ordered after what the
        caller's current stream holds. Memory that it allocates there is reused in the order of the
        queue's stream: a reader on another stream keeps it. ``wait`` of the result returns (on an
        accelerator: lets the current stream go on) when the job is done, and raises what it raised.
        A job launched by a job of the same queue runs at once.
        """


class CollectivesFactory(Protocol):
    """Entry point of ``zero_core.collectives``: decorates the engine's own collectives."""

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
        """Make collectives that carry their bytes, of any dtype, over ``native``.

        Args:
            config: the resolved ``zero_optimization`` block as plain builtins.
            ranks_per_node: divides ``world_size``; ranks of a node are consecutive.
            frozen: indices of the segments that are never trained.

        Raises:
            ValueError: a setting that it refuses, by name.
        """


@runtime_checkable
class StateTier(Protocol):
    """Keeper and updater of master weights and optimizer state.

    See [Note: the local flat space] for offsets. Nothing here is a collective, but for ``step`` of
    `zero_core.optim.whole_tier.WholeTier`.
    """

    @property
    def owns_grads(self) -> bool:
        """Whether `offer_grad` copies the gradient into memory of the tier.

        The engine then offers it in the communication dtype, and keeps none of its own.
        """

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Take the final gradient of ``[start, start + grad.numel())`` for the next step.

        Called in backward as each segment is reduced. ``grad`` is the engine's: 1-D, contiguous,
        floating point, on its device. It may be read from ``step`` on, which may overwrite it, and
        stays until a ``step`` that uses it or ``discard_grads`` has returned. If the tier
        ``owns_grads``, it may be read at once, and stays until what is returned has been called, or
        not at all if that is None. A range may be offered again (by a second backward): the last
        offer holds.
        """

    def read_grad(self, start: int, stop: int) -> Tensor:
        """A copy of what was offered for ``[start, stop)``: 1-D, on the CPU, in its dtype."""

    def discard_grads(self) -> None:
        """Forget what was offered and no ``step`` has used."""

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces ``active``, sorted indices. Others keep values, states and step counts.

        ``groups`` are the optimizer's ``param_groups`` without ``params``. Gradients are multiplied
        by ``grad_scale`` (unscale and clip in one factor). New values are written to the parameter
        shards given at construction; the call may return before that is done. One step of the
        training may call it several times, each for pieces that were offered and not updated yet,
        while backward goes on; other offers stay. The engine ends a step with `discard_grads`.
        """

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards within ``[start, stop)`` hold their new values."""

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Whether `wait_params` returns at once, and makes no stream wait. False if it raises."""

    def state_names(self) -> Sequence[str]:
        """Names of the elementwise states: ``master_weight`` first, then e.g. ``exp_avg``."""

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of ``[start, stop)`` of a state: 1-D, on the CPU, as stored, 0 without one."""

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``.

        Writing ``master_weight`` publishes the rounded values to the parameter shards as well.

        Raises:
            KeyError: the optimizer cannot have it. Else a new name becomes known.
        """

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Per-parameter scalars: ``num_steps`` (updates applied) and e.g. ``mu_product``."""

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave. ``num_steps`` of 0 means that there is no state."""

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Refuse what `write_state` or `write_scalars` would refuse, and change nothing.

        ``scalars`` are those of each piece.

        Raises:
            KeyError: the optimizer cannot have such a state.
            ValueError: the scalars are another optimizer's.
        """


class ChangeWatcher(Protocol):
    """Reads states before they change."""

    def before_change(self, start: int, stop: int) -> None:
        """Called before states of ``[start, stop)`` may change, by the thread that changes them.

        It may wait, and may be called for what does not change, or has changed before.
        """


@runtime_checkable
class SnapshotTier(StateTier, Protocol):
    """A state tier whose states of one moment can be read while training goes on."""

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` right before each part of updates and writes, in place of an earlier."""

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Read a range that no thread changes, on any thread, without a wait: see `read_state`."""


@runtime_checkable
class AccumulatingTier(StateTier, Protocol):
    """A state tier that owns gradients, and adds up those of a step's micro-steps itself.

    The sum is taken in fp32 (float64 for float64), in the order of the calls, wherever it is kept.
    ``offer_grad`` replaces it, ``read_grad`` returns it, a ``step`` or ``discard_grads`` ends it.
    """

    def expect_micro_steps(self, count: int) -> None:
        """Prepare memory for about ``count`` > 1 calls of `add_grad` per range and step.

        Called once, before the first of them and before state is written.
        """

    def add_grad(self, start: int, grad: Tensor, *, is_last: bool) -> Callable[[], None] | None:
        """Add to the gradient of ``[start, start + grad.numel())`` for the next step.

        Called in each micro-step's backward. ``grad`` and the result are as for ``offer_grad``; it
        is added in its dtype. ``is_last``: the gradient is complete with it, unless another
        backward of the last micro-step follows.
        """

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Start to compute the sum of the squares of the gradient of ``[start, stop)``.

        The call that is returned waits for it: 0-dim, float64, on the CPU or the device, summed in
        double precision. It is not finite if an element is not.
        """


@runtime_checkable
class TimedTier(StateTier, Protocol):
    """A state tier that works beside the caller, and counts time and bytes.

    Counts only grow, and are read between two steps, without a wait.
    """

    @property
    def host_numel(self) -> int:
        """Elements that the host updates."""

    def work_s(self) -> Mapping[str, float]:
        """Seconds so far: "host" (updates by its thread), "file" (reads and writes under way) and
        "file wait" (updates that waited for those).
        """

    def copied_bytes(self) -> tuple[int, int]:
        """Bytes copied so far from the device to the host, and back."""

    def recent_updates(self) -> Sequence[tuple[float, float]]:
        """Start and end of the host's last updates, of `time.perf_counter`, in order."""

    def time_copies(self, *, is_on: bool) -> None:
        """Time later copies between the device and the host, or no longer. A CPU has none."""

    def take_copies(self) -> Sequence[tuple[str, torch.Event, torch.Event]]:
        """Return the copies timed since the last call.

        Each is what it carries and the timed events around it, which may not have fired yet.
        """

    def host_memory_bytes(self) -> Mapping[str, int]:
        """Bytes of host memory that it keeps now, by kind, as of a plan's ``memory.host``."""


@runtime_checkable
class ReservingTier(StateTier, Protocol):
    """A state tier that can allocate all of its memory before there are activations."""

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate what gradients are copied to, or widened in, and what copies pass through.

        Called once on an accelerator, before the first gradient. ``grads``: ``(start, stop,
        dtype)`` of what is going to be offered or added.
        """


@runtime_checkable
class SpeculativeTier(StateTier, Protocol):
    """A state tier that can begin a step before it is decided, and undo what it began.

    Speculation-then-validation of SuperOffload (arXiv 2509.21271), with nothing to be seen of it:
    parameters, states and gradients read as if no update had begun.
    """

    @property
    def undo_bytes(self) -> int:
        """Bytes of host memory of the undo log."""

    def enable_undo(self) -> bool:
        """Prepare for `speculate`. Called once. Return whether the tier's updates can be undone."""

    def speculate(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Begin to ``step`` over offered pieces, as far as memory allows. Arguments as there.

        Each call before ``step`` is for other pieces. A ``step`` with the same settings and factor
        over these and others goes on with it. Anything else done with them undoes it first: a step
        with another factor, an offer, reads and writes of states, ``discard_grads``.
        """


@runtime_checkable
class ParamStore(Protocol):
    """Takes the new values of parameter shards that rest where the tier cannot write itself."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``[start, start + values.numel())`` of the local flat space.

        Any thread may call it, one at a time. ``values`` is 1-D, on any device, in the compute
        dtype, within one shard, and the caller's again when the call returns.
        """


@runtime_checkable
class DeviceMemory(Protocol):
    """A tier, or collectives, whose device memory `Engine.offload_states` may empty for a while."""

    def device_tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return all long-lived tensors on the device, by the name of a `StatePart`.

        Called between two steps, while no exchange or update is under way. The engine copies their
        bytes to the host, except for "buffers" (scratch), and resizes the storages to zero and
        later back: tensors stay the same objects, at new addresses. Until then it calls nothing.
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
            params: ``(start, tensor)``: sorted 1-D parameter shards in the compute dtype, where new
                values go: on ``device``; on the CPU, where they rest; or on the meta device, for
                ``param_store``. The engine writes ``master_weight`` before the first step; what
                shards hold until then does not count.
            device: the compute device.
            optimizer_class: the torch optimizer whose update is wanted.
            groups: its ``param_groups`` without ``params`` (every default filled in).
            config: the resolved ``zero_optimization`` block as plain builtins.
            adam_kernel: the host kernel, for Adam, AdamW, Adagrad, SGD, Lion and classes that say
                they have one (`zero_core.optim.factory.has_kernel_rule`).
            device_tier: makes a tier on the compute device out of torch's own optimizer.
            names: of the parameters, one per piece; the engine always gives them.
            param_store: takes the new values of shards on the meta device, if there are any.
            upload_codec: of the differences that ``offload_optimizer.lossless_upload`` sends, where
                the key is on.

        Raises:
            ValueError: a setting or an optimizer that it cannot serve, by name.
        """


class UploadCodec(Protocol):
    """Lossless differences of parameters on their way from host memory to a device.

    An entry point of ``zero_core.upload_codecs`` returns one. Tensors are 1-D and contiguous.
    """

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the most bytes of a difference, or 0 if such elements have none."""

    def checksum(self, values: Tensor) -> Tensor:
        """Return an int64 checksum of the bytes, 0-dim, the same on any device, without a wait."""

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Write the difference from ``old`` to ``new``, in host memory, and return its bytes.

        ``out`` is uint8, `max_nbytes` long, at an even address, and undefined past the result.
        """

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Apply an `encode`d ``difference``, at an even address, to ``values``, on their stream."""


class DeviceTierFactory(Protocol):
    """The engine's own tier: torch's optimizer on the compute device."""

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
    ) -> StateTier:
        """Make a tier. ``pieces`` and ``params`` are in coordinates of ``[0, numel)``.

        Shards of the dtypes ``own_masters`` (`zero_core.config.WIDE_DTYPES`) are their own masters.
        """


@runtime_checkable
class ParamTier(Protocol):
    """Keeper of this rank's parameter shards while no unit needs them, in memory of its own.

    ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), section 5.1. A shard is named by the index
    of its segment. Nothing is a collective.
    """

    def expect(self, segments: Sequence[int]) -> None:
        """These are fetched next, in this order, as far as known: a tier may read them ahead."""

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Start to copy the current values of a shard to ``out``, on the device or on the CPU.

        ``out`` is 1-D, contiguous, of the shard's length and dtype. On an accelerator the copy
        follows what the caller's current stream holds, and ``wait`` of the result makes the stream
        wait that is current then. On the CPU the values are there when ``wait`` returns.
        """

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite elements ``[start, start + values.numel())`` of a shard not being fetched.

        Any thread may call it, one at a time. ``values`` is 1-D, on any device, cast to the shard's
        dtype, and the caller's again when the call returns.
        """

    def home(self, segment: int) -> Tensor | None:
        """Return the shard, 1-D, on the CPU, if it may be used in place, or None.

        It is written only while no fetch of it is under way.
        """

    def report(self) -> Mapping[str, int]:
        """Bytes that it holds outside of the device, by kind."""


class ParamTierFactory(Protocol):
    """Entry point of ``zero_core.param_tiers``."""

    def __call__(
        self,
        *,
        shards: Sequence[tuple[int, int, torch.dtype]],
        device: torch.device,
        config: Mapping[str, Any],
    ) -> ParamTier:
        """Make a tier for ``shards``, ``(segment, numel, dtype)`` of each in the order of use.

        ``config`` is the resolved ``zero_optimization`` block as plain builtins.

        Raises:
            ValueError: a setting that it cannot serve, by name.
        """


class MicroBatchLoss(Protocol):
    """Computes the loss of one micro-batch, for `zero_core.Engine.train_batch`."""

    def __call__(self, batch: Any, /) -> Tensor:
        """Return the loss of ``batch``, 0-dim."""


class AdamKernel(Protocol):
    """One pass over flat host memory: gradient in, master and moments updated, copy out.

    Entry point of ``zero_core.adam_kernels``: a module that has this function, and maybe
    ``adagrad_step``, ``sgd_step``, ``lion_step``, and ``adam_step_8bit`` and ``adam_step_bf16`` for
    ``offload_optimizer.state_dtype``. A tier that finds one missing updates by torch's own
    optimizer, or refuses the ``state_dtype``.
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
        are updated. Hyperparameters are torch.optim.AdamW's.

        Args:
            grad: fp32, bf16 or fp16, same length; multiplied by ``grad_scale`` first.
            step: number of this update, from 1.
            adamw_mode: decoupled weight decay instead of L2.
            bias_correction: divide the moments by ``1 - beta ** step``.
            out: fp32, bf16 or fp16, same length: receives the rounded master.
            num_threads: None for the default.
        """


@runtime_checkable
class PartitionedParam(Protocol):
    """A parameter without memory of its own. ``build`` asks for one value at a time.

    It is an ``nn.Parameter`` of the value's shape and dtype whose class has these members, as
    made by DeepSpeed's ``zero.Init``.
    """

    @property
    def is_deferred(self) -> bool:
        """Whether rank 0 alone computes the value."""

    def full_value(self) -> Tensor:
        """Return the whole value on the CPU. Unless `is_deferred`, every rank must call it."""

    def free_value(self) -> None:
        """Free the memory of the value, which is not `is_deferred`, until `set_value`."""

    def set_value(self, value: Tensor) -> None:
        """Keep the whole ``value`` again, in the parameter's dtype. Every rank must call it."""

    def make_ordinary(self) -> None:
        """Forget the value: become a plain ``nn.Parameter`` on the CPU without memory."""
