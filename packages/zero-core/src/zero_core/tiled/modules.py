"""Modules that are computed tile by tile, as ``tiled_compute`` in the configuration asks for.

[Note: tiles]
A module that acts on each token by itself (the MLP of a transformer's block) keeps activations of
all tokens for backward, several times as wide as its input. Computed on tiles of ``tile_tokens``
tokens, each of which keeps its input alone and is computed again in backward, it holds those of one
tile. The sums over tokens in the gradients of its parameters are taken tile by tile, so that they
round differently. Heads are tiled together with the loss: [Note: tiled logits] in
`zero_core.tiled.logits`. Only a module's ``forward`` is wrapped, on the object: names, class and
hooks stay. (The tiled MLP of Arctic Long Sequence Training, arXiv 2506.13996.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import is_in_backward, outside_graphs, pytree
from zero_core.config import ModulesConfig, TiledComputeConfig
from zero_core.errors import ConfigError
from zero_core.layout.discovery import ModuleRule
from zero_core.object_methods import ObjectMethods
from zero_core.tiled.logits import TiledLogits, TileForward, run_tile


class ParamHolders(Protocol):
    """The units that hold the parameters of modules."""

    def gather(self, module: nn.Module) -> None:
        """Make sure that the parameters of ``module`` have their values."""

    def is_gathered(self, module: nn.Module) -> bool:
        """Whether they have."""

    def version(self, module: nn.Module) -> int:
        """Return a number that grows when the parameters of ``module`` get new values."""


class WholeModel:
    """`ParamHolders` of a model whose parameters always have the same values."""

    def gather(self, module: nn.Module) -> None:
        pass

    def is_gathered(self, module: nn.Module) -> bool:
        return True

    def version(self, module: nn.Module) -> int:
        return 0


class TiledForwards(ObjectMethods):
    """Wraps the forwards of the modules that the configuration names until `remove`."""

    def __init__(self, model: nn.Module, config: TiledComputeConfig, holders: ParamHolders) -> None:
        """Wrap the modules of ``model``. See `check_names`."""
        self._tile_tokens = config.tile_tokens
        self._holders = holders
        tiled = [(m, self._tiled(path, m)) for path, m in _selected(model, config.modules)]
        heads = [(m, self._with_loss(path, m)) for path, m in _selected(model, config.logits)]
        super().__init__("forward", [*tiled, *heads])

    def _tiled(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_in_backward():  # in forward the module's own hooks have gathered them
                self._holders.gather(module)
            return forward(*args, **kwargs)

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
                # A module may view what it is given, as the Conv1D of GPT-2 does.
                its_args, its_kwargs = pytree.tree_unflatten(
                    [*leaves[:at], tile.contiguous(), *leaves[at + 1 :]], spec
                )
                output = run(*its_args, **its_kwargs)
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
            # Without gradients logits may be read on one rank alone, when nothing is gathered.
            if len(inputs) != 1 or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            hidden: Tensor = inputs[0]
            tokens = hidden.numel() // max(1, hidden.shape[-1])
            if hidden.dim() < 2 or tokens <= self._tile_tokens:
                return forward(hidden)
            head = self._head(path, module, forward, hidden.device.type)
            return TiledLogits(hidden, head, self._tile_tokens)

        return outside_graphs(wrapped)  # a graph would hold the whole logits

    def _head(self, path: str, module: nn.Module, forward: Any, device_type: str) -> TileForward:
        """Return a head's own forward with the weights and the autocast that it has now."""
        holders, version = self._holders, self._holders.version(module)
        autocast: dict[str, Any] | None = None
        if torch.amp.is_autocast_available(device_type):
            autocast = {
                "device_type": device_type,
                "dtype": torch.get_autocast_dtype(device_type),
                "enabled": torch.is_autocast_enabled(device_type),
            }

        def run(hidden: Tensor) -> Tensor:
            if version != holders.version(module):
                raise RuntimeError(
                    f"logits of {path!r} were read after step(), which has changed its weights: "
                    "read them before it, or leave the head out of tiled_compute.logits"
                )
            if is_in_backward():
                holders.gather(module)
            elif not holders.is_gathered(module):
                raise RuntimeError(
                    f"logits of {path!r} were read after their backward, which has released its "
                    "weights: read them before it, or leave the head out of tiled_compute.logits"
                )
            with torch.autocast(**autocast) if autocast else nullcontext():
                logits: Tensor = forward(hidden)
            return logits

        return run


def check_names(model: nn.Module, config: TiledComputeConfig) -> None:
    """Check the names in the configuration before anything is changed."""
    for key, block in (("modules", config.modules), ("logits", config.logits)):
        missing = ModuleRule(**block.model_dump()).missing(model)
        if missing:
            raise ConfigError(
                f"tiled_compute.{key} names what the model lacks: {', '.join(missing)}"
            )


def _selected(model: nn.Module, config: ModulesConfig) -> list[tuple[str, nn.Module]]:
    """Return the modules that ``config`` names, each once, but none within another one."""
    rule = ModuleRule(**config.model_dump())
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        is_within = bool(found) and path.startswith(f"{found[-1][0]}.")
        if not is_within and rule.selects(path, module):
            found.append((path, module))
    return found
