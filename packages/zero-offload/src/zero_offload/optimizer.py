"""`OffloadedOptimizer`: an elementwise torch optimizer with part of its state on the host.

For any torch loop on one device, without an engine. The parameters, in the order of their groups,
form one flat space without padding; a `TwinTier` over it does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from zero_offload.geometry import Geometry
from zero_offload.kernels import resolve_kernel
from zero_offload.protocols import AdamKernel
from zero_offload.settings import check_ratio, check_state_dtype
from zero_offload.stepper import MASTER
from zero_offload.tier import make_device_tier, make_twin
from zero_offload.twin import TwinTier

__all__ = ["OffloadedOptimizer"]


class OffloadedOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` with the state of the first ``ratio`` of elements in host memory.

    Parameters stay where they are, in any floating dtype. Their fp32 master weights and optimizer
    state live on the host for the first ``round(ratio * numel)`` elements, in the order of the
    groups, and on the parameters' device for the rest. Host and device update at the same time
    (ZeRO-Offload, arXiv 2101.06840; Twin-Flow, DeepSpeed ZeRO-Offload++). ``step`` returns with all
    parameters in place. ``param_groups`` are the real ones: schedulers work as ever.

    Args:
        optimizer_class: an elementwise torch optimizer, see `zero_offload.ELEMENTWISE`.
        params: parameters or groups of them, as for any torch optimizer; dense, on one device.
        ratio: share of the elements on the host, 0 to 1.
        pin_memory: page-lock transfer buffers when the parameters are on an accelerator.
        adam_kernel: a host kernel for Adam, AdamW and, where it has the functions, Adagrad, SGD and
            Lion: an object with ``adam_step``, the name of an installed one, ``"auto"`` for one if
            installed, or None for torch's own update.
        state_dtype: what the host keeps Adam's moments in: ``"float32"``, ``"bfloat16"`` or
            ``"int8"``; the last two need an ``adam_kernel`` and, for bf16 parameters, keep the
            master weight as the parameter and an int16 remainder.
        **optimizer_kwargs: passed on to ``optimizer_class``.

    Attributes:
        tier: the `TwinTier`, with ``bytes_d2h`` and ``bytes_h2d``.

    Raises:
        ValueError: an optimizer, a parameter or a setting that cannot be served.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        ratio: float = 1.0,
        pin_memory: bool = True,
        adam_kernel: AdamKernel | str | None = None,
        state_dtype: str = "float32",
        **optimizer_kwargs: Any,
    ) -> None:
        share = check_ratio(ratio)
        kernel = resolve_kernel(adam_kernel, optimizer_class)
        super().__init__(params, _defaults(optimizer_class, optimizer_kwargs))
        self._members, pieces = _lay_out(self.param_groups)
        self._starts = [start for start, _, _ in pieces]
        numel = pieces[-1][1] if pieces else 0
        shards = [(start, _flat(p)) for start, p in zip(self._starts, self._members, strict=True)]
        self._homes = [p.data_ptr() for p in self._members]
        self.tier: TwinTier = make_twin(
            Geometry(numel, pieces, shards, len(self.param_groups)),
            ratio=share,
            pin_memory=pin_memory,
            device=_common_device(self._members),
            optimizer_class=optimizer_class,
            groups=self.param_groups,
            adam_kernel=kernel,
            device_tier=make_device_tier,
            state_dtype=check_state_dtype(state_dtype),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: the flat space is laid out once."""
        if hasattr(self, "tier"):
            raise ValueError(
                "an OffloadedOptimizer cannot grow; make a new one and load the state_dict"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; all new values are in place on return.

        Raises:
            RuntimeError: a parameter's memory was replaced since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = []
        for i, param in enumerate(self._members):
            if param.grad is not None:
                self._check_home(i)
                self.tier.offer_grad(self._starts[i], _flat_like(param.grad, param))
                active.append(i)
        self.tier.step(self.param_groups, active, grad_scale=1.0)
        self.tier.wait_params(0, self.tier.geometry.numel)
        return loss

    def _check_home(self, index: int) -> None:
        if self._members[index].data_ptr() != self._homes[index]:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(self._members[index].shape)} lies in other "
                f"memory than at construction; move or cast a model before its optimizer is made"
            )

    @torch.no_grad()
    def sync_from_params(self) -> None:
        """Take the parameters' current values as master weights, after they were loaded or set."""
        for i in range(len(self._members)):
            self._take_param(i)

    def _take_param(self, index: int) -> None:
        self._check_home(index)
        values = _flat(self._members[index]).clone()
        self.tier.write_state(MASTER, self._starts[index], values)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: ``state`` holds for each parameter its fp32 ``master_weight``, its moments
        in the parameter's shape, on the CPU, and its scalars with ``num_steps``.

        It does not depend on the ratio.
        """
        self.state.update({p: self._entry(i) for i, p in enumerate(self._members)})
        try:
            return super().state_dict()
        finally:
            self.state.clear()  # the tier is the only home of the state

    def _entry(self, index: int) -> dict[str, Any]:
        scalars = self.tier.read_scalars(index)
        names = self.tier.state_names() if scalars["num_steps"] else [MASTER]
        param, start = self._members[index], self._starts[index]
        entry: dict[str, Any] = {
            name: _shaped_like(self.tier.read_state(name, start, start + param.numel()), param)
            for name in names
        }
        return {**entry, **scalars}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave at any ratio, or a plain ``optimizer_class``'s state_dict.

        A plain one has no master weights: the parameters' values are taken, so load the model
        first. Where it counts no steps, as SGD's, the count starts at 1.

        Raises:
            ValueError: it has other groups, or another optimizer's state.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        live = [p for group in self.param_groups for p in group["params"]]
        keys = dict(zip(live, saved, strict=True))
        for i, param in enumerate(self._members):
            self._load_entry(i, state_dict["state"].get(keys[param], {}))

    def _load_entry(self, index: int, entry: Mapping[str, Any]) -> None:
        start, param = self._starts[index], self._members[index]
        found = {k: v for k, v in entry.items() if v is not None}
        names = [name for name in self.tier.state_names() if name in found]
        scalars = {k: _number(k, v) for k, v in found.items() if k not in names}
        if "num_steps" not in scalars:
            scalars["num_steps"] = scalars.get("step", 1.0 if found else 0.0)
        if MASTER not in found:
            self._take_param(index)
        self.tier.write_scalars(index, scalars)
        for name in names:
            if name == MASTER or scalars["num_steps"]:
                self.tier.write_state(name, start, _flat_like(found[name], param))

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies: the state is not in this object alone."""
        raise TypeError("an OffloadedOptimizer is not copied or pickled; use its state_dict")


def _defaults(
    optimizer_class: type[torch.optim.Optimizer], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Every setting, defaults filled in and values checked by the optimizer's constructor."""
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **settings)
    return dict(probe.defaults)


def _lay_out(
    groups: list[dict[str, Any]],
) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
    """Parameters with elements, one after another, and their pieces."""
    members: list[Tensor] = []
    pieces: list[tuple[int, int, int]] = []
    for g, group in enumerate(groups):
        for param in group["params"]:
            if param.numel():
                start = pieces[-1][1] if pieces else 0
                members.append(param)
                pieces.append((start, start + param.numel(), g))
    return members, pieces


def _common_device(members: list[Tensor]) -> torch.device:
    devices = sorted({str(p.device) for p in members})
    if len(devices) > 1:
        raise ValueError(f"the parameters must be on one device, they are on {devices}")
    return members[0].device if members else torch.device("cpu")


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in memory order, 1-D, sharing its memory."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != dense:
            raise ValueError(
                f"a parameter must fill its memory without gaps; one of shape "
                f"{tuple(tensor.shape)} has strides {tensor.stride()}"
            )
        dense *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _flat_like(values: Tensor, param: Tensor) -> Tensor:
    """``values``, shaped as the parameter, as 1-D elements in the parameter's memory order."""
    if values.is_sparse:
        raise ValueError("sparse gradients cannot be offloaded")
    if values.shape == param.shape and values.stride() == param.stride():
        return _flat(values)
    ordered = torch.empty_strided(
        param.size(), param.stride(), dtype=values.dtype, device=values.device
    )
    return _flat(ordered.copy_(values))


def _shaped_like(values: Tensor, param: Tensor) -> Tensor:
    """The inverse of `_flat_like`."""
    return values.as_strided(param.size(), param.stride())


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"the optimizer has no state {name!r}: it is another optimizer's")
    return float(value)
