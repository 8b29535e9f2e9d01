"""Tiled computation of modules and losses, configured by the key ``tiled_compute``.

[Note: tiles]
A module that acts on each token separately (the MLP of a transformer block) saves activations of
all tokens for backward, several times as wide as its input. Here the module is computed on tiles of
about ``tile_tokens`` tokens. Each tile saves only its input and is recomputed in backward, so the
activations of one tile exist at a time. Parameter gradients are summed tile by tile, so their
rounding differs. Only ``forward`` is replaced, on the module instance. Names, class and hooks stay.

[Note: tiled logits]
A language model's head maps ``[..., tokens, features]`` to ``[..., tokens, vocabulary]``, and the
loss needs one tile of these logits at a time. `TiledLogits` represents the logits. It holds the
head's input and later operations that act on each token separately (views and slices of the leading
dimensions, casts, tanh, scaling by numbers). ``torch.nn.functional.cross_entropy`` of 2-dimensional
`TiledLogits` computes head and loss tile by tile, and again in backward, so that one tile of logits
exists at a time. Any other function that reads the values gets the whole logits, computed once,
with their gradients. Computing them later raises an error if the head's weights have been released
(one rank alone cannot gather them again) or changed. A change of the logits in place raises an
error, because the tiles would not see the change.

Both methods are those of Arctic Long Sequence Training (arXiv 2506.13996).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zero_core._torch import (
    METADATA_READS,
    DisableTorchFunction,
    outside_graphs,
    pytree,
)
from zero_core.config import ModulesConfig, TiledComputeConfig
from zero_core.core.passes import Passes
from zero_core.core.saved import is_in_backward
from zero_core.errors import ConfigError
from zero_core.object_methods import ObjectMethods


class TileForward(Protocol):
    """Function from one tile, [..., tokens, features], to a row per token, or to a loss."""

    def __call__(self, tile: Tensor, /) -> Tensor: ...


_FACTS = METADATA_READS | {Tensor.stride, Tensor.is_contiguous}
"""Functions that read only metadata, which the wrapper tensor has."""
_SCALING = frozenset({Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__truediv__, Tensor.__rmul__})
"""Functions that scale logits if their other argument is a number."""
_CHANGING = frozenset(
    {
        *("__setitem__", "__set__", "__delete__", "register_hook", "retain_grad"),
        *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod")),
        *(f"__i{name}__" for name in ("pow", "and", "or", "xor", "lshift", "rshift", "matmul")),
    }
)
"""Names of functions without torch's suffix "_" that change a tensor, its gradient or hooks."""
_POINTWISE = frozenset({torch.tanh, Tensor.tanh, Tensor.float, Tensor.contiguous, Tensor.to})


class TiledLogits(Tensor):
    """Logits [..., vocabulary], computed one tile at a time. See [Note: tiled logits]."""

    _hidden: Tensor
    _head: TileForward
    _steps: Sequence[TileForward]
    _tile_tokens: int
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls, hidden: Tensor, head: TileForward, tile_tokens: int, steps: Sequence[TileForward] = ()
    ) -> Self:
        """Return ``head``'s logits for ``hidden``, [..., features], with ``steps`` applied."""
        like = _apply(head(hidden[..., :0, :]), steps)  # zero tokens, for shape and dtype
        logits = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], like.shape[-1]),
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.requires_grad,
        )
        logits._hidden, logits._head, logits._steps = hidden, head, steps
        logits._tile_tokens, logits._whole = tile_tokens, None
        return logits

    def whole(self) -> Tensor:
        """Return the logits as a plain tensor with autograd graph, computed by the first call."""
        if self._whole is None:
            with torch.enable_grad():
                self._whole = _apply(self._head(self._hidden), self._steps)
        return self._whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TiledLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name, first = func.__name__, args[0] if args else None
        is_in_place = name.endswith("_") and not name.startswith("__")
        is_in_place = is_in_place or name in _CHANGING or bool(kwargs.get("inplace"))
        changed = kwargs.get("out"), first if is_in_place else None
        if any(isinstance(value, TiledLogits) for value in changed):
            raise RuntimeError(
                f"{name} would change tiled logits, of which one tile exists at a time: "
                "use a function that returns new ones, or leave the head out of "
                "tiled_compute.logits"
            )
        if func in _FACTS:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        found: Tensor | None = None
        if isinstance(first, TiledLogits):
            found = first._follow(func, args[1:], kwargs)
        if found is None and func is functional.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
        if found is not None:
            return found
        given = (tuple(args), dict(kwargs))
        args, kwargs = pytree.tree_map_only(TiledLogits, TiledLogits.whole, given)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called with tiled logits where torch looks for no subclasses: leave the "
            "head out of tiled_compute.logits"
        )

    def _follow(self, func: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Self | None:
        """Return ``func``'s result as tiled logits, or None if it cannot be represented so."""
        is_number = len(rest) == 1 and isinstance(rest[0], int | float)
        if func in _POINTWISE or (func in _SCALING and is_number and not kwargs):
            if any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())):
                return None

            def step(logits: Tensor) -> Any:
                return func(logits, *rest, **kwargs)

            return type(self)(self._hidden, self._head, self._tile_tokens, (*self._steps, step))
        # Views of the leading dimensions are applied to the head's input instead.
        hidden: Tensor | None = None
        if func in (Tensor.view, Tensor.reshape) and not kwargs:
            sizes = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], Sequence) else rest
            are_plain = len(sizes) > 1 and all(isinstance(size, int) for size in sizes)
            if are_plain and sizes[-1] in (self.shape[-1], -1):
                leading: Tensor | None = None
                with suppress(RuntimeError):  # the leading dimensions do not fit ``sizes``
                    empty = torch.empty(self._hidden.shape[:-1], device="meta")
                    leading = empty.reshape(sizes[:-1])
                if leading is not None:
                    hidden = self._hidden.reshape(*leading.shape, self._hidden.shape[-1])
        elif func is Tensor.flatten and not kwargs and tuple(rest) == (0, self.dim() - 2):
            hidden = self._hidden.flatten(0, self.dim() - 2)
        elif func is Tensor.__getitem__ and (index := _leading_index(rest[0], self.dim())):
            hidden = self._hidden[index]
        if hidden is None or hidden.dim() < 2:
            return None
        return type(self)(hidden, self._head, self._tile_tokens, self._steps)


def _apply(logits: Tensor, steps: Sequence[TileForward]) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _leading_index(index: Any, num_dims: int) -> tuple[Any, ...] | None:
    """Return ``index`` with one item per dimension, or None if it may change the last dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    are_plain = all(type(item) in (int, slice) or item is Ellipsis for item in items)
    if not are_plain or items.count(Ellipsis) > 1:
        return None
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (num_dims - len(items) + 1)
    return tuple(items) if len(items) == num_dims and items[-1] == slice(None) else None


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute `functional.cross_entropy` tile by tile, or return None if that is not supported."""
    if not isinstance(input, TiledLogits) or isinstance(target, TiledLogits):
        return None
    is_legacy = (size_average, reduce) != (None, None)
    is_fitting = input.dim() == 2 and target.shape[:1] == input.shape[:1]
    if is_legacy or not is_fitting or reduction not in ("mean", "sum", "none"):
        return None  # torch computes it from the whole logits, or reports wrong arguments
    is_summed = reduction != "none"
    # A sum of thousands of losses may overflow fp16, and loses precision in bf16.
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    own_dtype = input.dtype  # dtype of a loss: wider than the logits under autocast

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        nonlocal own_dtype
        tile = _apply(input._head(hidden), input._steps)
        losses = functional.cross_entropy(
            tile,
            target,
            weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        own_dtype = losses.dtype
        return losses.sum(dtype=dtype) if is_summed else losses

    size = input._tile_tokens
    tiles = zip(torch.split(input._hidden, size), torch.split(target, size), strict=True)
    losses = [run_tile(partial(loss_of, target=wanted), hidden) for hidden, wanted in tiles]
    if not is_summed:
        return torch.cat(losses)
    total = torch.stack(losses).sum()
    if reduction == "mean":
        if target.is_floating_point():
            total = total / target.shape[0]
        else:  # divide by the number of rows that are not ignored, or by the sum of their weights
            counted = target != ignore_index
            total = total / (counted.sum() if weight is None else weight[target[counted]].sum())
    return total.to(own_dtype)


def run_tile(forward: TileForward, tile: Tensor) -> Tensor:
    """Return ``forward(tile)``. With gradients, save only ``tile`` and recompute in backward."""
    if not torch.is_grad_enabled():
        return forward(tile)
    result: Tensor = checkpoint(forward, tile, use_reentrant=False)
    return result


class TiledForwards(ObjectMethods):
    """Replacement of the forwards of the configured modules, until `remove`."""

    def __init__(self, model: nn.Module, config: TiledComputeConfig, passes: Passes | None) -> None:
        """Wrap forwards that ``config`` selects. ``passes`` is None if no engine owns ``model``."""
        self._tile_tokens = config.tile_tokens
        self._passes = passes
        tiled = [(m, self._tiled(path, m)) for path, m in _selected(model, config.modules)]
        heads = [(m, self._with_loss(path, m)) for path, m in _selected(model, config.logits)]
        super().__init__("forward", [*tiled, *heads])

    def _tiled(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if len(tensors) != 1 or leaves[tensors[0]].dim() < 2:
                shapes = [tuple(leaves[at].shape) for at in tensors]
                raise ConfigError(
                    f"tiled_compute.modules: {path!r} ({type(module).__name__}) was called with "
                    f"tensors of shapes {shapes}: only a module that takes one tensor, [..., "
                    "tokens, features], can be tiled"
                )
            (at,) = tensors
            x = leaves[at]
            size = max(1, self._tile_tokens * x.shape[-2] * x.shape[-1] // max(1, x.numel()))
            if x.shape[-2] <= size:
                return forward(*args, **kwargs)

            def of_tile(tile: Tensor) -> Tensor:
                if self._passes is not None and is_in_backward():
                    _gather(self._passes, module)  # recomputation does not run the module's hooks
                # Make tiles contiguous: a module may view its input, as the Conv1D of GPT-2 does.
                its_args, its_kwargs = pytree.tree_unflatten(
                    [*leaves[:at], tile.contiguous(), *leaves[at + 1 :]], spec
                )
                output = forward(*its_args, **its_kwargs)
                if not isinstance(output, Tensor) or output.shape[:-1] != tile.shape[:-1]:
                    raise ConfigError(
                        f"tiled_compute.modules: {path!r} ({type(module).__name__}) does not "
                        "return one tensor with a row for each token: leave it out"
                    )
                return output

            return torch.cat([run_tile(of_tile, tile) for tile in x.split(size, dim=-2)], dim=-2)

        return wrapped

    def _with_loss(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            inputs = [*args, *kwargs.values()]
            # Without gradients, compute all logits now: a single rank cannot gather weights later.
            if len(inputs) != 1 or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            hidden = inputs[0]
            if not isinstance(hidden, Tensor) or hidden.dim() < 2:
                return forward(*args, **kwargs)
            if hidden.numel() // max(1, hidden.shape[-1]) <= self._tile_tokens:
                return forward(*args, **kwargs)
            # Tiles are computed later, but need this call's weights and autocast state.
            passes, device_type = self._passes, hidden.device.type
            version = 0 if passes is None else _version(passes, module)
            autocast: dict[str, Any] | None = None
            if torch.amp.is_autocast_available(device_type):
                autocast = {
                    "device_type": device_type,
                    "dtype": torch.get_autocast_dtype(device_type),
                    "enabled": torch.is_autocast_enabled(device_type),
                }

            def head(tile: Tensor) -> Tensor:
                if passes is not None:
                    is_current, units = version == _version(passes, module), passes.units
                    if is_current and is_in_backward():
                        _gather(passes, module)
                    elif not is_current or any(
                        unit.index not in units.ready for unit in passes.units_of(module)
                    ):
                        raise RuntimeError(
                            f"logits of {path!r} were read after their backward or a step(), which "
                            "has released or changed its weights: read them before it, or leave "
                            "the head out of tiled_compute.logits"
                        )
                with torch.autocast(**autocast) if autocast else nullcontext():
                    logits: Tensor = forward(tile)
                return logits

            return TiledLogits(hidden, head, self._tile_tokens)

        return outside_graphs(wrapped)  # in a compiled graph, all logits would exist at once


def _gather(passes: Passes, module: nn.Module) -> None:
    for unit in passes.units_of(module):
        if unit.index not in passes.units.ready:
            passes.forward.enter_part(unit)


def _version(passes: Passes, module: nn.Module) -> int:
    return sum(flat.version for unit in passes.units_of(module) for flat in unit.params)


def check_names(model: nn.Module, config: TiledComputeConfig) -> None:
    """Raise ConfigError if ``config`` names modules that ``model`` lacks."""
    for key, block in (("modules", config.modules), ("logits", config.logits)):
        missing = block.missing(model)
        if missing:
            raise ConfigError(
                f"tiled_compute.{key} names what the model lacks: {', '.join(missing)}"
            )


def _selected(model: nn.Module, config: ModulesConfig) -> list[tuple[str, nn.Module]]:
    """Return the modules that ``config`` selects, without modules inside a selected one."""
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        # The model itself, whose path is empty, contains every module.
        is_within = bool(found) and (not found[-1][0] or path.startswith(f"{found[-1][0]}."))
        if not is_within and config.selects(path, module):
            found.append((path, module))
    return found
