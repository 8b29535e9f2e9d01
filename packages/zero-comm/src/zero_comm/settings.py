"""Reads the ``zero_optimization`` keys that concern collectives; refuses what isn't served.

The block arrives resolved, as plain builtins in DeepSpeed's names. Keys about other parts are
none of this package's business and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CommSettings"]

# What each unserved key must be, if it is there at all.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "zero_quantized_gradients": (False, None),
    "zero_quantized_nontrainable_weights": (False, None),
    "zero_hpz_partition_size": (1, None),
    "zeropp_loco_param": (None,),
}


@dataclass(frozen=True, slots=True)
class CommSettings:
    """What the config asks of the collectives.

    Args:
        weight_bits: bits per gathered weight (qwZ): 8 or 4; None sends weights as they are.
    """

    weight_bits: int | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CommSettings:
        """Read a resolved ``zero_optimization`` block.

        Keys: ``zero_quantized_weights`` (bool, false) and ``zero_quantized_weights_bits`` (8 or
        4; 8).

        Raises:
            ValueError: a value that is out of range or asks for what isn't served, by key.
        """
        for key, served in _OFF.items():
            if config.get(key) not in served:
                raise ValueError(
                    f"zero_optimization.{key} = {config[key]!r} is not supported by this version "
                    f"of zero-comm, which quantizes weights only; set it to {served[0]!r} or "
                    f"remove it"
                )
        return cls(weight_bits=_weight_bits(config))


def _weight_bits(config: Mapping[str, Any]) -> int | None:
    is_quantized = config.get("zero_quantized_weights", False)
    if not isinstance(is_quantized, bool):
        raise ValueError(
            f"zero_optimization.zero_quantized_weights must be true or false, got {is_quantized!r}"
        )
    bits = config.get("zero_quantized_weights_bits")
    if bits is None:
        bits = 8
    if type(bits) is not int or bits not in (8, 4):
        raise ValueError(
            f"zero_optimization.zero_quantized_weights_bits must be 8 or 4, got {bits!r}"
        )
    return bits if is_quantized else None
