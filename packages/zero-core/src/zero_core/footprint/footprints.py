"""Memory and traffic of other packages' parts, as closed-form functions for a plan.

A package that implements a part of the configuration declares these functions in the entry-point
group ``zero_core.footprints``. Their arguments are builtins and torch types.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.errors import MissingPartError
from zero_core.parts import load_part
from zero_core.plugins import FOOTPRINTS, call_factory


class ReduceFootprint(Protocol):
    """Bytes of one message in each hop of a reduction: within a node, then between nodes."""

    @property
    def within_nbytes(self) -> int: ...
    @property
    def across_nbytes(self) -> int: ...


class GatherFootprint(ReduceFootprint, Protocol):
    """Bytes that a rank contributes to a gather's phases: across groups, then within a group.

    If ``is_kept``, the first phase runs once per version of the weights.
    """

    @property
    def is_kept(self) -> bool: ...


class CollectivesFootprint(Protocol):
    """Bytes that the configured collectives send and keep on each rank."""

    group_size: int
    """Number of consecutive ranks in a group: see `GatherFootprint`."""
    num_groups: int

    def gather(
        self, numel: int, dtype: torch.dtype, *, is_trainable: bool
    ) -> GatherFootprint | None:
        """Return the bytes of a shard's gather, or None if the engine's collectives do it."""

    def reduction(self, numel: int, dtype: torch.dtype) -> ReduceFootprint | None:
        """Return the bytes of a shard's reduction, or None if the engine's collectives do it."""

    def coded_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return the expected and the largest bytes of an encoded slice sent to another node.

        None if slices are not encoded.
        """

    def memory(
        self,
        shards: Iterable[tuple[int, torch.dtype, bool]],
        reduced: Iterable[tuple[int, torch.dtype, torch.dtype]],
    ) -> dict[str, list[int]]:
        """Return the bytes of each buffer that is held between exchanges, by kind.

        ``shards`` has elements, dtype and trainability of each segment's shard of weights.
        ``reduced`` has elements, communicated and accumulated dtype of each gradient shard.
        """


class CollectivesFootprintFactory(Protocol):
    """Entry point ``collectives`` of the group ``zero_core.footprints``.

    Raises:
        ValueError: a setting is invalid. The message names the key.
    """

    def __call__(
        self,
        *,
        config: Mapping[str, Any],
        world_size: int,
        ranks_per_node: int,
        learning_rate: float | None = None,
    ) -> CollectivesFootprint:
        """Return the footprint. Without ``learning_rate``, sizes are upper bounds."""


class TierFootprint(Protocol):
    """Bytes that one rank's state tier keeps and moves, for any ratio of elements on the host.

    The default methods describe a tier that is entirely on the host, without files.
    """

    def planned_ratio(self, params: Sequence[tuple[str, int]]) -> float:
        """Return the configured host share, given ``(name, numel)`` of all trainable parameters."""
        return 1.0

    def device_span(self, ratio: float) -> tuple[int, int]:
        """Return the range of elements whose state the device keeps."""
        return 0, 0

    def host_bytes(self, ratio: float) -> dict[str, int]:
        """Return the bytes of host memory by kind."""

    def device_bytes(self, ratio: float) -> dict[str, int]:
        """Return the bytes on the device by kind, except those of the engine's own tier."""

    def undo_share(self, ratio: float) -> float:
        """Return the share of the host's elements that the undo log can hold."""
        return 0.0

    def link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes per step from the device to the host, and back."""

    def uploaded_numel(self, ratio: float) -> Mapping[torch.dtype, int]:
        """Return the elements of parameters uploaded as differences in a step, by dtype."""
        return {}

    def file_bytes(self, ratio: float) -> int:
        """Return the bytes of master weights and states in files, read and written each step."""
        return 0


class TierFootprintFactory(Protocol):
    """Entry point ``state_tier`` of the group ``zero_core.footprints``."""

    def __call__(
        self,
        *,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        grad_dtypes: Sequence[torch.dtype],
        num_added: int,
        resting: Collection[int],
        is_accelerated: bool,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        has_kernel: bool,
        is_speculative: bool,
    ) -> TierFootprint:
        """Return the footprint of the tier that a `zero_core.protocols.StateTierFactory` makes.

        Args, in addition to those of that factory:
            params: ``(start, tensor)``: 1-D parameter shards, all on the meta device.
            grad_dtypes: dtype of the gradients offered for each of ``params``.
            num_added: number of gradients per element that the tier adds up in a step, at least 1.
            resting: indices of ``params`` that are kept off the device.
            is_accelerated: whether the compute device is not the host.
            has_kernel: whether a host kernel computes the update.
            is_speculative: whether updates may begin before the decision, with an undo log.

        Raises:
            ValueError: a setting or the optimizer is not supported. The message names it.
        """


class ParamFootprintFactory(Protocol):
    """Entry point ``param_tier`` of the group ``zero_core.footprints``."""

    def __call__(
        self, *, shards: Sequence[tuple[int, int, torch.dtype]], config: Mapping[str, Any]
    ) -> dict[str, int]:
        """Return the host bytes of ``shards`` by kind. Arguments as in `ParamTierFactory`."""


class UploadFootprint(Protocol):
    """Entry point ``uploads`` of the group ``zero_core.footprints``."""

    def __call__(
        self, *, numel: int, dtype: torch.dtype, learning_rate: float | None = None
    ) -> int:
        """Return a difference's expected bytes. Without ``learning_rate``, an upper bound."""


class Footprints:
    """Loader of the footprints of installed packages, which records missing packages."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # explanation by distribution

    def collectives(
        self, config: Config, links: Links, *, is_worst_case: bool = False
    ) -> CollectivesFootprint | None:
        """Return the footprint of plug-in collectives, or None if none are configured or found."""
        zero, asked = config.zero_optimization, config.zero_optimization.quantized_key
        make = None if asked is None else self.load("collectives", asked, "zero-comm")
        if make is None:
            return None
        made: CollectivesFootprint = call_factory(
            make,
            config=zero.model_dump(mode="json"),
            world_size=links.world_size,
            ranks_per_node=links.ranks_per_node,
            learning_rate=None if is_worst_case else learning_rate(config),
        )
        return made

    def load(self, name: str, asked_by: str, distribution: str) -> Any:
        """Return the entry point ``name``. If it is missing, record that and return None."""
        try:
            return load_part(FOOTPRINTS, name, asked_by=asked_by, distribution=distribution)
        except MissingPartError as error:
            self.missing.setdefault(distribution, f"not counted: {error}")
            return None


def learning_rate(config: Config) -> float | None:
    """Return the configured learning rate, on which the size of encoded differences depends."""
    optimizer = config.optimizer
    found: float | None = None if optimizer is None else optimizer.params.get("lr")
    return found
