"""Numbers of the checksum that every backend has: see `zero_comm.quantizer.checksum`."""

from __future__ import annotations

from typing import Final

WORDS_PER_TURN: Final = 1024
ODD: Final = -7046029254386353131
"""The golden ratio's fraction in 64 bits: ``k * ODD | 1`` is the odd number of word k of a turn."""
MIX: Final = -2960836687051489901
"""0xd6e8feb86659fd93, of Degski's 64-bit mixer."""
LOW_HALF: Final = 0xFFFFFFFF
"""Makes a shift by 32 bits a logical one."""
