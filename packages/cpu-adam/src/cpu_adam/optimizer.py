"""`CPUAdam`: Adam and AdamW for parameters in host memory, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cpu_adam import _kernels
from cpu_adam._isa import active_isa_index
from cpu_adam._scalars import adam_scalars, check_seed, compact_adam_scalars, random_key
from cpu_adam._slots import (
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    SCALES,
    STATE_DTYPES,
    TYPES,
    Slot,
    check_name,
    local_of,
)
from cpu_adam._threads import resolve_num_threads

__all__ = ["CPUAdam"]

_STATES = ("exp_avg", "exp_avg_sq", *SCALES, MASTER, REMAINDER)


class CPUAdam(Optimizer):
    """Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) on CPU parameters.

    One pass over memory per step, and one call for all parameters of a group, however small.
    fp32 parameters are updated directly; bf16 and fp16 parameters through an fp32 master weight,
    and rounded to nearest even. State per parameter, with the names of torch's own Adam: ``step``
    (a 0-d fp32 tensor), ``exp_avg`` and ``exp_avg_sq`` (fp32), so that for fp32 parameters each
    loads the other's ``state_dict``.

    The master weight is kept as ``master_dtype`` says. ``"float32"``: a copy in the state
    (``master_weight``). ``"split"``, for bf16 parameters alone: the parameter is the upper half,
    and the state has the lower one (``remainder``, int16), so that two bytes per element do for
    four; see `cpu_adam.adam_step_split`. The default is ``"split"`` where bf16 parameters meet
    8- or 16-bit moments, and ``"float32"`` otherwise.

    With ``state_dtype="int8"`` or ``"bfloat16"`` the moments take less memory; see
    `cpu_adam.adam_step_8bit` and `cpu_adam.adam_step_bf16`: with a split master, 6.0625 or 8 bytes
    per element in all. 8-bit moments come with ``exp_avg_scale`` and ``exp_avg_sq_scale``, fp32,
    one number per 128 elements in memory (of a DTensor's local part: convert to fp32 before
    resharding). `cpu_adam.convert_state` changes the width and the master; a loaded state dict
    brings its own.

    A DTensor parameter is updated through its local part; its state is made of DTensors too.
    ``GradScaler`` leaves unscaling, and skipping after an overflow, to this class.

    Args:
        params: parameters, named parameters or parameter groups, on the CPU; fp32, bf16 or fp16.
        lr: learning rate.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled (``adamw_mode``) or L2.
        amsgrad: not supported; True is refused.
        bias_correction: divide the moments by ``1 - beta ** step``.
        adamw_mode: decoupled weight decay; the default, unlike ``torch.optim.Adam``.
        state_dtype: of the moments: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        master_dtype: how master weights are kept: ``"float32"``, ``"split"`` or None, the default;
            of no account for fp32 parameters.
        seed: of the stochastic rounding of bf16 moments, in [0, 2**64).
        num_threads: threads for a step; None for torch's count.

    Raises:
        TypeError: a parameter of another dtype, or a hyperparameter that is not a number.
        ValueError: a parameter that is not on the CPU, a hyperparameter out of range, amsgrad, an
            fp16 parameter whose master is to be split.
    """

    # Read by torch.amp.GradScaler: it sets `grad_scale` and `found_inf` before it calls `step`.
    _step_supports_amp_scaling = True

    num_threads: int | None

    is_elementwise = True
    """Any slice may be updated by itself: what offloading and partitioning engines ask."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        state_dtype: str = "float32",
        master_dtype: str | None = None,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        resolve_num_threads(num_threads)
        self.num_threads = num_threads
        self._slots: dict[Tensor, Slot] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
            "adamw_mode": adamw_mode,
            "state_dtype": state_dtype,
            "master_dtype": master_dtype,
            "seed": seed,
        }
        _check_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group` does.

        Raises:
            TypeError, ValueError: what the class says of its arguments; nothing has been added.
        """
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for group in self.param_groups[count:]:
                _check_group(group)
                for param in group["params"]:
                    _check_param(param, group["master_dtype"])
        except (TypeError, ValueError):
            del self.param_groups[count:]
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None without one.

        Raises:
            TypeError, ValueError: sparse gradients; a gradient, parameter or state that is not in
                host memory; a hyperparameter out of range. No parameter has been touched then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            return loss
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        # Everything is looked up and checked before anything is changed.
        updates = []
        stream = 0
        for group in self.param_groups:
            updates.append(_Update(self, group, grad_scale, stream))
            stream += len(group["params"])
        isa, threads = active_isa_index(), resolve_num_threads(self.num_threads)
        for update in updates:
            update.run(isa, threads)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of torch's Adam or AdamW returned.

        The base class casts state to the parameter's dtype, which would round a 16-bit
        parameter's master weight and moments away; here they stay what they were.
        """
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for key, param in zip(ids, params, strict=True):
                for name in _STATES:
                    value = loaded["state"].get(key, {}).get(name)
                    if value is not None and value.dtype is not param.dtype:
                        dtype = _loaded_dtype(name, value)
                        self.state[param][name] = value.to(param.device, dtype, copy=True)

        # The last hook before and the first hook after, so that the user's see the same as ever.
        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = {}
        for group in self.param_groups:
            # A group that torch's Adam saved says it in its own words.
            decoupled = group.get("decoupled_weight_decay", self.defaults["adamw_mode"])
            group.setdefault("adamw_mode", decoupled)
            group.setdefault("bias_correction", self.defaults["bias_correction"])
            group.setdefault("amsgrad", False)
            group.setdefault("state_dtype", "float32")
            group.setdefault("seed", self.defaults.get("seed", 0))
            if "master_dtype" not in group:
                # Masters that were saved stay what they are; for those to come, what was asked.
                saved = chain.from_iterable(self.state.get(p, ()) for p in group["params"])
                is_free = set(MASTER_DTYPES.values()).isdisjoint(saved)
                group["master_dtype"] = self.defaults.get("master_dtype") if is_free else None
            _check_group(group)
            for param in group["params"]:
                check_master(param, group["master_dtype"])

    def _slot_of(self, param: Tensor, state_dtype: str, master_dtype: str | None) -> Slot:
        state = self.state[param]
        slot = self._slots.get(param)
        if slot is None or not slot.is_current(param, state, state_dtype, master_dtype):
            _check_param(param, master_dtype)
            _fill_state(param, state, state_dtype, master_dtype)
            slot = self._slots[param] = Slot(param, state, state_dtype, master_dtype)
        return slot


class _Update:
    """One group's step: the memory to update, gathered and checked, then updated in `run`."""

    def __init__(
        self, optimizer: CPUAdam, group: dict[str, Any], grad_scale: float, stream: int
    ) -> None:
        state_dtype = self._state_dtype = _state_dtype_of(group)
        master_dtype = _master_dtype_of(group)
        # Parameters of the same types and step count go to the kernel in one call.
        batches: dict[tuple[int, int, float], list[int]] = {}
        self._keep_alive: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._step_addresses: list[int] = []
        for index, param in enumerate(group["params"], start=stream):
            grad = param.grad
            if grad is None:
                continue
            slot = optimizer._slot_of(param, state_dtype, master_dtype)
            grad, grad_address, grad_type = slot.grad_memory(grad)
            key = (grad_type, slot.out_type, slot.step.item())
            items = batches.get(key)
            if items is None:
                items = batches[key] = []
            master, *others = slot.addresses
            items += (master, grad_address, *others, slot.numel)
            if state_dtype == "bfloat16":
                items.append(index)
            self._keep_alive.append(grad)
            self._locals.append(slot.local)
            self._step_addresses.append(slot.step_address)
        self._calls = [
            (
                grad_type,
                out_type,
                items,
                _scalars_of(group, int(step) + 1, grad_scale),
                random_key(group["seed"], int(step) + 1) if state_dtype == "bfloat16" else 0,
            )
            for (grad_type, out_type, step), items in batches.items()
        ]

    def run(self, isa: int, num_threads: int) -> None:
        for grad_type, out_type, items, scalars, key in self._calls:
            if self._state_dtype == "float32":
                _kernels.adam(isa, grad_type, out_type, items, scalars, num_threads)
            elif self._state_dtype == "int8":
                _kernels.adam_int8(isa, grad_type, out_type, items, scalars, num_threads)
            else:
                _kernels.adam_bfloat16(isa, grad_type, out_type, items, scalars, key, num_threads)
        _kernels.count_up(self._step_addresses)
        torch.autograd.graph.increment_version(self._locals)


def _state_dtype_of(group: dict[str, Any]) -> str:
    return check_name("state_dtype", group["state_dtype"], STATE_DTYPES)


def _master_dtype_of(group: dict[str, Any]) -> str | None:
    name = group["master_dtype"]
    return None if name is None else check_name("master_dtype", name, MASTER_DTYPES)


def _check_group(group: dict[str, Any]) -> None:
    _state_dtype_of(group)
    _master_dtype_of(group)
    check_seed(group["seed"])
    _scalars_of(group, 1, 1.0)


def _loaded_dtype(name: str, value: Tensor) -> torch.dtype:
    """What a loaded state is kept as: itself if it can be, else fp32."""
    kept = {STATE_DTYPES[kind].get(name) for kind in STATE_DTYPES} | {torch.int16}
    is_known = name not in (MASTER, *SCALES) and value.dtype in kept
    return value.dtype if is_known else torch.float32


def _scalars_of(group: dict[str, Any], step: int, grad_scale: float) -> tuple[float, ...]:
    if group["amsgrad"]:
        raise ValueError("amsgrad: not supported by CPUAdam; pass amsgrad=False")
    if group.get("maximize"):
        raise ValueError("maximize: not supported by CPUAdam; negate the loss")
    try:
        beta1, beta2 = group["betas"]
    except (TypeError, ValueError):
        raise TypeError(f"betas: expected two numbers, got {group['betas']!r}") from None
    derive = adam_scalars if group["state_dtype"] == "float32" else compact_adam_scalars
    return derive(
        step=step,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        adamw_mode=group["adamw_mode"],
        bias_correction=group["bias_correction"],
        grad_scale=grad_scale,
    )


def check_master(param: Tensor, master_dtype: str | None) -> None:
    """Refuse a parameter whose master weight cannot be kept as ``master_dtype`` says."""
    if master_dtype == "split" and param.dtype is torch.float16:
        raise ValueError(
            "master_dtype: 'split' is for bf16 parameters, which are the upper half of an fp32 "
            "number; pass None or 'float32' for an fp16 parameter"
        )


def _check_param(param: Tensor, master_dtype: str | None) -> None:
    if param.device.type != "cpu":
        raise ValueError(f"params: CPUAdam updates CPU parameters; got one on {param.device}")
    if param.layout is not torch.strided:
        raise ValueError(f"params: must be dense, got layout {param.layout}")
    if param.dtype not in TYPES:
        raise TypeError(f"params: dtype must be fp32, bf16 or fp16; got {param.dtype}")
    check_master(param, master_dtype)
    local = local_of(param)
    if not local.is_contiguous() and torch.empty_like(local).stride() != local.stride():
        raise ValueError(
            f"params: must fill its memory without gaps or overlap; got shape "
            f"{tuple(local.shape)} with strides {local.stride()}"
        )


def _fill_state(
    param: Tensor, state: dict[str, Any], state_dtype: str, master_dtype: str | None
) -> None:
    """Create what is missing; and accept a step count in any form."""
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor) or step.dtype is not torch.float32 or not step.is_cpu:
        state["step"] = torch.tensor(float(step), dtype=torch.float32)
    for name, dtype in STATE_DTYPES[state_dtype].items():
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype)
    if state_dtype == "int8":
        num_blocks = -(-local_of(param).numel() // _kernels.BLOCK_NUMEL)
        for name in SCALES:
            if name not in state:
                state[name] = torch.zeros(num_blocks, dtype=torch.float32)
    if param.dtype is not torch.float32:
        _fill_master(param, state, state_dtype, master_dtype)


def _fill_master(
    param: Tensor, state: dict[str, Any], state_dtype: str, master_dtype: str | None
) -> None:
    """Create the master weight of a 16-bit parameter, unless there is one in any form."""
    is_bfloat16 = param.dtype is torch.bfloat16
    found = next((n for n in (MASTER, REMAINDER) if n in state), None)
    if found == MASTER or (found == REMAINDER and is_bfloat16):
        if master_dtype is not None and found != MASTER_DTYPES[master_dtype]:
            raise ValueError(
                f"state {found!r}: is not what master_dtype {master_dtype!r} of its group keeps; "
                "cpu_adam.convert_state changes the one into the other"
            )
    elif (master_dtype or _default_master(param, state_dtype)) == "split":
        state[REMAINDER] = torch.zeros_like(param, dtype=torch.int16)
    else:
        state[MASTER] = param.detach().to(torch.float32)


def _default_master(param: Tensor, state_dtype: str) -> str:
    is_split = param.dtype is torch.bfloat16 and state_dtype != "float32"
    return "split" if is_split else "float32"
