"""What the engine asks of the parts it is composed from.

Every protocol here is shaped by its one caller, the engine, and uses only builtins and torch
types in its signatures, so that a part satisfies it by shape alone and never has to import this
package. Parts announce themselves by entry points:

=========================  =====================  =========================================
entry-point group          object                 asked for by the config key
=========================  =====================  =========================================
``zero_core.collectives``  `CollectivesFactory`   ``zero_optimization``: quantized weights and
                                                  gradients, secondary shards
``zero_core.state_tiers``  `StateTierFactory`     ``zero_optimization.offload_optimizer``
``zero_core.param_tiers``  `ParamTierFactory`     ``zero_optimization.offload_param``
``zero_core.adam_kernels`` `AdamKernel`           ``offload_optimizer`` with Adam, AdamW,
                                                  Adagrad, SGD or Lion
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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zero_core.comm_protocols import (
    EXACT_GRADIENTS,
    EXACT_PARAMETERS,
    Collectives,
    CollectivesFactory,
    NativeCollectives,
    Work,
)

__all__ = [
    "EXACT_GRADIENTS",
    "EXACT_PARAMETERS",
    "AdamKernel",
    "Collectives",
    "CollectivesFactory",
    "NativeCollectives",
    "ParamStore",
    "ParamTier",
    "ParamTierFactory",
    "StateTier",
    "StateTierFactory",
    "Work",
]


@runtime_checkable
class StateTier(Protocol):
    """Where master weights and optimizer state live, and who updates them.

    See [Note: the local flat space] for offsets. Nothing here is a collective, but for ``step`` of
    `zero_core.matrices`, which is never offered by another package.

    If an attribute ``keeps_grads`` is true, `offer_grad` copies: the engine then offers gradients
    in the dtype in which they travel, and keeps none of its own from one unit to the next.
    """

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Take the final gradient of ``[start, start + grad.numel())`` for a step to come.

        Called in backward as each segment is reduced. ``grad`` is 1-D, contiguous, floating
        point, on the engine's device, and belongs to the engine. It stays valid until a ``step``
        that uses it or ``discard_grads`` has returned; if the tier ``keeps_grads``, until what is
        returned has been called, or not at all if that is None. A range may be offered again (a
        second backward in the same micro-step): the last offer holds. ``step`` may overwrite what
        was offered.
        """
        ...

    def read_grad(self, start: int, stop: int) -> Tensor:
        """A copy of what is offered for ``[start, stop)``: 1-D, on the CPU, as it was offered."""
        ...

    def discard_grads(self) -> None:
        """Forget what was offered and no ``step`` has used."""
        ...

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces listed in ``active`` (sorted indices); leave all others alone.

        A piece left alone gets no weight decay, no moment update and no step count.
        ``groups`` are the optimizer's ``param_groups`` without ``params``. Gradients are
        multiplied by ``grad_scale`` (unscale and clip in one factor). New values are written to
        the parameter shards given at construction; the call may return before that is done.

        It may be called several times for one step of the training, each time for pieces that were
        offered and not updated yet: units are updated while backward goes on. What other pieces
        were offered stays. The engine ends a step with `discard_grads`.
        """
        ...

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards within ``[start, stop)`` hold their new values."""
        ...

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Whether `wait_params` would return at once, and make no stream wait."""
        ...

    def state_names(self) -> Sequence[str]:
        """Names of the elementwise states: ``master_weight`` first, then e.g. ``exp_avg``."""
        ...

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU, in the stored dtype.

        Elements that have no state yet read as zero.
        """
        ...

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``.

        Writing ``master_weight`` publishes the rounded values to the parameter shards as well.
        A name not in ``state_names`` yet becomes known, if the optimizer can have it (KeyError
        otherwise).
        """
        ...

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Per-parameter scalars: ``num_steps`` (updates applied) and e.g. ``mu_product``."""
        ...

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave. ``num_steps`` of 0 means that there is no state."""
        ...


@runtime_checkable
class ParamStore(Protocol):
    """Takes the new values of parameter shards that rest where the tier cannot write itself."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``[start, start + values.numel())`` of the local flat space.

        May be called from any thread, by one at a time. ``values`` is 1-D, on any device, in the
        compute dtype, within one shard; it is the caller's again when the call returns.
        """
        ...


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
    ) -> StateTier:
        """Make a tier for the local flat space.

        Args:
            numel: length of the local flat space, padding included.
            pieces: ``(start, stop, group)`` of each parameter's part.
            params: ``(start, tensor)``: 1-D parameter shards in the compute dtype, sorted, each
                covering ``[start, start + tensor.numel())``: where new values go. A shard is on
                ``device``; or on the CPU, where it rests; or on the meta device: then its new
                values go to ``param_store``. The engine writes ``master_weight`` before the first
                step; what the shards hold until then does not count.
            device: the compute device.
            optimizer_class: the torch optimizer whose update is wanted.
            groups: its ``param_groups`` without ``params`` (every default filled in).
            config: the resolved ``zero_optimization`` block as plain builtins.
            adam_kernel: the host kernel; given for Adam, AdamW, Adagrad, SGD and Lion, and for
                classes that say they have one (`zero_core.optimizer.has_kernel_rule`); else None.
            device_tier: makes a tier on the compute device out of torch's own optimizer.
            names: of the parameters, one per piece; the engine always gives them.
            param_store: takes the new values of shards on the meta device; None if there are none.

        Raises:
            ValueError: a setting or an optimizer that it cannot serve, by name.
        """
        ...


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
    ) -> StateTier:
        """As `StateTierFactory`; ``pieces`` and ``params`` in coordinates of ``[0, numel)``."""
        ...


@runtime_checkable
class ParamTier(Protocol):
    """Where this rank's parameter shards rest while no unit needs them; the memory is its own.

    ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), section 5.1. A shard is named by the index
    of its segment. Nothing here is a collective.
    """

    def expect(self, segments: Sequence[int]) -> None:
        """These are going to be fetched next, in this order: a tier may read them ahead.

        A hint, repeated as the order moves on; what is fetched may differ.
        """
        ...

    def fetch(self, segment: int, out: Tensor) -> Work:
        """Start to copy the current values of a shard to ``out``.

        On an accelerator the copy is ordered after what the caller's current stream holds, and
        ``wait`` of the result makes the stream wait that is current then. The engine calls it on a
        stream of its own. On the CPU the values are there when ``wait`` returns.

        Args:
            segment: one of those at construction.
            out: 1-D, contiguous, the shard's length and dtype, on the device or on the CPU.
        """
        ...

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite elements ``[start, start + values.numel())`` of a shard.

        Called by one thread at a time, which may be another than the one that fetches, but never
        for a shard that is being fetched. ``values`` is 1-D, on any device, cast to the shard's
        dtype, and the caller's again when the call returns.
        """
        ...

    def home(self, segment: int) -> Tensor | None:
        """The shard itself, 1-D, on the CPU, if it rests where it may be read and written; or None.

        It is written only while no fetch of it is under way.
        """
        ...

    def report(self) -> Mapping[str, int]:
        """Bytes that it holds outside of the device, by kind."""
        ...


class ParamTierFactory(Protocol):
    """Entry point of ``zero_core.param_tiers``."""

    def __call__(
        self,
        *,
        shards: Sequence[tuple[int, int, torch.dtype]],
        device: torch.device,
        config: Mapping[str, Any],
    ) -> ParamTier:
        """Make a tier for ``shards``.

        Args:
            shards: ``(segment, numel, dtype)`` of each, in the order in which they are used.
            device: the compute device.
            config: the resolved ``zero_optimization`` block as plain builtins.

        Raises:
            ValueError: a setting that it cannot serve, by name.
        """
        ...


class AdamKernel(Protocol):
    """One pass over flat host memory: gradient in, master and moments updated, copy out.

    Entry point of ``zero_core.adam_kernels``. A module that has this function satisfies it.
    Optional further functions: ``adagrad_step``, ``sgd_step`` and ``lion_step`` for those
    optimizers, ``adam_step_8bit`` and ``adam_step_bf16`` for ``offload_optimizer.state_dtype``. A
    tier that finds one missing updates by torch's own optimizer, or refuses the ``state_dtype``.
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
        """Apply one Adam update (Kingma and Ba 2015; AdamW: Loshchilov and Hutter 2019) in place.

        Args:
            master: fp32, 1-D, contiguous, host memory; updated.
            grad: fp32, bf16 or fp16, same length; multiplied by ``grad_scale`` first.
            exp_avg: fp32; updated.
            exp_avg_sq: fp32; updated.
            step: number of this update, from 1.
            lr: learning rate.
            beta1: decay of ``exp_avg``.
            beta2: decay of ``exp_avg_sq``.
            eps: added to the denominator.
            weight_decay: decoupled (``adamw_mode``) or L2.
            adamw_mode: decoupled weight decay.
            bias_correction: divide the moments by ``1 - beta ** step``.
            grad_scale: factor on the gradient: unscale and clip.
            out: fp32, bf16 or fp16, same length: receives the rounded master in the same pass.
            num_threads: None for the default.
        """
        ...
