"""Protocols of the objects that this package receives and returns.

They are structural: an object with these methods satisfies them without importing this module. They
repeat the part of the engine's protocols that is used here, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's ``param_groups``, every default filled in. Their ``params`` are not used."""
OptimizerClass = type[torch.optim.Optimizer]


class Work(Protocol):
    """Handle of a copy under way."""

    def wait(self) -> object:
        """Make the caller's current stream wait for it, or on a CPU block until it is done."""


@runtime_checkable
class ParamStore(Protocol):
    """Writer of new values to parameter shards that a tier cannot write itself."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``[start, start + values.numel())`` of the flat space.

        It is called from any thread, one at a time. ``values`` is 1-D, in the shard's dtype, within
        one shard, and may be reused when it returns.
        """


@runtime_checkable
class UploadCodec(Protocol):
    """Lossless differences of parameters on their way from host memory to a device.

    Tensors are 1-D and contiguous.
    """

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the most bytes of a difference, or 0 if such elements have none."""

    def checksum(self, values: Tensor) -> Tensor:
        """Return a checksum of the bytes of ``values``, without waiting for their device.

        It is int64, without dimensions, on that device, and the same on every device.
        """

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Write the difference from ``old`` to ``new``, of one dtype, in host memory.

        ``out`` is uint8, `max_nbytes` long, at an even address, and undefined past the result,
        which is how many bytes were written.
        """

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Change ``values`` from the old to the new ones, on their device's current stream.

        ``difference`` is uint8, exactly the bytes that `encode` wrote, at an even address.
        """


class PassOptions(TypedDict, total=False):
    """Keywords that every update of a kernel has.

    The gradient is multiplied by ``grad_scale`` (1) first. ``out`` (None; fp32, bf16 or fp16)
    receives the rounded weights. ``num_threads`` is None for the kernel's default.
    """

    grad_scale: float
    out: Any
    num_threads: int | None


class AdamHyper(PassOptions):
    """Keywords of an Adam update. ``step`` counts it, from 1. The last two are True if left out."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw_mode: NotRequired[bool]
    bias_correction: NotRequired[bool]


@runtime_checkable
class AdamKernel(Protocol):
    """Adam in one pass over flat host memory.

    It is all that a kernel needs. The protocols below are functions that it may have as well.
    Without one, torch's own update computes that optimizer.
    """

    def adam_step(
        self, master: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, **hyper: Unpack[AdamHyper]
    ) -> None:
        """Apply one Adam update in place.

        ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32, 1-D and contiguous and are updated;
        ``grad`` is fp32, bf16 or fp16.
        """


@runtime_checkable
class SummingKernel(Protocol):
    """A kernel whose functions take a list of gradients in the place of one, if ``sums_grads``.

    They add them in fp32, in order, in the same pass. Without it torch adds them before the pass.
    """

    sums_grads: bool

    def grad_norm_sq(
        self, grad: Any, *, grad_scale: float = 1.0, num_threads: int | None = None
    ) -> tuple[float, bool]:
        """Return the sum of the squares, in double precision, and whether it is finite."""


@runtime_checkable
class CopyingKernel(Protocol):
    """A kernel whose updates all take ``copies``, if ``copies_first``. Else torch copies before."""

    copies_first: bool

    def adam_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        copies: Sequence[tuple[Any, Any]] = (),
        **hyper: Unpack[AdamHyper],
    ) -> None:
        """Do as `AdamKernel.adam_step`.

        ``copies`` are sources and targets, each as long as ``master``. Elements of a source are
        copied to its target just before the update of the same elements.
        """


@runtime_checkable
class EightBitAdamKernel(Protocol):
    """An Adam kernel that keeps both moments in 8 bits."""

    def adam_step_8bit(
        self,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        exp_avg_scale: Any,
        exp_avg_sq_scale: Any,
        *,
        remainder: Any = None,
        **hyper: Unpack[AdamHyper],
    ) -> None:
        """Apply one Adam update in place.

        ``exp_avg`` (int8), ``exp_avg_sq`` (uint8) and their fp32 scales, one per 128 elements, are
        the codes of [Note: 8-bit codes] in `zero_offload.rules.compact`. ``param`` is fp32 without
        ``remainder``, or bf16 with an int16 one: see [Note: split master] there; ``out`` goes with
        an fp32 ``param`` alone.
        """


@runtime_checkable
class Bf16AdamKernel(Protocol):
    """An Adam kernel that keeps both moments in bf16."""

    def adam_step_bf16(
        self,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        *,
        seed: int = 0,
        remainder: Any = None,
        **hyper: Unpack[AdamHyper],
    ) -> None:
        """Apply one Adam update in place, with stochastically rounded bf16 moments.

        The other arguments are those of `EightBitAdamKernel.adam_step_8bit`. The random numbers are
        a function of ``seed``, the step and an element's place.
        """


@runtime_checkable
class AdagradKernel(Protocol):
    """A kernel with a function for Adagrad."""

    def adagrad_step(
        self,
        master: Any,
        grad: Any,
        state_sum: Any,
        *,
        step: int,
        lr: float,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **options: Unpack[PassOptions],
    ) -> None:
        """Apply one update in place, as torch.optim.Adagrad, with arguments as in `AdamKernel`."""


@runtime_checkable
class SgdKernel(Protocol):
    """A kernel with a function for stochastic gradient descent."""

    def sgd_step(
        self,
        master: Any,
        grad: Any,
        momentum_buffer: Any = None,
        *,
        step: int,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[PassOptions],
    ) -> None:
        """Apply one update in place, as torch.optim.SGD, with arguments as in `AdamKernel`.

        ``momentum_buffer`` is None without momentum; step 1 fills it with the gradient.
        """


@runtime_checkable
class LionKernel(Protocol):
    """A kernel with a function for Lion (Chen et al., 2023, arXiv 2302.06675)."""

    def lion_step(
        self,
        master: Any,
        grad: Any,
        exp_avg: Any,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.99,
        weight_decay: float = 0.0,
        **options: Unpack[PassOptions],
    ) -> None:
        """Apply one update in place with decoupled weight decay, arguments as in `AdamKernel`."""


@runtime_checkable
class ElementwiseOptimizer(Protocol):
    """An optimizer class whose update of an element depends on that element alone."""

    is_elementwise: bool


@runtime_checkable
class RuledOptimizer(Protocol):
    """An optimizer class that declares its update rule.

    ``update_rule`` is "adam", "adagrad", "sgd" or "lion", and the ``param_groups`` have the
    settings of that optimizer.
    """

    update_rule: str


@runtime_checkable
class HostKernelOptimizer(Protocol):
    """An optimizer class over an Adam kernel that declares the kernel, as ``cpu_adam.CPUAdam``.

    Its ``param_groups`` have the settings ``lr``, ``betas``, ``eps``, ``weight_decay``,
    ``adamw_mode`` and ``bias_correction``.
    """

    host_kernel: AdamKernel


@runtime_checkable
class StateTier(Protocol):
    """Master weights and optimizer state of one flat space, and their update.

    Offsets are elements of the local flat space ``[0, numel)``; a piece is the part of one
    parameter that lies in it.
    """

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Accept the final gradient of ``[start, start + grad.numel())``."""

    def read_grad(self, start: int, stop: int) -> Tensor:
        """Return a copy of the gradient offered for ``[start, stop)``, 1-D, on the CPU."""

    def discard_grads(self) -> None:
        """Discard the gradients that no step has used."""

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the pieces listed in ``active``, possibly in the background."""

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards within ``[start, stop)`` hold their new values."""

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Return whether `wait_params` returns at once and makes no stream wait.

        False after an update that failed.
        """

    def state_names(self) -> Sequence[str]:
        """Return the names of the elementwise states, ``master_weight`` first."""

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of one state over ``[start, stop)``, 1-D, on the CPU."""

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``."""

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return the scalars of a piece, with ``num_steps``."""

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the result of `read_scalars`."""

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Refuse states ``names``, or ``scalars`` of each piece, that could not be written."""


class ChangeWatcher(Protocol):
    """Reads states before they change."""

    def before_change(self, start: int, stop: int) -> None:
        """Called before states of ``[start, stop)`` change, by the thread that changes them."""


@runtime_checkable
class SnapshotTier(StateTier, Protocol):
    """A state tier whose states of one moment can be read while training goes on."""

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before every change of states from now on."""

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Do as `read_state`, without waiting, for a range that no thread is changing."""


@runtime_checkable
class ReservingTier(StateTier, Protocol):
    """A state tier that can allocate all of its memory before its first gradient."""

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate what gradients are copied to, or widened in, and what copies pass through.

        Called once on an accelerator, before the first gradient. It decides on memory alone.
        ``grads`` are ``(start, stop, dtype)`` of what is going to be offered or added.
        """


@runtime_checkable
class DeviceMemory(Protocol):
    """A tier whose device memory may be emptied for a while, between two steps."""

    def device_tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return all long-lived tensors on the device, by the part of the engine's states."""


class DeviceTierFactory(Protocol):
    """Factory of a tier on the compute device with torch's own optimizer."""

    def __call__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        device: torch.device,
        optimizer_class: OptimizerClass,
        groups: Groups,
        param_store: ParamStore | None = None,
    ) -> StateTier:
        """Create a tier for ``[0, numel)``, with ``pieces`` and ``params`` in its coordinates."""
