"""Structural protocols of the objects that this package receives and returns.

Neither this package nor zero-core imports the other, so some protocols are defined in both, under
the same names. The flat space is the 1-D concatenation of the parameter elements whose optimizer
state this process owns. A shard is a range of it in one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's ``param_groups``, every default filled in. Their ``params`` are not used."""
OptimizerClass = type[torch.optim.Optimizer]


@runtime_checkable
class ParamStore(Protocol):
    """Writer of new values to parameter shards that are not in memory."""

    def write(self, start: int, values: Tensor) -> None:
        """Store ``values`` at ``[start, start + values.numel())`` of the flat space.

        Any thread may call it, one at a time. ``values`` is 1-D, in the shard's dtype, within one
        shard, and may be reused after the call.
        """


@runtime_checkable
class UploadCodec(Protocol):
    """Codec for lossless differences between old and new parameters (1-D, contiguous)."""

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the maximum bytes of a difference, or 0 if this item size is not supported."""

    def checksum(self, values: Tensor) -> Tensor:
        """Return a checksum of the bytes of ``values``, without synchronizing with their device.

        The result is an int64 scalar tensor on that device. Its value is the same on every device.
        """

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Write the difference from ``old`` to ``new`` to ``out`` and return its length in bytes.

        All tensors are in host memory. ``out`` is uint8, `max_nbytes` long and at an even address.
        """

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Change ``values`` in place from ``old`` to ``new`` of the call of `encode`.

        ``difference`` is uint8, exactly the bytes that `encode` wrote, at an even address. An
        accelerator decodes it on the current stream.
        """


class PassOptions(TypedDict, total=False):
    """Keyword arguments that every update function of a kernel accepts.

    The gradient is multiplied by ``grad_scale`` (default 1). ``out`` (fp32, bf16 or fp16, or None)
    receives the rounded weights. ``num_threads`` is None for the kernel's default.
    """

    grad_scale: float
    out: Any
    num_threads: int | None


class AdamHyper(PassOptions):
    """Keyword arguments of an Adam update. ``step`` starts at 1. Booleans default to True."""

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
    """Kernel that updates flat host memory by Adam in one pass.

    The other kernel protocols are optional. Torch computes the optimizers that a kernel lacks.
    """

    def adam_step(
        self, master: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, **hyper: Unpack[AdamHyper]
    ) -> None:
        """Apply one Adam update in place.

        ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32, 1-D and contiguous, and are updated.
        ``grad`` is fp32, bf16 or fp16.
        """


@runtime_checkable
class SummingKernel(Protocol):
    """Kernel whose functions accept a list of gradients as ``grad`` if ``sums_grads`` is True.

    The kernel adds them in fp32, in order, in the same pass. Otherwise torch adds them beforehand.
    """

    sums_grads: bool

    def grad_norm_sq(
        self, grad: Any, *, grad_scale: float = 1.0, num_threads: int | None = None
    ) -> tuple[float, bool]:
        """Return the sum of squares of the scaled gradient, and whether all elements are finite."""


@runtime_checkable
class CopyingKernel(Protocol):
    """Kernel whose update functions accept ``copies`` if ``copies_first`` is True."""

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
        """Apply one Adam update in place, see `AdamKernel.adam_step`.

        ``copies`` are pairs of source and target, each as long as ``master``. The kernel copies
        each element from source to target before it updates this element.
        """


@runtime_checkable
class EightBitAdamKernel(Protocol):
    """Adam kernel with both moments in 8 bits."""

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
        encoded as in [Note: 8-bit codes] of `zero_offload.rules.compact`. ``param`` is fp32, or
        bf16 with an int16 ``remainder``: see [Note: split master] there. ``out`` is allowed for an
        fp32 ``param`` only.
        """


@runtime_checkable
class Bf16AdamKernel(Protocol):
    """Adam kernel with both moments in bf16."""

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

        The other arguments are those of `EightBitAdamKernel.adam_step_8bit`. The random numbers
        depend only on ``seed``, ``step`` and the element's index.
        """


@runtime_checkable
class AdagradKernel(Protocol):
    """Kernel with a function for Adagrad."""

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
        """Apply one update of torch.optim.Adagrad in place. Tensors are as in `AdamKernel`."""


@runtime_checkable
class SgdKernel(Protocol):
    """Kernel with a function for stochastic gradient descent."""

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
        """Apply one update of torch.optim.SGD in place. Tensors are as in `AdamKernel`.

        ``momentum_buffer`` is None without momentum. Step 1 overwrites its values.
        """


@runtime_checkable
class LionKernel(Protocol):
    """Kernel with a function for Lion (Chen et al., 2023, arXiv 2302.06675)."""

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
        """Apply one update with decoupled weight decay in place. Tensors are as in `AdamKernel`."""


@runtime_checkable
class ElementwiseOptimizer(Protocol):
    """Optimizer class that declares whether its update is elementwise: see `check_elementwise`."""

    is_elementwise: bool


@runtime_checkable
class RuledOptimizer(Protocol):
    """Optimizer class that declares its update rule.

    ``update_rule`` is "adam", "adagrad", "sgd" or "lion". The ``param_groups`` have the settings of
    torch's optimizer of that name. Those of "lion" are ``lr``, ``betas`` and ``weight_decay``.
    """

    update_rule: str


@runtime_checkable
class HostKernelOptimizer(Protocol):
    """Optimizer class that wraps an Adam kernel and declares it, such as ``cpu_adam.CPUAdam``.

    Its ``param_groups`` have the settings ``lr``, ``betas``, ``eps``, ``weight_decay``,
    ``adamw_mode`` and ``bias_correction``.
    """

    host_kernel: AdamKernel


class ChangeWatcher(Protocol):
    """Observer that reads states before they change."""

    def before_change(self, start: int, stop: int) -> None:
        """Called before states of ``[start, stop)`` change, in the thread that will change them."""


@runtime_checkable
class StateTier(Protocol):
    """Master weights and optimizer state of one flat space, and their update.

    Offsets are elements of the local flat space ``[0, numel)``. A piece is the range of one
    parameter in the flat space.
    """

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Accept the final gradient of ``[start, start + grad.numel())``.

        Return None, or a function to call before the memory of ``grad`` is overwritten.
        """

    def read_grad(self, start: int, stop: int) -> Tensor:
        """Return a 1-D CPU copy of the gradient offered for ``[start, stop)``."""

    def discard_grads(self) -> None:
        """Discard all gradients that no step has used."""

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the pieces listed in ``active``, possibly in the background."""

    def wait_params(self, start: int, stop: int) -> None:
        """Wait for the new parameters within ``[start, stop)``, or make the current stream wait."""

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Return whether all new values in a range have arrived, False after a failed update."""

    def state_names(self) -> Sequence[str]:
        """Return the names of the elementwise states, ``master_weight`` first."""

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return a 1-D CPU copy of one state over ``[start, stop)``."""

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state over ``[start, start + values.numel())``."""

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """Return the scalar states of a piece, and its number of updates as ``num_steps``."""

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore the result of `read_scalars`."""

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Raise KeyError or ValueError unless ``names`` and ``scalars`` could be written."""

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before every later change of states."""

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return what `read_state` does without waiting. The range must not change meanwhile."""


@runtime_checkable
class ReservingTier(StateTier, Protocol):
    """State tier that can allocate memory for a step before its first gradient."""

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]]) -> None:
        """Allocate the memory for gradients, for their conversion, and for copies of parameters.

        It is called once on an accelerator, before the first gradient. ``grads`` are ``(start,
        stop, dtype)`` of the gradients that will be offered or added.
        """


@runtime_checkable
class DeviceMemory(Protocol):
    """Tier that can list its device memory, which may be released between two steps."""

    def device_tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return tensors by kind: "master_weights", "optimizer_states", "gradients", "buffers"."""


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
        """Create a tier for ``[0, numel)``, to which ``pieces`` and ``params`` refer."""
