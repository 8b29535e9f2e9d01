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
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import outside_graphs, pytree
from zero_core.config import TiledComputeConfig
from zero_core.errors import ConfigError
from zero_core.layout.discovery import ModuleRule
from zero_core.tiled.logits import TiledLogits, run_tile


class ParamGatherer(Protocol):
    """Gathers the parameters of modules."""

    def gather(self, module: nn.Module) -> None:
        """Make sure that the parameters of ``module`` have their values."""


class WholeModel:
    """`ParamGatherer` of a model whose parameters always have their values."""

    def gather(self, module: nn.Module) -> None:
        """Do nothing."""


class TiledForwards:
    """Wraps the forwards of the modules that the configuration names until `remove`."""

    def __init__(
        self, model: nn.Module, config: TiledComputeConfig, gatherer: ParamGatherer
    ) -> None:
        """Wrap the modules of ``model``.

        Raises:
            ConfigError: a name is not the model's.
        """
        self._tile_tokens = config.tile_tokens
        self._gatherer = gatherer
        self._before: list[tuple[nn.Module, Any]] = []
        kinds = (
            ("modules", config.modules, self._tiled),
            ("logits", config.logits, self._with_loss),
        )
        for key, named, wrap in kinds:
            rule = ModuleRule(**named.model_dump())
            missing = rule.missing(model)
            if missing:
                raise ConfigError(
                    f"tiled_compute.{key} names what the model lacks: {', '.join(missing)}"
                )
            for path, module in _selected(model, rule):
                # A forward that was set on the object must come back; the class's shows by itself.
                self._before.append((module, vars(module).get("forward")))
                module.forward = wrap(path, module)

    def remove(self) -> None:
        for module, forward in reversed(self._before):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        self._before.clear()

    def _tiled(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._gatherer.gather(module)
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
                its_args, its_kwargs = pytree.tree_unflatten(
                    [*leaves[:at], tile, *leaves[at + 1 :]], spec
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

    def _with_loss(self, _path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def head(hidden: Tensor) -> Tensor:
            self._gatherer.gather(module)
            logits: Tensor = forward(hidden)
            return logits

        @functools.wraps(forward)
        def wrapped(hidden: Tensor) -> Tensor:
            tokens = hidden.numel() // max(1, hidden.shape[-1])
            if hidden.dim() < 2 or tokens <= self._tile_tokens:
                return head(hidden)
            return TiledLogits(hidden, head, self._tile_tokens)

        return outside_graphs(wrapped)  # a graph would hold the whole logits


def _selected(model: nn.Module, rule: ModuleRule) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that ``rule`` selects, each once, but none within another one."""
    within: str | None = None
    for path, module in list(model.named_modules()):
        if within is not None and path.startswith(within):
            continue
        if rule.selects(path, module):
            within = f"{path}."
            yield path, module
