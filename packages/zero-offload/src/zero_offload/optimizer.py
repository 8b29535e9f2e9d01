"""`OffloadedOptimizer`: an elementwise torch optimizer with part of its state on the host.

It serves any torch loop without an engine: on one device, under DDP, under FSDP2. The parameters in
the order of their groups form one flat space, with the local parts of DTensors. A `TwinTier` over
that space does the work.

[Note: the state dictionary]
State lives in the tier alone. ``optimizer.state`` has, for each parameter that was updated, the
names of its state with None as values. So ``torch.distributed.checkpoint`` finds which state there
is, and nothing is kept twice.

[Note: changed parameters]
Other code writes into parameters too: ``load_state_dict``, DDP's first broadcast, a clamp after
each step. torch's optimizers update the current values, so the master weights have to follow here.
A write increments the version counter that autograd keeps of a tensor. Where it has changed,
elements that are not their master's rounded value become the new master weight. The others keep all
bits.

Local parts of parameters: a whole tensor, or the local part of a DTensor.

[Note: DTensors]
Under FSDP2's ``fully_shard`` a parameter is a DTensor. Its local part is plain memory that is never
moved: FSDP2 frees and gathers the unsharded parameters, which are other memory. So the update works
on the local part. Gradients and loaded state are redistributed to the parameter's placements, and
returned state is a DTensor in the same ones, which ``torch.distributed.checkpoint`` reshards.

[Note: empty parts]
A small parameter has no element on some ranks, and its steps are still counted there, because a
checkpoint needs the same names and numbers from every rank. Such a part has one element of its own
in the flat space, always zero, that is in no parameter and in no state_dict.
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


class LocalPart:
    """The local part of one parameter and its place ``[start, stop)`` in the flat space.

    ``shard`` is its own memory, 1-D, which new values are written to. It has no gaps, or ValueError
    is raised.
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
        """Raise RuntimeError if the part has moved to other memory since construction."""
        if not self._is_empty and _local_of(self.param).data_ptr() != self._home:
            raise RuntimeError(
                f"parameter {index} of shape {tuple(self.param.shape)} lies in other memory than "
                f"at construction; move, cast or shard a model before its optimizer is made"
            )

    def version(self) -> tuple[int, int]:
        """Return counters of all writes except through ``data``: a DTensor has its own."""
        return self.param._version, self.shard._version

    def flatten(self, values: Tensor) -> Tensor:
        """Return the local part of ``values`` as 1-D elements in the order of the part's memory.

        ``values`` has the parameter's shape. The result is its own memory where nothing has to be
        rearranged. Values in other placements are redistributed, which is a collective.
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
        """Return 1-D CPU values in the parameter's shape and placements, inverse to `flatten`."""
        local = _local_of(self.param)
        kept = values[: local.numel()].as_strided(local.size(), local.stride())
        if not _is_dtensor(self.param):
            return kept
        # DTensor.from_local would move the values to the mesh's device.
        placed: Any = torch.empty_like(self.param.detach(), dtype=values.dtype, device="cpu")
        _local_of(placed).copy_(kept)
        return placed  # type: ignore[no-any-return]


def lay_out(groups: Sequence[dict[str, Any]]) -> tuple[list[LocalPart], list[tuple[int, int, int]]]:
    """Return the parts of all parameters with elements, one after another, and their pieces."""
    parts: list[LocalPart] = []
    pieces: list[tuple[int, int, int]] = []
    for g, group in enumerate(groups):
        for param in group["params"]:
            if param.numel():
                part = LocalPart(param, parts[-1].stop if parts else 0)
                parts.append(part)
                pieces.append((part.start, part.stop, g))
    return parts, pieces


def common_device(parts: Sequence[LocalPart]) -> torch.device:
    """Return the one device of all parts, or the CPU without parts."""
    devices = sorted({str(part.shard.device) for part in parts})
    if len(devices) > 1:
        raise ValueError(f"the parameters must be on one device, they are on {devices}")
    return parts[0].shard.device if parts else torch.device("cpu")


def check_not_replicated(parts: Sequence[LocalPart]) -> None:
    """Raise ValueError if several ranks hold the same elements, of which each chooses a ratio.

    The kernels of host and accelerator agree to a few ulps, so that replicas would diverge.
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
    # A process that has a DTensor has imported its module; others need not.
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


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer with a share of its state in host memory: all of it, by default.

    Parameters stay on their device, in any floating dtype. The fp32 master weights and optimizer
    state of some elements live on the host, those of the rest on the parameters' device. Host and
    device update at the same time (ZeRO-Offload, arXiv 2101.06840; Twin-Flow, DeepSpeed
    ZeRO-Offload++). ``step`` returns with all parameters updated. ``param_groups`` are the real
    ones, so schedulers work. Under FSDP2 each rank updates the local part of its DTensors, and
    ``state_dict`` returns DTensors in the same placements. ``GradScaler`` leaves unscaling, and
    skipping after an overflow, to this class. One of ``ratio``, ``parameters`` and
    ``device_budget`` selects the host's elements.

    Args:
        optimizer_class: an elementwise torch optimizer, see `zero_offload.ELEMENTWISE`; or an Adam
            kernel's own class, as ``cpu_adam.CPUAdam``, whose kernel is then used.
        params: parameters, named parameters or groups of them, as for any torch optimizer; dense,
            on one device.
        ratio: the host has the last ``round(ratio * numel)`` of this process's elements, in the
            order of the groups; "auto" measures which ratio is the fastest that fits, see
            `zero_offload.tiers.auto_tier`.
        parameters: the host has these parameters: a collection of them, or of patterns of names
            (`fnmatch`), for which ``params`` must be named.
        device_budget: the host has the elements beyond this many bytes of master weights, states
            and gradients on the device.
        host_share: ``"first"`` gives the host the first elements instead, of a ratio or a budget.
        pin_memory: page-lock transfer buffers when the parameters are on an accelerator.
        pin_memory_bytes: most bytes to lock; None for no limit. The rest is pageable.
        adam_kernel: a host kernel for Adam, AdamW and, where it has the functions, Adagrad, SGD and
            Lion: an object with ``adam_step``, the name of an installed one, ``"auto"`` for one if
            installed, or None for torch's own update.
        state_dtype: of Adam's moments on the host: ``"float32"``, ``"bfloat16"`` or
            ``"int8"``; the last two need an ``adam_kernel`` and, for bf16 parameters, keep the
            master weight as the parameter and an int16 remainder.
        upload_codec: sends new parameters to an accelerator as lossless differences: a codec, or
            ``"lossless"`` for zero-comm's. It keeps what was sent last: 2 bytes of host memory per
            16-bit parameter.
        **optimizer_kwargs: passed on to ``optimizer_class``.

    Attributes:
        tier: the `TwinTier`, with ``bytes_d2h`` and ``bytes_h2d``.

    Raises:
        ValueError: an optimizer, a parameter or a setting that cannot be served.
    """

    # Read by torch.amp.GradScaler: it sets `grad_scale` and `found_inf` before it calls `step`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer_class: OptimizerClass,
        params: Iterable[Any],
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
        self._update = resolve_update(optimizer_class, optimizer_kwargs, adam_kernel)
        super().__init__(params, dict(self._update.defaults))
        self._parts, pieces = lay_out(self.param_groups)
        numel = pieces[-1][1] if pieces else 0
        shards = [(part.start, part.shard) for part in self._parts]
        if self._update.is_kernels_own and any(t.dtype == torch.float64 for _, t in shards):
            raise ValueError(
                "the Adam kernel updates fp32, bf16 and fp16 parameters, not float64; use "
                "torch.optim.AdamW"
            )
        device = common_device(self._parts)
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
        """The settings and the host's elements, None if measurements choose."""
        chosen = {id(p) for p in parameters or () if isinstance(p, Tensor)}
        if chosen:
            found = [i for i, part in enumerate(self._parts) if id(part.param) in chosen]
            settings = OffloadSettings.check({**asked, "parameters": ["*"]})  # refuses a second key
            if not chosen <= {id(p) for group in self.param_groups for p in group["params"]}:
                raise ValueError("parameters holds what is not among the optimizer's parameters")
            return settings, geometry.padded_spans(found)
        is_list = isinstance(parameters, Collection) and not isinstance(parameters, str)
        patterns = list(parameters) if is_list and parameters is not None else parameters
        settings = OffloadSettings.check({**asked, "parameters": patterns})
        named = [pair for group in self.param_groups for pair in _named(group)]
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
            is_accelerated=common_device(self._parts).type != "cpu",
        )
        return settings, host

    def _tier_groups(self) -> Groups:
        return self._update.groups(self.param_groups, is_host_alone=self._is_host_alone)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, in the constructor only: the flat space is laid out once."""
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
        """Update every parameter that has a gradient. All new values are in place on return.

        With ``grad_scale`` and ``found_inf`` set on this object, as ``torch.amp.GradScaler`` does,
        gradients are divided by ``grad_scale``, and nothing is updated if ``found_inf`` is not
        zero.

        Raises:
            RuntimeError: a parameter's memory was replaced since construction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = (vars(self).get(name) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and float(found_inf) != 0.0:
            return loss
        self._follow_params()
        active, release = [], None
        for i, part in enumerate(self._parts):
            if part.param.grad is not None:
                part.check_home(i)
                flat = part.flatten(part.param.grad)
                release = self.tier.offer_grad(part.start, flat) or release  # of the last
                active.append(i)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        self.tier.step(self._tier_groups(), active, grad_scale=grad_scale)
        if release is not None:  # gradients may be overwritten as soon as this returns
            release()
        self.tier.wait_params(0, self.tier.geometry.numel)
        self._note_state(active)
        self._note_versions()
        return loss

    def _note_versions(self) -> None:
        self._versions = [part.version() for part in self._parts]

    @torch.no_grad()
    def _follow_params(self) -> None:
        """Update masters of parameters that were written to. See [Note: changed parameters]."""
        for part, version in zip(self._parts, self._versions, strict=True):
            if part.version() != version:
                values = part.shard.to("cpu", copy=True)
                master = self.tier.read_state(MASTER, part.start, part.stop)
                is_same = master.to(values.dtype) == values
                merged = torch.where(is_same, master, values.to(master.dtype))
                self.tier.write_state(MASTER, part.start, merged)
        self._note_versions()

    def _note_state(self, indices: Iterable[int]) -> None:
        """Note the names of the parts' state. See [Note: the state dictionary]."""
        for i in indices:
            if not self.state.get(self._parts[i].param):
                names = (*self.tier.state_names(), *self.tier.read_scalars(i))
                self.state[self._parts[i].param] = dict.fromkeys(names)

    @torch.no_grad()
    def sync_from_params(self) -> None:
        """Set the master weights to the parameters' current values.

        Needed only after writes through ``param.data``, which autograd does not count.
        """
        for i in range(len(self._parts)):
            self._take_param(i)
        self._note_versions()

    def _take_param(self, index: int) -> None:
        part = self._parts[index]
        part.check_home(index)
        self.tier.write_state(MASTER, part.start, part.shard.clone())

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary of torch's form.

        ``state`` holds for each parameter its fp32 ``master_weight``, its moments in the
        parameter's shape, on the CPU, and its scalars with ``num_steps``. Those of a DTensor are
        DTensors in its placements, with CPU memory for their local parts. The contents do not
        depend on the ratio.
        """
        self._follow_params()
        noted = self.state
        entries = {part.param: self._entry(i) for i, part in enumerate(self._parts)}
        self.state = defaultdict(dict, entries)
        try:
            return super().state_dict()
        finally:
            self.state = noted  # the tier is the only home of the state

    def _entry(self, index: int) -> dict[str, Any]:
        scalars = self.tier.read_scalars(index)
        names = self.tier.state_names() if scalars["num_steps"] else [MASTER]
        part = self._parts[index]
        entry: dict[str, Any] = {
            name: part.shape(self.tier.read_state(name, part.start, part.stop)) for name in names
        }
        return {**entry, **scalars}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` at any ratio, or that of a plain ``optimizer_class``.

        A plain one has no master weights. The parameters' values are used, so load the model first.
        Where it counts no steps, as that of SGD, the count starts at 1.

        Raises:
            ValueError: it has other groups, or another optimizer's state.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        live = [p for group in self.param_groups for p in group["params"]]
        keys = dict(zip(live, saved, strict=True))
        for i, part in enumerate(self._parts):
            if self._load_entry(i, state_dict["state"].get(keys[part.param], {})):
                self._note_state([i])
        self._note_versions()

    def _load_entry(self, index: int, entry: Mapping[str, Any]) -> bool:
        """Load one entry. Returns whether its parameter has been updated before."""
        part = self._parts[index]
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
                self.tier.write_state(name, part.start, part.flatten(found[name]))
        return bool(scalars["num_steps"])

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the state is not in this object alone."""
        raise TypeError("an OffloadedOptimizer is not copied or pickled; use its state_dict")


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"the optimizer has no state {name!r}: it is another optimizer's")
    return float(value)


def _named(group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """A group's parameters with their names. None if they were passed without."""
    names = group.get("param_names")
    return [] if names is None else list(zip(names, group["params"], strict=True))
