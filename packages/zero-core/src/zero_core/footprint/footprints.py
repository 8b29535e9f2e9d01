"""Closed forms of other packages' memory and traffic, as a plan asks for them.

A package that serves a part of the configuration announces its closed forms under the entry point
group ``zero_core.footprints``. Names, arguments and results are builtins and torch types.
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
    """Bytes of one message of a reduction in two hops: within a node, then between nodes."""

    @property
    def within_nbytes(self) -> int: ...
    @property
    def across_nbytes(self) -> int: ...


class GatherFootprint(ReduceFootprint, Protocol):
    """Bytes that a rank hands into a gather's phases: across groups of ranks, then within a group.

    If the result of the first phase ``is_kept``, it runs once per version of the weights.
    """

    @property
    def is_kept(self) -> bool: ...


class CollectivesFootprint(Protocol):
    """Bytes that the collectives of a configuration send and keep on each rank."""

    group_size: int
    """Consecutive ranks that form a group of the second phase."""
    num_groups: int
    """Number of groups."""

    def gather(
        self, numel: int, dtype: torch.dtype, *, is_trainable: bool
    ) -> GatherFootprint | None:
        """Return the bytes of a shard's gather, or None if the engine's collective does it."""

    def reduction(self, numel: int, dtype: torch.dtype) -> ReduceFootprint | None:
        """Return the bytes of a shard's reduction, or None if the engine's collective does it."""

    def coded_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return the expected and the most bytes of a coded slice that is sent to another node.

        None if slices are sent as they are.
        """

    def memory(
        self,
        shards: Iterable[tuple[int, torch.dtype, bool]],
        reduced: Iterable[tuple[int, torch.dtype, torch.dtype]],
    ) -> dict[str, int]:
        """Return the bytes held between exchanges, by kind.

        ``shards`` has the elements, dtype and trainability of each segment's shard of weights,
        ``reduced`` the elements, communicated dtype and summed dtype of its gradients.
        """


class CollectivesFootprintFactory(Protocol):
    """The entry point ``collectives``, for a resolved ``zero_optimization`` block.

    Raises:
        ValueError: a setting that makes no sense, by key.
    """

    def __call__(
        self,
        *,
        config: Mapping[str, Any],
        world_size: int,
        ranks_per_node: int,
        learning_rate: float | None = None,
    ) -> CollectivesFootprint:
        """Return the closed forms, of the most bytes without a ``learning_rate``."""


class TierFootprint(Protocol):
    """Bytes that one rank's state tier keeps and moves, for any ratio of elements on the host.

    What has a body holds for a tier that is on the host as a whole, and in no file.
    """

    def planned_ratio(self, params: Sequence[tuple[str, int]]) -> float:
        """Return the configured share on the host of ``(name, numel)`` of all trainable params."""
        return 1.0

    def device_span(self, ratio: float) -> tuple[int, int]:
        """Return start and stop of the elements that the device keeps."""
        return 0, 0

    def host_bytes(self, ratio: float) -> dict[str, int]:
        """Return the bytes of host memory by kind."""

    def device_bytes(self, ratio: float) -> dict[str, int]:
        """Return the bytes on the device by kind, without those of the engine's own tier."""

    def undo_share(self, ratio: float) -> float:
        """Return the share of the host's elements for which the undo log has room."""
        return 0.0

    def link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes per step from the device to the host and back."""

    def uploaded_numel(self, ratio: float) -> Mapping[torch.dtype, int]:
        """Return the parameters whose difference may go to the device in a step, by dtype."""
        return {}

    def file_bytes(self, ratio: float) -> int:
        """Return the bytes of master weights and states in files, each read and written a step."""
        return 0


class TierFootprintFactory(Protocol):
    """The entry point ``state_tier``."""

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

        Args, besides those of that factory:
            params: ``(start, tensor)``: 1-D parameter shards, all on the meta device.
            grad_dtypes: dtype of the gradients offered for each of ``params``.
            num_added: gradients of each element that the tier adds up in a step, 1 for none.
            resting: indices of ``params`` that rest off the device.
            is_accelerated: whether the compute device is another one than the host.
            has_kernel: whether a host kernel computes the update.
            is_speculative: whether steps begin before their decision, with an undo log.

        Raises:
            ValueError: a setting or an optimizer that it cannot serve, by name.
        """


class ParamFootprintFactory(Protocol):
    """The entry point ``param_tier``."""

    def __call__(
        self, *, shards: Sequence[tuple[int, int, torch.dtype]], config: Mapping[str, Any]
    ) -> dict[str, int]:
        """Return the host bytes by kind of ``shards``, arguments of `ParamTierFactory`."""


class UploadFootprint(Protocol):
    """The entry point ``uploads``."""

    def __call__(
        self, *, numel: int, dtype: torch.dtype, learning_rate: float | None = None
    ) -> int:
        """Return a lossless difference's expected bytes, or the most without ``learning_rate``."""


class Footprints:
    """Loads the closed forms of installed packages and notes which packages are missing."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # what is not counted and why, by distribution

    def collectives(
        self, config: Config, links: Links, *, is_worst_case: bool = False
    ) -> CollectivesFootprint | None:
        """Return the footprint of the collectives that are asked for, if zero-comm is there."""
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
        """Return the entry point, or None without the ``distribution``, which is noted."""
        try:
            return load_part(FOOTPRINTS, name, asked_by=asked_by, distribution=distribution)
        except MissingPartError as error:
            self.missing.setdefault(distribution, f"not counted: {error}")
            return None


def learning_rate(config: Config) -> float | None:
    """Return the configured optimizer's learning rate, on which differences depend."""
    optimizer = config.optimizer
    found: float | None = None if optimizer is None else optimizer.params.get("lr")
    return found
