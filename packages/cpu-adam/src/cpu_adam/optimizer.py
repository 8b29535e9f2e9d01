"""`CPUAdam`: Adam and AdamW for parameters in host memory, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, compress, count, zip_longest
from types import ModuleType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cpu_adam import _functional, _kernels
from cpu_adam._isa import active_isa_index
from cpu_adam._scalars import (
    adam_scalars,
    check_seed,
    compact_adam_scalars,
    finite_number,
    resolve_num_threads,
)
from cpu_adam._slots import (
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    SCALES,
    STATE_DTYPES,
    Roster,
    check_master,
    check_name,
    check_param,
)

_KERNELS = {
    "float32": _kernels.adam,
    "bfloat16": _kernels.adam_bfloat16,
    "int8": _kernels.adam_int8,
}
_HYPER = ("lr", "eps", "weight_decay", "adamw_mode", "bias_correction")
_STATES = ("exp_avg", "exp_avg_sq", *SCALES, MASTER, REMAINDER)


class CPUAdam(Optimizer):
    """Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) on CPU parameters.

    A step takes one pass over memory, and usually one kernel call for all parameters of a group.
    fp32 parameters are updated directly. bf16 and fp16 parameters are the rounded copy of an fp32
    master weight, which is updated. The state has the names of torch's Adam: ``step`` (0-d fp32
    tensor), ``exp_avg`` and ``exp_avg_sq`` (by default fp32). With fp32 parameters and moments,
    `CPUAdam` loads the ``state_dict`` of torch's Adam or AdamW. Its own is for torch's AdamW with
    ``adamw_mode``, and for torch's Adam without: torch reads the mode under a key that it lacks.
    DCP loads torch's dict with neither ``full_state_dict`` nor flattening, as groups differ.

    ``master_dtype`` is the format of master weights. ``"float32"`` is a copy in the state
    (``master_weight``). ``"split"``, for bf16 parameters only, uses the parameter as the upper half
    and stores the lower half in the state (``remainder``, int16): two bytes per element instead of
    four (see `cpu_adam.adam_step_split`). The default is ``"split"`` for bf16 parameters with 8- or
    16-bit moments, and ``"float32"`` otherwise.

    ``state_dtype="int8"`` or ``"bfloat16"`` makes the moments smaller (see
    `cpu_adam.adam_step_8bit` and `cpu_adam.adam_step_bf16`). With a split master, parameter and
    state take 6.0625 or 8 bytes per element. 8-bit moments have ``exp_avg_scale`` and
    ``exp_avg_sq_scale`` (fp32, one per 128 elements). These scales refer to a DTensor's local
    tensor, and DCP would save those of one rank: convert to fp32 before DCP or resharding.
    `cpu_adam.convert_state` changes the formats of moments and masters. A loaded state dict keeps
    its formats.

    A DTensor parameter is updated through its local tensor. Its moments and master are DTensors.
    ``GradScaler`` leaves unscaling, and skipping after an overflow, to this class.

    Args:
        params: parameters, named parameters or parameter groups, on the CPU; fp32, bf16 or fp16.
        lr: learning rate.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled (``adamw_mode``) or L2. ``torch.optim.AdamW`` has 0.01 by default.
        amsgrad: not supported; True is refused.
        bias_correction: divide the moments by ``1 - beta ** step``.
        adamw_mode: decoupled weight decay; the default, unlike ``torch.optim.Adam``.
        state_dtype: of the moments: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        master_dtype: format of master weights: ``"float32"``, ``"split"`` or None (see above);
            fp32 parameters have none.
        seed: seed of the stochastic rounding of bf16 moments, in [0, 2**64).
        num_threads: threads for a step; None for torch's count.

    Raises:
        TypeError: a parameter has another dtype, or a hyperparameter is not a number.
        ValueError: a parameter is not on the CPU, a hyperparameter is out of range, amsgrad is set,
            or an fp16 parameter's master is to be split.
    """

    # torch.amp.GradScaler reads this flag: if true, it sets `grad_scale` and `found_inf` before
    # `step`.
    _step_supports_amp_scaling = True

    num_threads: int | None

    is_elementwise = True
    """Elements (int8 moments: blocks of 128) are independent, so engines may partition them."""

    host_kernel: ClassVar[ModuleType] = _functional
    """Module whose functions compute this update for an engine that keeps the state itself."""

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
        self._rosters: list[Roster | None] = []
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
            TypeError, ValueError: as for the class, or the group has a parameter twice. Nothing has
                been added then.
        """
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for group in self.param_groups[count:]:
                _check_group(group)
                params = group["params"]
                if len(set(params)) < len(params):
                    raise ValueError("params: a group has a parameter twice; pass it once")
                for param in params:
                    check_param(param, group["master_dtype"])
        except (TypeError, ValueError):
            del self.param_groups[count:]
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, unless ``GradScaler`` found an overflow.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None without one.

        Raises:
            TypeError, ValueError: sparse gradients; a gradient, parameter or state that is not in
                host memory; a hyperparameter out of range. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            return loss
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0
        if scale is not None:
            scale = finite_number("grad_scale", scale)
            if scale == 0.0:
                raise ValueError("grad_scale: must not be zero: gradients are divided by it")
            grad_scale = 1.0 / scale
        # Check everything before changing anything.
        updates = []
        stream = 0
        for group, known in zip_longest(self.param_groups, self._rosters[: len(self.param_groups)]):
            updates.append(_Update(group, self.state, known, grad_scale, stream))
            stream += len(group["params"])
        self._rosters = [update.roster for update in updates]
        isa, threads = active_isa_index(), resolve_num_threads(self.num_threads)
        for update in updates:
            update.run(isa, threads)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class, or of torch's Adam or AdamW.

        The base class casts state to the parameter's dtype, which would round master weights and
        moments of 16-bit parameters. Here they keep a dtype that this class uses, or become fp32.

        Raises:
            TypeError: a state is not a dictionary, or a moment, scale or master in it is not a
                tensor. Nothing has been loaded then.
        """
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            for state in final["state"].values():
                if not isinstance(state, Mapping):
                    raise TypeError(
                        "state_dict: a parameter's state must be a dictionary by name, "
                        f"got {type(state).__name__}"
                    )
                for name in _STATES:
                    value = state.get(name)
                    if value is not None and not isinstance(value, Tensor):
                        kind = type(value).__name__
                        raise TypeError(f"state {name!r}: expected a tensor, got {kind}")
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for key, param in zip(ids, params, strict=True):
                for name in _STATES:
                    value = loaded["state"].get(key, {}).get(name)
                    if value is not None and value.dtype is not param.dtype:
                        kept = {torch.int16, *(d.get(name) for d in STATE_DTYPES.values())}
                        is_kept = name not in (MASTER, *SCALES) and value.dtype in kept
                        dtype = value.dtype if is_kept else torch.float32
                        self.state[param][name] = value.to(param.device, dtype, copy=True)

        # `remember` runs after users' pre-hooks, and `restore` before their post-hooks.
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
        self._rosters = []
        for group in self.param_groups:
            # torch's Adam saves adamw_mode under another key.
            decoupled = group.get("decoupled_weight_decay", self.defaults["adamw_mode"])
            group.setdefault("adamw_mode", decoupled)
            group.setdefault("bias_correction", self.defaults["bias_correction"])
            group.setdefault("amsgrad", False)
            group.setdefault("state_dtype", "float32")
            group.setdefault("seed", self.defaults.get("seed", 0))
            if "master_dtype" not in group:
                # Loaded masters keep their format. Otherwise the constructor's format applies.
                saved = chain.from_iterable(self.state.get(p, ()) for p in group["params"])
                is_free = set(MASTER_DTYPES.values()).isdisjoint(saved)
                group["master_dtype"] = self.defaults.get("master_dtype") if is_free else None
            _check_group(group)
            for param in group["params"]:
                check_master(param, group["master_dtype"])


class _Update:
    """Step of one group. The constructor checks and collects all memory, and `run` updates it."""

    def __init__(
        self,
        group: dict[str, Any],
        states: Mapping[Tensor, dict[str, Any]],
        known: Roster | None,
        grad_scale: float,
        stream: int,
    ) -> None:
        self.roster = known
        # Arguments of each kernel call, except instruction set and number of threads.
        self._arguments: list[tuple[int, int, list[int], tuple[float, ...]]] = []
        found = [param.grad for param in group["params"]]
        has_grad = [grad is not None for grad in found]
        if not any(has_grad):
            return
        settings = _settings_of(group)
        if known is None or not known.is_current(group["params"], settings, states, has_grad):
            with torch.no_grad():
                known = Roster(group["params"], settings, states, has_grad, known)
            self.roster = known
        table = self._table = known.table_of(has_grad)
        # Keeps the gradients alive until `run`, because some may be copies.
        self._grads, addresses, types = table.gradient_memory(list(compress(found, has_grad)))
        columns = [table.masters, addresses, *table.others, table.numels]
        if settings[0] == "bfloat16":
            columns.append(list(compress(count(stream), has_grad)))
        self._kernel = _KERNELS[settings[0]]
        steps = _kernels.read_numbers(table.step_addresses)
        keys = list(zip(types, table.out_types, steps, strict=True))
        for (grad_type, out_type, step), items in _batches(keys, columns):
            if not math.isfinite(step):
                raise ValueError(f"state 'step': must be finite, got {step}")
            scalars = _scalars_of(group, int(step) + 1, grad_scale)
            self._arguments.append((grad_type, out_type, items, scalars))

    def run(self, isa: int, num_threads: int) -> None:
        if not self._arguments:
            return
        for arguments in self._arguments:
            self._kernel(isa, *arguments, num_threads)
        _kernels.count_up(self._table.step_addresses)
        torch.autograd.graph.increment_version(self._table.local)


def _batches(
    keys: list[tuple[int, int, float]], columns: list[list[int]]
) -> Iterable[tuple[tuple[int, int, float], list[int]]]:
    """Group the rows of ``columns`` by key. Return (key, flattened rows) for each key."""
    rows = zip(*columns, strict=True)
    if keys.count(keys[0]) == len(keys):
        return [(keys[0], list(chain.from_iterable(rows)))]
    batches: dict[tuple[int, int, float], list[int]] = {}
    for key, row in zip(keys, rows, strict=True):
        batches.setdefault(key, []).extend(row)
    return batches.items()


def _settings_of(group: dict[str, Any]) -> tuple[str, str | None]:
    state_dtype = check_name("state_dtype", group["state_dtype"], STATE_DTYPES)
    master_dtype = group["master_dtype"]
    if master_dtype is not None:
        check_name("master_dtype", master_dtype, MASTER_DTYPES)
    return state_dtype, master_dtype


def _check_group(group: dict[str, Any]) -> None:
    _settings_of(group)
    check_seed(group["seed"])
    _scalars_of(group, 1, 1.0)


def _scalars_of(group: dict[str, Any], step: int, grad_scale: float) -> tuple[float, ...]:
    if group["amsgrad"]:
        raise ValueError("amsgrad: not supported by CPUAdam; pass amsgrad=False")
    if group.get("maximize"):
        raise ValueError("maximize: not supported by CPUAdam; negate the loss")
    try:
        beta1, beta2 = group["betas"]
    except (TypeError, ValueError):
        raise TypeError(f"betas: expected two numbers, got {group['betas']!r}") from None
    derive: Callable[..., tuple[float, ...]] = adam_scalars
    if group["state_dtype"] != "float32":
        seed = check_seed(group["seed"]) if group["state_dtype"] == "bfloat16" else None
        derive = partial(compact_adam_scalars, seed)
    hyper = {name: group[name] for name in _HYPER}
    return derive(step=step, beta1=beta1, beta2=beta2, grad_scale=grad_scale, **hyper)
