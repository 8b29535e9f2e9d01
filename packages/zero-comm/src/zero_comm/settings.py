"""Reads the ``zero_optimization`` keys that concern collectives; refuses what makes no sense.

The block arrives resolved, as plain builtins in DeepSpeed's names. Keys about other parts are
none of this package's business and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_comm.feedback import LocoSettings

__all__ = ["DIFFERENCE", "CommSettings"]

KINDS: Final = ("int8", "int4", "e4m3", "e5m2")
DIFFERENCE: Final = "int4_difference"
_BLOCK: Final = "zero_optimization"


@dataclass(frozen=True, slots=True)
class CommSettings:
    """What the config asks of the collectives.

    Args:
        weights: format of gathered weights (qwZ): a kind or "int4_difference"; None: exact.
        frozen_weights: format of gathered weights that are never trained.
        partition_size: ranks of a group with secondary shards (hpZ); 1: there are none.
        within: format of gradients within a node (qgZ); None: reduced exactly.
        between: format of gradients between nodes.
        has_rotation: whether gradients are rotated before they are quantized.
        is_stochastic: whether gradients are rounded stochastically.
        loco: error feedback of gradients; None: there is none.
        has_checksum: whether messages carry a checksum.
    """

    weights: str | None = None
    frozen_weights: str | None = None
    partition_size: int = 1
    within: str | None = None
    between: str | None = None
    has_rotation: bool = False
    is_stochastic: bool = False
    loco: LocoSettings | None = None
    has_checksum: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CommSettings:
        """Read a resolved ``zero_optimization`` block; a missing key means DeepSpeed's default.

        Raises:
            ValueError: a value that is out of range, by key.
        """
        read = _Reader(config)
        has_weights = read.flag("zero_quantized_weights")
        has_frozen = read.flag("zero_quantized_nontrainable_weights")
        has_gradients = read.flag("zero_quantized_gradients")
        weights = read.choice("zero_quantized_weights_format", (*KINDS, DIFFERENCE), "int8")
        # What never changes has no differences: it is sent once per gather, in 8 bits.
        frozen = "int8" if weights == DIFFERENCE else weights
        within = read.choice("zero_quantized_gradients_within_node", KINDS, "int4")
        between = read.choice("zero_quantized_gradients_between_nodes", KINDS, "int4")
        return cls(
            weights=weights if has_weights else None,
            frozen_weights=frozen if has_weights or has_frozen else None,
            partition_size=read.count("zero_hpz_partition_size"),
            within=within if has_gradients else None,
            between=between if has_gradients else None,
            has_rotation=read.flag("zero_quantized_gradients_hadamard"),
            is_stochastic=read.flag("zero_quantized_stochastic_rounding"),
            loco=read.loco() if has_gradients else None,
            has_checksum=read.flag("zero_quantized_checksum"),
        )


class _Reader:
    """Typed access to a block of builtins."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{_BLOCK}.{key} must be true or false, got {value!r}")
        return bool(value)

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._config.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"{_BLOCK}.{key} must be one of {', '.join(allowed)}, got {value!r}")
        return default if value is None else str(value)

    def count(self, key: str) -> int:
        value = self._config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{_BLOCK}.{key} must be a positive integer, got {value!r}")
        return 1 if value is None else int(value)

    def loco(self) -> LocoSettings | None:
        value = self._config.get("zeropp_loco_param")
        if value is None:
            return None
        key = f"{_BLOCK}.zeropp_loco_param"
        if not isinstance(value, Mapping) or set(value) - {"err_beta", "reset_T"}:
            raise ValueError(f"{key} must have the keys err_beta and reset_T, got {value!r}")
        try:
            return LocoSettings(**value)
        except ValueError as error:
            raise ValueError(f"{key}.{error}") from error
