"""Torch functions and attributes that are private or have been renamed.

[Note: hooks and torch.compile]
A compiled module's graph holds its forward without the engine's hooks around that forward. The
hooks are wrapped by `torch.compiler.disable`, so a module may be compiled before or after the
engine is built. A hook on a module within the graph breaks the graph, even if it is disabled. Since
torch 2.14, ``compile()`` also traces the hooks of a module with one of torch's own forwards, such
as nn.Sequential: ``fullgraph=True`` raises. The result of `torch.compile` is served as before.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C._profiler import _RecordFunctionFast as profiled_range
from torch.optim import _muon
from torch.optim.optimizer import _foreach_supported_types, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["current_dispatch_mode", "disable_current_modes", "profiled_range", "pytree"]

METADATA_READS = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda")
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.get_device),
    }
)
"""Functions that read a tensor's metadata and none of its values."""
get_grad = Tensor.grad.__get__  # type: ignore[union-attr]
"""Return torch's own ``grad`` of a tensor, even if its class overrides the attribute."""
set_grad = Tensor.grad.__set__  # type: ignore[union-attr]
"""Set torch's own ``grad`` of a tensor, even if its class overrides the attribute."""
is_autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device. False within an operation that autocast has cast."""
swap_tensor = torch._C._swap_tensor_impl
"""Exchange the C++ tensors of two Python tensor objects, which stay the same objects."""
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""Return the active `TorchFunctionMode`s, the innermost last."""
orthogonalize = _muon._zeropower_via_newtonschulz
"""Orthogonalize a matrix in bf16 as `torch.optim.Muon`. A bf16 matrix is scaled in place."""
call_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
_CALL = nn.Module.__call__.__name__
_FIRST_OWN_NUMBER = 1 << 32
_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter and setter
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def allow_foreach(cls: type[nn.Parameter]) -> None:
    """Allow torch's optimizers to update parameters of class ``cls`` by foreach kernels."""
    _foreach_supported_types.append(cls)


def inner_tensors(tensor: Tensor) -> tuple[dict[str, Tensor], Any] | None:
    """Return a wrapper subclass's inner tensors and context, or None for another tensor.

    They are the first arguments of its ``__tensor_unflatten__``.
    """
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return None
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def count_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def group_names_begin_at() -> int:
    """Return the number that names the next process group that all ranks create."""
    return int(dist.distributed_c10d._world.group_count)


def begin_group_names_at(number: int) -> None:
    """Make the next process group that all ranks create have a number of at least ``number``."""
    world = dist.distributed_c10d._world
    world.group_count = max(world.group_count, number)


@contextmanager
def counting_groups(number: int) -> Iterator[None]:
    """Let ``number`` determine the names of groups that only their members create in this context.

    torch names such a group by a hash of its ranks and a count. Before torch 2.15 (pytorch#189073)
    the count is the number of groups that this rank is in: placeholders raise it to ``number``.
    From 2.15 on, the count is ``group_count``, which is restored because it must stay equal on all
    ranks. ``_FIRST_OWN_NUMBER`` keeps names made in this context apart from those of later groups.
    """
    world = dist.distributed_c10d._world
    names = cast("dict[Any, Any]", world.pg_names)
    placeholders = [object() for _ in range(number - len(names))]
    begin = world.group_count
    names.update((placeholder, "") for placeholder in placeholders)
    world.group_count = _FIRST_OWN_NUMBER + number
    try:
        yield
    finally:
        world.group_count = begin
        for placeholder in placeholders:
            del names[placeholder]


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the timeout of the backend of ``group`` on ``device``, or torch's default."""
    known = dist.group.WORLD if group is None else group
    assert known is not None
    options: Any = None
    with suppress(RuntimeError):  # a third-party backend may not expose its options
        options = known._get_backend(device).options
    # The fake backend's options are None.
    default = dist.distributed_c10d.default_pg_timeout
    return default if options is None else cast("timedelta", options._timeout)


def clone_store(store: Any) -> Any:
    """Return a clone of ``store`` (for a TCPStore, a new connection), or itself without clone()."""
    try:
        return store.clone()
    except RuntimeError as error:
        if "pure virtual" not in str(error):  # the fake backend's store has no clone()
            raise
        return store


def store_address(store: Any) -> str | None:
    """Return "host:port" of the server of ``store``, or None if it is not a TCPStore."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    is_hosted = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return f"{store.host}:{store.port}" if is_hosted else None


def set_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    # torch 2.14 made `_set_pg_timeout` public as `set_timeout`, and deprecated the private name.
    change: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=timeout_s), group)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort process groups, those of NCCL within one ``ncclGroupStart`` and ``ncclGroupEnd``."""
    nccl: dist.ProcessGroupNCCL | None = None
    for group in groups if dist.is_nccl_available() else ():
        with suppress(RuntimeError):  # the group has no CUDA backend
            backend = group._get_backend(torch.device("cuda"))
            nccl = nccl or (backend if isinstance(backend, dist.ProcessGroupNCCL) else None)
    if nccl is not None:
        nccl._group_start()
    try:
        for group in groups:
            group.abort()
    finally:
        if nccl is not None:
            nccl._group_end()


def renew_autograd_after_fork() -> None:
    """Make torch rebuild this process's autograd engine, if the process was forked.

    Without this call torch rebuilds the engine in the first call that needs the engine, and takes
    no lock. Two threads whose first backwards begin at the same time may then each build an engine,
    and the process may die of SIGSEGV (torch 2.10 to 2.13, ``PythonEngine::get_python_engine``).
    Call this function before such threads start.
    """
    # This call needs the engine and changes nothing.
    torch.autograd.Variable._execution_engine.is_checkpoint_valid()


def count_calls(module: nn.Module) -> int:
    """Count the calls of ``module`` on this thread that have not returned."""
    num_calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Compare names: torch.compile replaces a frame's code object by another of the same name.
        if frame.f_code.co_name == _CALL and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls


def outside_graphs(hook: _Hook) -> _Hook:
    """Disable torch.compile for ``hook``. See [Note: hooks and torch.compile]."""
    disabled: _Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def is_own_graph(module: nn.Module) -> bool:
    """Whether ``module`` was compiled by ``module.compile()`` or is a result of `torch.compile`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer._opt_called = True  # type: ignore[attr-defined]


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernels read a ``found_inf`` flag on the device, as fused ones do."""
    # foreign: torch.amp.GradScaler looks for this attribute of torch's optimizers
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # The attribute describes the optimizer's defaults. A group may override ``fused``.
    return all(group.get("fused", True) for group in optimizer.param_groups)


@contextmanager
def set_found_inf(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> Iterator[None]:
    """Let an optimizer (see `takes_found_inf`) skip steps in this context if ``found_inf`` is 1."""
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def share_step_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give both optimizers the same step hooks, also those that are added or removed later."""
    target._optimizer_step_pre_hooks = source._optimizer_step_pre_hooks
    target._optimizer_step_post_hooks = source._optimizer_step_post_hooks


def has_step_pre_hooks(optimizer: torch.optim.Optimizer, besides: int | None = None) -> bool:
    """Whether ``step()`` has pre-hooks, which may change the groups. ``besides``: one's id."""
    own = optimizer._optimizer_step_pre_hooks.keys() - {besides}
    return bool(_global_optimizer_pre_hooks or own)


def storage_of(tensor: Tensor) -> int:
    """Return an integer that identifies a tensor's storage, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def save_own_state(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return ``module``'s state dict without its submodules. Names begin with ``prefix``."""
    saved: dict[str, Tensor] = {}
    module._save_to_state_dict(saved, prefix, keep_vars=False)
    return saved


def autocast_source(tensor: Tensor) -> Tensor | None:
    """Return the leaf tensor of which ``tensor``, or its base, is a cast, for example by autocast.

    Returns None for other tensors, for a cast that was changed in place or moved to another device,
    and for a leaf that requires no gradient, because autograd does not record its cast.
    """
    whole = tensor if tensor._base is None else tensor._base
    source = None if whole.grad_fn is None or whole._version else cast_param(whole.grad_fn)
    return None if source is None or source.device != whole.device else source


def cast_param(node: Any) -> Tensor | None:
    """Return the leaf that the autograd node ``node`` casts or copies, or None for other nodes."""
    leaf: Any = node.next_functions[0][0] if node.name() == "ToCopyBackward0" else None
    if leaf is None or "AccumulateGrad" not in leaf.name():
        return None
    return cast("Tensor", leaf.variable)


AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""Class of a leaf's node in autograd's graph. The node's ``variable`` is the leaf."""


def seed_generators(device: torch.device, *numbers: int) -> None:
    """Seed torch's generators of the CPU and of ``device`` from a hash of ``numbers``."""
    text = " ".join(map(str, numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little", signed=True)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def sequence_number(node: Any) -> int:
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """Return a sequence number between those of this thread's earlier and later operations."""
    with torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    return sequence_number(node)


def cast_floats(inputs: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in nested ``inputs`` to ``dtype``."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs
    )


def dispatch_keys() -> Any:
    """Return this thread's included and excluded dispatch keys, which some contexts change."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    while torch.autocast_increment_nesting() <= depth:
        pass
    while torch.autocast_decrement_nesting() > depth:
        pass


def _saved_hooks() -> list[Any]:
    c: Any = torch._C._autograd
    items: list[Any] = []
    while (hooks := c._top_saved_tensors_default_hooks(True)) is not None:
        items.insert(0, hooks)
        c._pop_saved_tensors_default_hooks()
    _set_saved_hooks(items)
    return items


def _set_saved_hooks(items: list[Any]) -> None:
    c: Any = torch._C._autograd
    while c._top_saved_tensors_default_hooks(True) is not None:
        c._pop_saved_tensors_default_hooks()
    for hooks in items:
        c._push_saved_tensors_default_hooks(*hooks)


def context_settings(device: torch.device) -> list[_Setting]:
    """Return getters and setters of settings that torch's context managers change.

    Private names are looked up here: a torch release without one breaks only the vertical schedule.
    """
    from torch.utils import _device
    from torch.utils import _python_dispatch as dispatch

    c: Any = torch._C
    overrides: Any = torch.overrides
    cuda = torch.backends.cuda

    def anomaly_mode() -> tuple[bool, bool]:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def set_function_modes(modes: list[Any]) -> None:
        for _ in function_modes():
            overrides._pop_mode()
        for mode in modes:
            overrides._push_mode(mode)

    def set_dispatch_modes(modes: list[Any]) -> None:
        for _ in dispatch._get_current_dispatch_mode_stack():
            dispatch._pop_mode()
        for mode in modes:
            dispatch._push_mode(mode)

    settings: list[_Setting] = [
        (torch.is_grad_enabled, c._set_grad_enabled),
        (c._is_fwd_grad_enabled, c._set_fwd_grad_enabled),
        (c._is_multithreading_enabled, c._set_multithreading_enabled),
        (c._is_view_replay_enabled, c._set_view_replay_enabled),
        (anomaly_mode, lambda mode: torch.set_anomaly_enabled(*mode)),
        (c._get_torch_function_state, c._set_torch_function_state),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (autocast_depth, _set_autocast_depth),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (c._get_overrideable_sdp_enabled, c._set_sdp_use_overrideable),
        (c._get_sdp_priority_order, c._set_sdp_priority_order),
        (_saved_hooks, _set_saved_hooks),
        (function_modes, set_function_modes),
        (dispatch._get_current_dispatch_mode_stack, set_dispatch_modes),
        *(
            (partial(getattr, module, name), partial(setattr, module, name))
            for module in (_device, dispatch)
            for name in vars(module)
            if name == "CURRENT_DEVICE" or name.startswith("_is_in_")
        ),
    ]
    for kind in {"cpu", device.type}:
        get = partial(torch.is_autocast_enabled, kind), partial(torch.get_autocast_dtype, kind)
        put = partial(torch.set_autocast_enabled, kind), partial(torch.set_autocast_dtype, kind)
        settings += zip(get, put, strict=True)
    if device.type != "cpu":  # `set_stream` sets the device, too
        settings.append((torch.accelerator.current_stream, torch.accelerator.set_stream))
    return settings
