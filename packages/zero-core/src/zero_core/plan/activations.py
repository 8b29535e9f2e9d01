"""Bytes that autograd saves for backward, found by a forward on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zero_core._torch import pytree, storage_of
from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.layout.discovery import compute_dtype
from zero_core.layout.stored import components
from zero_core.tiled.modules import TiledForwards, WholeModel

_META = torch.device("meta")


def trace_activations(
    model: nn.Module, config: Config, inputs: Mapping[str, Any] | Sequence[Any]
) -> int:
    """Return the bytes that autograd saves for backward, parameters and buffers not counted.

    One forward runs on the meta device, in the compute dtype, in the model's current mode
    (train or eval). The model is not changed. ``inputs`` are keyword or positional arguments of one
    micro-batch. They and the model may be on any device. With ``torch_autocast`` activations count
    in fp32, and with them the casts of weights that stay to backward.

    Raises:
        ConfigError: the forward does not run on the meta device.
    """

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        meta = torch.empty_like(value, dtype=compute_dtype(value, dtype), device=_META)
        return meta.requires_grad_(value.requires_grad)

    def to_meta(value: Any) -> Any:
        return cast(value, config.compute_dtype)

    for name, param in model.named_parameters():
        if len(components(name, param)) > 1:
            raise ConfigError(
                f"parameter {name} is a quantized {type(param).__name__}, whose forward does not "
                "run on the meta device: plan without example_inputs, and add the activations "
                "yourself"
            )
    values = {name: to_meta(param) for name, param in model.named_parameters()}
    values |= {name: cast(buffer, config.buffer_dtype) for name, buffer in model.named_buffers()}
    known = {storage_of(t) for t in values.values()}
    cast_bytes = _bytes_of_casts(model, values, config)
    saved: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is reused
    casts: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        number = storage_of(tensor)
        if number not in known:
            saved[number] = tensor.untyped_storage()
        casts[number] = cast_bytes.get(number, 0)
        return tensor

    given = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = pytree.tree_map(to_meta, given)
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with torch.enable_grad(), hooks, _WithoutData(), _tiled(model, config):
            torch.func.functional_call(model, values, args, kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's forward does not run on the meta device ({error}): plan without "
            "example_inputs, and add the activations yourself"
        ) from error
    return sum(storage.nbytes() for storage in saved.values()) + sum(casts.values())


def _bytes_of_casts(
    model: nn.Module, values: Mapping[str, Tensor], config: Config
) -> dict[int, int]:
    """Return the bytes of each weight's cast under autocast, by the storage of its meta tensor.

    Of those alone that stay from forward to backward if autograd saves the weight. At stage 3 the
    engine saves a trained weight's cast as the weight. See [Note: saved tensors] in
    `zero_core.runtime.saved`. Weights are matrices: autocast leaves vectors in fp32.
    """
    dtype, is_sharded = config.autocast_dtype, config.zero_optimization.stage == 3
    if dtype is None:
        return {}
    return {
        storage_of(values[name]): param.numel() * dtype.itemsize
        for name, param in model.named_parameters()
        if param.dtype is torch.float32
        and param.ndim > 1
        and not (is_sharded and param.requires_grad)
    }


@contextmanager
def _tiled(model: nn.Module, config: Config) -> Iterator[None]:
    """Compute ``model`` in the tiles that ``config`` asks for."""
    if config.tiled_compute is None:
        yield
        return
    forwards = TiledForwards(model, config.tiled_compute, WholeModel())
    try:
        yield
    finally:
        forwards.remove()


class _WithoutData(TorchFunctionMode):
    """Mode in which a forward on the meta device saves what it saves on a real one.

    Attention saves what its fused kernels on accelerators and CPUs save: query, key, value, output
    and a number per row. On the meta device torch decomposes it and saves its matrix. Reductions of
    masks and positions have a truth value: ``mask.all()`` is true and ``mask.any()`` false, because
    inputs without padding take the most memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, bool]] = {}  # alive, so that no id is reused

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and id(args[0]) in self._known:
            return self._known[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if func in _ALL or func in _ANY:
            self._known[id(result)] = (result, func in _ALL)
        return result


_ALL, _ANY = (torch.all, Tensor.all), (torch.any, Tensor.any)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the shapes of a fused `torch.nn.functional.scaled_dot_product_attention`."""
    is_mask_trained = attn_mask is not None and attn_mask.requires_grad
    if query.dim() != 4 or query.shape[-1] != value.shape[-1] or is_mask_trained:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
