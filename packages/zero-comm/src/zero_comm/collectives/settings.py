"""Settings of the collectives, read from a resolved ``zero_optimization`` block.

The block has DeepSpeed's key names and plain Python values. Keys for other packages are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_comm.collectives.feedback import LocoSettings
from zero_comm.collectives.two_hop import GradientFormat
from zero_comm.quantizer.block_format import DEFAULT_BLOCK_SIZE, BlockFormat
from zero_comm.quantizer.message import Packing

KINDS: Final = tuple(DEFAULT_BLOCK_SIZE)
DIFFERENCE: Final = "int4_difference"
LOSSLESS: Final = "lossless"
_BLOCK: Final = "zero_optimization"
# Blocks of differences are longer than blocks of 4-bit weights. A step changes all weights by about
# the learning rate, so outliers, which cost their neighbours precision, are rare.
_DIFFERENCE_FORMAT: Final = BlockFormat("int4", 256)


@dataclass(frozen=True, slots=True)
class CommSettings:
    """Formats and options of an engine's collectives. A format of None is exact."""

    weights: str | None = None  # format of gathered weights (qwZ), or "int4_difference"
    frozen_weights: str | None = None  # format of gathered weights that are never trained
    partition_size: int = 1  # ranks per group with secondary shards (hpZ), or 1 for none
    gradients: GradientFormat | None = None  # formats of reduced gradients (qgZ)
    has_checksum: bool = False  # whether quantized messages carry a checksum
    is_lossless: bool = False  # whether trained weights are sent as lossless differences
    codes_gradients: bool = False  # whether gradients are coded losslessly between nodes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CommSettings:
        """Read a resolved ``zero_optimization`` block. Missing keys have DeepSpeed's defaults."""
        read = _Reader(config)
        for what in ("weights", "gradients"):
            if read.flag(f"zero_lossless_{what}") and read.flag(f"zero_quantized_{what}"):
                raise ValueError(
                    f"{_BLOCK}.zero_lossless_{what} sends every bit of the {what}, and "
                    f"zero_quantized_{what} rounds them: choose one"
                )
        has_weights = read.flag("zero_quantized_weights")
        has_frozen = read.flag("zero_quantized_nontrainable_weights")
        has_checksum = read.flag("zero_quantized_checksum")
        weights = read.choice("zero_quantized_weights_format", (*KINDS, DIFFERENCE), "int8")
        # Frozen weights never change, so differences do not apply to them.
        frozen = "int8" if weights == DIFFERENCE else weights
        has_rotation = read.flag("zero_quantized_gradients_hadamard")
        within, between = (
            BlockFormat(kind, DEFAULT_BLOCK_SIZE[kind], has_rotation=has_rotation)
            for kind in (
                read.choice("zero_quantized_gradients_within_node", KINDS, "int4"),
                read.choice("zero_quantized_gradients_between_nodes", KINDS, "int4"),
            )
        )
        is_stochastic = read.flag("zero_quantized_stochastic_rounding")
        gradients = None
        if read.flag("zero_quantized_gradients"):
            gradients = GradientFormat(within, between, is_stochastic, read.loco(), has_checksum)
        return cls(
            weights=weights if has_weights else None,
            frozen_weights=frozen if has_weights or has_frozen else None,
            partition_size=read.count("zero_hpz_partition_size"),
            gradients=gradients,
            has_checksum=has_checksum,
            is_lossless=read.flag("zero_lossless_weights"),
            codes_gradients=read.flag("zero_lossless_gradients"),
        )

    def group_size(self, ranks_per_node: int) -> int:
        """Return the number of ranks per gather group: those of hpZ's partition or of a node."""
        return self.partition_size if self.partition_size > 1 else ranks_per_node

    def weight_packing(self, kind: str) -> Packing:
        """Return the packing of weights in format ``kind``, which may be `DIFFERENCE`."""
        fmt = _DIFFERENCE_FORMAT if kind == DIFFERENCE else BlockFormat.make(kind)
        return Packing(fmt, has_checksum=self.has_checksum, defers=True)


class _Reader:
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
