"""`OffloadedOptimizer`: an elementwise torch optimizer with optimizer state on the host.

It needs no engine and works on one device, under DDP and under FSDP2. The local parts of all
parameters, in the order of their groups, form one flat space, which a `TwinTier` updates.

[Note: the state dictionary]
Only the tier holds state. In ``optimizer.state`` each updated parameter has the names of its states
with None as values, because ``torch.distributed.checkpoint`` reads the names there.

[Note: changed parameters]
Other code may write to parameters (``load_state_dict``, DDP's first broadcast, a clamp after each
step), which increments autograd's version counter. An element that then differs from its rounded
master weight becomes the new master weight. All other master weights stay unchanged. On a CPU a
split master weight has no copy of the old parameter and keeps its remainder: it is rounded to the
written value, and equals it only after `sync_from_params`.

[Note: DTensors]
Under FSDP2's ``fully_shard`` the update reads and writes the local part of a DTensor in place,
because FSDP2 keeps it in place. Gradients and loaded states are redistributed to the parameter's
placements. Returned states are DTensors with the same placements.

[Note: empty parts]
On ranks without an element of a DTensor the part has one zero element in the flat space, so that
every rank counts steps and has the same names in a checkpoint.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.protocols import AdamKernel, Groups, OptimizerClass, UploadCodec
from zero_offload.rules.resolve import resolve_update
from zero_offload.rules.rule import MASTER
from zero_offload.settings import HostShare, OffloadSettings
from zero_offload.tier import make_device_tier, make_twin
from zero_offload.tiers.factory import OffloadTiers
from zero_offload.tiers.shares import check_patterns, host_share
from zero_offload.tiers.twin import TwinTier
from zero_offload.transfers.mover import resolve_upload_codec

_Entry = tuple[dict[str, float], dict[str, Tensor]]
"""Scalars and flat states of one part."""


class LocalPart:
    """The local part of one parameter, with its range ``[start, stop)`` in the flat space.

    ``shard`` is a 1-D view of it, or one zero if it is empty. Gaps in memory raise ValueError.
    """

    def __init__(self, param: Tensor, start: int) -> None:
        local = _local_of(param)
        self.param = param
        self.start = start
        self._is_empty = local.numel() == 0  # see [Note: empty parts]
        self._home = local.data_ptr()
        self.shard = local.new_zeros(1) if self._is_empty else _flat(local)
        self.stop = start + self.shard.numel()

    def check_home(self, index: int) -> None:
        if not self._is_empty and _local_of(self.param).data_ptr() != self._home:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(self.param.shape)} lies in other memory than "
                f"at construction; move, cast or shard a model before its optimizer is made"
            )

    def version(self) -> tuple[int, int]:
        """Return autograd's write counters. Writes through ``data`` do not count."""
        return self.param._version, self.shard._version

    def flatten(self, values: Tensor) -> Tensor:
        """Return the local part of ``values`` as 1-D elements in the parameter's memory order.

        ``values`` is a DTensor like the parameter, or has the local part's shape. The result may
        share its memory. DTensors with other placements are redistributed, which is a collective.
        """
        if values.is_sparse:
            raise ValueError("sparse gradients cannot be offloaded")
        local, found = _local_of(self.param), self._localize(values)
        if self._is_empty:
            return found.new_zeros(1)
        if found.shape == local.shape and found.stride() == local.stride():
            return _flat(found)
        ordered = torch.empty_strided(
            local.size(), local.stride(), dtype=found.dtype, device=found.device
        )
        return _flat(ordered.copy_(found))

    def _localize(self, values: Tensor) -> Tensor:
        param: Any = self.param
        if _is_dtensor(values) and _is_dtensor(param):
            placed: Any = values
            if placed.placements != param.placements:
                placed = placed.redistribute(placements=param.placements)
            found = _local_of(placed)
        else:
            found = values.detach()
        local_shape = tuple(_local_of(param).shape)
        if found.shape != local_shape or _is_dtensor(found):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)}, of which {local_shape} is on this "
                f"rank, cannot take a {type(values).__name__} of shape {tuple(values.shape)}; "
                f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict brings state "
                f"into the right placements"
            )
        return found

    def shape(self, values: Tensor) -> Tensor:
        """Return ``values`` (1-D, on the CPU) as a tensor like the parameter. Inverts `flatten`."""
        local = _local_of(self.param)
        kept = values[: local.numel()].as_strided(local.size(), local.stride())
        if not _is_dtensor(self.param):
            return kept
        # DTensor.from_local would copy the CPU values to the mesh's device.
        placed: Any = torch.empty_like(self.param.detach(), dtype=values.dtype, device="cpu")
        _local_of(placed).copy_(kept)
        return placed  # type: ignore[no-any-return]


def check_not_replicated(parts: Sequence[LocalPart]) -> None:
    """Raise ValueError if ranks may hold the same elements. Each would choose its own ratio.

    The update kernels of host and accelerator agree only to a few ulps, so replicas would diverge.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for part in parts:
        placed: Any = part.param
        if not _is_dtensor(placed) or any(p.is_replicate() for p in placed.placements):
            raise ValueError(
                'ratio="auto" on an accelerator needs parameters that no two ranks share (FSDP2 '
                "without replicas): with DDP or HSDP each rank would choose its own ratio, and the "
                "replicas would drift apart; give a ratio"
            )


def _is_dtensor(tensor: Tensor) -> bool:
    # If the module is not imported, the process has no DTensor. Importing it takes time.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_of(tensor: Tensor) -> Tensor:
    if not _is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        placed: Any = tensor
        local: Tensor = placed.to_local()
    return local.detach()


def _flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view of the tensor's elements in memory order."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != dense:
            raise ValueError(
                f"a parameter must fill its memory without gaps; one of shape "
                f"{tuple(tensor.shape)} has strides {tensor.stride()}"
            )
        dense *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer that keeps all or a part of its state in host memory.

    Parameters stay on their device, in any floating dtype. Master weights (fp32, or fp64 if a
    parameter is) and optimizer state are on the host for some elements, by default all, and on the
    device for the others. Host and device update at the same time (ZeRO-Offload, arXiv 2101.06840;
    Twin-Flow, DeepSpeed ZeRO-Offload++). Learning rate schedulers may change ``param_groups``.
    Under FSDP2 each rank updates the local parts of its DTensors. ``GradScaler`` leaves unscaling,
    and skipping after an overflow, to this class. At most one of ``ratio``, ``parameters`` and
    ``device_budget`` selects the host's elements.

    Args:
        optimizer_class: an elementwise torch optimizer, see `zero_offload.ELEMENTWISE`, or an
            optimizer class with its own Adam kernel, such as ``cpu_adam.CPUAdam``.
        params: parameters, named parameters or groups, as for any torch optimizer. They must be
            dense and on one device.
        ratio: gives the host the last ``round(ratio * numel)`` of this process's elements, in the
            order of the groups. "auto" selects the fastest ratio that fits, by measuring steps.
        parameters: gives the host these parameters: tensors, or patterns of names (`fnmatch`) if
            ``params`` are named.
        device_budget: gives the host the elements whose master weights, states and gradients do not
            fit in this many bytes on the device.
        host_share: ``"first"`` gives the host the first elements of a ratio or a budget instead.
        pin_memory: page-lock transfer buffers if the parameters are on an accelerator.
        pin_memory_bytes: maximum bytes to page-lock, None for no limit.
        adam_kernel: a host kernel for Adam, AdamW and, if it has the functions, Adagrad, SGD and
            Lion: an object with ``adam_step``, the name of an installed kernel, ``"auto"`` for any
            installed kernel, or None for torch's own update.
        state_dtype: dtype of Adam's moments on the host: ``"float32"``, ``"bfloat16"`` or
            ``"int8"``. The last two need an ``adam_kernel``. With them, the master weight of a bf16
            parameter is the parameter and an int16 remainder.
        upload_codec: sends new parameters to an accelerator as lossless differences: a codec, or
            ``"lossless"`` for zero-comm's. It needs another host copy of the parameters.
        **optimizer_kwargs: arguments of ``optimizer_class``.

    Attributes:
        tier: the `TwinTier`, with the counters ``bytes_d2h`` and ``bytes_h2d``.

    Raises:
        ValueError: an optimizer, a parameter or a setting is not supported.
    """

    # torch.amp.GradScaler reads this flag. It then sets grad_scale and found_inf before step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        params: Iterable[Any] = (),
        *,
        ratio: float | Literal["auto"] | None = None,
        parameters: Collection[str] | Collection[Tensor] | None = None,
        device_budget: int | None = None,
        host_share: HostShare = "last",
        pin_memory: bool = True,
        pin_memory_bytes: int | None = None,
        adam_kernel: AdamKernel | str | None = None,
        state_dtype: str = "float32",
        upload_codec: UploadCodec | str | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        kind: Any = type(optimizer_class)
        if issubclass(kind, torch.optim.Optimizer):
            raise TypeError(f"give a class, then params: OffloadedOptimizer({kind.__name__}, ...)")
        self._update = resolve_update(optimizer_class, optimizer_kwargs, adam_kernel)
        super().__init__(params, dict(self._update.defaults))
        self._grouped = [[*map(id, group["params"])] for group in self.param_groups]
        if any(len(set(ids)) < len(ids) for ids in self._grouped):
            raise ValueError("a parameter is twice in one group: give each parameter once")
        self._parts: list[LocalPart] = []
        pieces: list[tuple[int, int, int]] = []
        numel = 0
        for g, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.numel():
                    part = LocalPart(param, numel)
                    numel = part.stop
                    self._parts.append(part)
                    pieces.append((part.start, part.stop, g))
        shards = [(part.start, part.shard) for part in self._parts]
        if self._update.is_kernels_own and any(t.dtype == torch.float64 for _, t in shards):
            raise ValueError(
                "the Adam kernel updates fp32, bf16 and fp16 parameters, not float64; use "
                "torch.optim.AdamW"
            )
        devices = sorted({str(part.shard.device) for part in self._parts})
        if len(devices) > 1:
            raise ValueError(f"the parameters must be on one device, they are on {devices}")
        device = self._parts[0].shard.device if devices else torch.device("cpu")
        geometry = Geometry(numel, pieces, shards, len(self.param_groups))
        asked = {
            "ratio": ratio,
            "device_budget": device_budget,
            "host_share": host_share,
            "pin_memory": pin_memory,
            "pin_memory_bytes": pin_memory_bytes,
            "state_dtype": state_dtype,
        }
        settings, host = self._settings(asked, parameters, geometry)
        if host is None and device.type != "cpu":
            check_not_replicated(self._parts)
        is_all = host is not None and host.numel == numel
        self._is_host_alone = device.type == "cpu" or is_all
        groups = self._tier_groups()
        tiers = OffloadTiers(
            geometry,
            settings,
            device=device,
            optimizer_class=self._update.torch_class,
            groups=groups,
            adam_kernel=self._update.kernel,
            device_tier=make_device_tier,
            upload_codec=resolve_upload_codec(upload_codec),
        )
        self.tier: TwinTier = make_twin(geometry, host, groups, tiers)
        self._note_versions()

    def _settings(
        self,
        asked: Mapping[str, Any],
        parameters: Collection[str] | Collection[Tensor] | None,
        geometry: Geometry,
    ) -> tuple[OffloadSettings, Intervals | None]:
        """Return the settings and the host's elements, which are None for ratio "auto"."""
        chosen = {id(p) for p in parameters or () if isinstance(p, Tensor)}
        if chosen:
            found = [i for i, part in enumerate(self._parts) if id(part.param) in chosen]
            # check() raises if another key selects elements too.
            settings = OffloadSettings.check({**asked, "parameters": ["*"]})
            if not chosen <= {id(p) for group in self.param_groups for p in group["params"]}:
                raise ValueError("parameters holds what is not among the optimizer's parameters")
            return settings, geometry.padded_spans(found)
        is_list = isinstance(parameters, Collection) and not isinstance(parameters, str)
        patterns = list(parameters) if is_list and parameters is not None else parameters
        settings = OffloadSettings.check({**asked, "parameters": patterns})
        with_names = [group for group in self.param_groups if group.get("param_names")]
        named = [
            pair for g in with_names for pair in zip(g["param_names"], g["params"], strict=True)
        ]
        if settings.parameters is not None and named:
            check_patterns(settings.parameters, [name for name, _ in named])
        names = [name for name, param in named if param.numel()]
        groups = self._update.groups(self.param_groups, is_host_alone=True)
        host = host_share(
            settings,
            geometry,
            names,
            self._update.torch_class,
            groups,
            is_accelerated=not all(part.shard.is_cpu for part in self._parts),
        )
        return settings, host

    def _tier_groups(self) -> Groups:
        return self._update.groups(self.param_groups, is_host_alone=self._is_host_alone)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, in the constructor only: the layout of the flat space is fixed."""
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
        """Update every parameter that has a gradient. Later work on the stream reads new values.

        If ``grad_scale`` and ``found_inf`` are set on this object, as by ``torch.amp.GradScaler``,
        gradients are divided by ``grad_scale``, and a nonzero ``found_inf`` skips the update.

        Raises:
            RuntimeError: a group's parameters, or their memory, were replaced since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = (vars(self).get(name) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and float(found_inf) != 0.0:
            return loss
        if [[*map(id, group["params"])] for group in self.param_groups] != self._grouped:
            raise RuntimeError(
                "param_groups have other parameters than at construction, or in another order: "
                "make a new OffloadedOptimizer, and load the state_dict"
            )
        self._follow_params()
        active, release = [], None
        for i, part in enumerate(self._parts):
            if part.param.grad is not None:
                part.check_home(i)
                flat = part.flatten(part.param.grad)
                # Copies to the host are in order, so the last release covers all of them.
                release = self.tier.offer_grad(part.start, flat) or release
                active.append(i)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        self.tier.step(self._tier_groups(), active, grad_scale=grad_scale)
        if release is not None:  # The caller may overwrite gradients once step() returns.
            release()
        self.tier.wait_params(0, self.tier.geometry.numel)
        self._note_state(active)
        self._note_versions()
        return loss

    def _note_versions(self) -> None:
        self._versions = [part.version() for part in self._parts]

    @torch.no_grad()
    def _follow_params(self) -> None:
        """Update the master weights of parameters that changed. See [Note: changed parameters]."""
        for part, version in zip(self._parts, self._versions, strict=True):
            if part.version() != version:
                values = part.shard.to("cpu", copy=True)
                master = self.tier.read_state(MASTER, part.start, part.stop)
                rounded = torch.empty_like(values)
                self.tier.round_values(part.start, master, rounded)
                merged = torch.where(rounded == values, master, values.to(master.dtype))
                self.tier.write_state(MASTER, part.start, merged)
        self._note_versions()

    def _note_state(self, indices: Iterable[int]) -> None:
        """Record the state names of parts. See [Note: the state dictionary]."""
        for i in indices:
            if not self.state.get(self._parts[i].param):
                names = (*self.tier.state_names(), *self.tier.read_scalars(i))
                self.state[self._parts[i].param] = dict.fromkeys(names)

    @torch.no_grad()
    def sync_from_params(self) -> None:
        """Set the master weights to the parameters' current values.

        This is needed only after writes through ``param.data``, which autograd does not count, and
        for exact split master weights on a CPU: see [Note: changed parameters].
        """
        for i in range(len(self._parts)):
            self._take_param(i)
        self._note_versions()

    def _take_param(self, index: int) -> None:
        part = self._parts[index]
        part.check_home(index)
        self.tier.write_state(MASTER, part.start, part.shard.clone())

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary in torch's format, with the same entries at any ratio.

        For each parameter ``state`` has CPU tensors in the parameter's shape, ``master_weight`` and
        after an update the moments, and scalars with ``num_steps``. States of a DTensor are
        DTensors with its placements and CPU memory.
        """
        self._follow_params()
        noted, self.state = self.state, defaultdict(dict)
        try:
            for i, part in enumerate(self._parts):
                scalars, a, b = self.tier.read_scalars(i), part.start, part.stop
                names = self.tier.state_names() if scalars["num_steps"] else [MASTER]
                states = {name: part.shape(self.tier.read_state(name, a, b)) for name in names}
                self.state[part.param] = {**states, **scalars}
            return super().state_dict()
        finally:
            self.state = noted  # Only the tier keeps state.

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` at any ratio, or a plain ``optimizer_class`` state_dict.

        A plain state_dict has no master weights. The parameters' values replace them, so load the
        model first. If a state has no step count, as for SGD, ``num_steps`` becomes 1.

        Raises:
            ValueError: the state_dict has other groups, or the state of another optimizer.
        """
        entries: list[_Entry] = []

        def check(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            entries.extend(self._checked_entries(final))
            return {**final, "state": {}}  # The base class would cast states.

        def restore(_: torch.optim.Optimizer) -> None:
            for i, (scalars, states) in enumerate(entries):
                if MASTER not in states:
                    self._take_param(i)
                self.tier.write_scalars(i, scalars)
                for name, values in states.items():
                    if name == MASTER or scalars["num_steps"]:
                        self.tier.write_state(name, self._parts[i].start, values)
                if scalars["num_steps"]:
                    self._note_state([i])
            self._note_versions()

        # `check` runs after the caller's pre-hooks, and `restore` before the caller's post-hooks.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _checked_entries(self, state_dict: dict[str, Any]) -> list[_Entry]:
        """Return each part's scalars and flat states, or raise ValueError."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        live = [p for group in self.param_groups for p in group["params"]]
        keys = dict(zip(live, saved, strict=False))  # The base class compares the numbers.
        entries = []
        for i, part in enumerate(self._parts):
            part.check_home(i)
            entry = state_dict["state"].get(keys.get(part.param), {})
            # DCP gives {} for a state that a flattened dictionary does not have.
            found = {k: v for k, v in entry.items() if isinstance(v, Tensor) or v not in (None, {})}
            states = {k: part.flatten(found.pop(k)) for k in self.tier.state_names() if k in found}
            for name, value in found.items():
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(f"the optimizer has no state {name!r}: it is another's")
            scalars = {k: float(v) for k, v in found.items()}
            # DCP merges a dictionary of torch into this class's own, which has num_steps of before.
            count = scalars.get("num_steps", float(bool(found or states)))
            scalars["num_steps"] = scalars.get("step", count)
            entries.append((scalars, states))
        self.tier.check_states((), [scalars for scalars, _ in entries])
        numbers = {k for k, v in self.defaults.items() if not isinstance(v, bool | str | None)}
        for g, group in enumerate(state_dict["param_groups"]):
            if missing := sorted(numbers - group.keys()):
                raise ValueError(
                    f"param_groups[{g}] has no {missing}: it is another optimizer's; load a "
                    f"state_dict of the optimizer class that was given"
                )
        return entries

    def __repr__(self) -> str:
        parts = [part for part in self.tier.report() if part.is_host]
        numel = sum(stop - start for part in parts for start, stop in part.spans)
        whole = sum(part.shard.numel() for part in self._parts)
        nbytes = sum(part.tier.host_bytes for part in parts if part.tier)
        shown = f"{numel:,} of {whole:,} elements, {nbytes:,} bytes on the host"
        return f"{super().__repr__()}: {shown}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer is not copied or pickled; use its state_dict")
