"""Messages of quantized values: a header and a quantized buffer, which the receiver checks.

[Note: the message]
A message carries the quantized buffer of one row of elements (`zero_comm.quantizer.block_format`)
after a header of 32 bytes in native byte order. The header has these fields (offset, bytes,
contents)::

    0   2  the letters ZQ
    2   1  version of this layout: 2
    3   1  format: kind, symmetry and rotation
    4   4  elements per block
    8   8  number of elements
    16  8  flags: 1 if a block may hold NaN, 2 if there is a checksum
    24  8  checksum of the buffer (`zero_comm.quantizer.checksum`) plus the flags, or 0

On a host every message is checked before use: the header, and that every block's scale is finite
and positive, or NaN if the header allows it. On an accelerator a check makes the host wait for the
device, so only messages with a checksum are checked there. An engine's collectives defer the check
until their result is waited for. A host that waits while it launches could otherwise deadlock with
a rank that waits for its launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.checksum import checksums
from zero_comm.quantizer.quantize import (
    QUANTIZABLE_DTYPES,
    dequantize_rows,
    dequantize_sum,
    quantize_rows,
)

HEADER_NBYTES: Final = 32
_FLAGS_AT: Final = 16
_CHECKSUM_AT: Final = 24
_MAY_HOLD_NAN: Final = 1
_HAS_CHECKSUM: Final = 2
_LAYOUT: Final = "=2sBBIq"
_KIND_CODES: Final = ("int8", "int4", "e4m3", "e5m2")  # a header stores the index: append only


class CorruptMessageError(RuntimeError):
    """A received message differs from the message that its sender must have sent."""


class Packing:
    """Packs rows of elements into messages of one format, and unpacks received messages.

    ``has_checksum`` enables checks on accelerators. ``defers`` postpones them to `check_deferred`,
    for callers that must not wait for the device while they launch.
    """

    def __init__(
        self, format: str | BlockFormat, *, has_checksum: bool = False, defers: bool = False
    ) -> None:
        self.format = BlockFormat.make(format)
        self.has_checksum = has_checksum
        self._defers = defers
        self._deferred: list[Callable[[], None]] = []
        self._templates: dict[tuple[int, bool, torch.device], Tensor] = {}

    def nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + self.format.nbytes(numel)

    def shortens(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether a message is shorter than ``numel`` elements of ``dtype``. Equal on all ranks."""
        return dtype in QUANTIZABLE_DTYPES and self.nbytes(numel) < numel * dtype.itemsize

    def pack(self, values: Tensor, rows: Tensor, *, seed: int | None = None) -> None:
        """Quantize flat, contiguous ``values`` into messages, each with an equal part of them.

        ``rows`` is uint8, [messages, `nbytes`] or [groups, messages per group, `nbytes`], with
        contiguous messages. A ``seed`` selects stochastic rounding.
        """
        numel = values.numel() // math.prod(rows.shape[:-1])
        has_nan = quantize_rows(values, self.format, rows[..., HEADER_NBYTES:], seed=seed)
        rows[..., :HEADER_NBYTES] = self._template(numel, rows.device, has_nan is not False)
        if self.has_checksum:
            rows.view(torch.int64)[..., _CHECKSUM_AT // 8] = _checksums(rows)

    def unpack(self, rows: Tensor, out: Tensor, *, senders: Sequence[int]) -> None:
        """Dequantize messages, one from each of ``senders``, into flat ``out`` of a float dtype."""
        numel = out.numel() // math.prod(rows.shape[:-1])
        self._check(rows, numel, senders)
        dequantize_rows(rows[..., HEADER_NBYTES:], numel, self.format, out)

    def unpack_sum(self, rows: Tensor, out: Tensor, *, senders: Sequence[int]) -> None:
        """Fill flat fp32 ``out`` with the sums of the messages of each group, in message order."""
        numel = out.numel() // (len(rows) if rows.dim() == 3 else 1)
        self._check(rows, numel, senders)
        dequantize_sum(rows[..., HEADER_NBYTES:], numel, self.format, out)

    def _template(self, numel: int, device: torch.device, may_hold_nan: bool) -> Tensor:
        key = (numel, may_hold_nan, device)
        if key not in self._templates:
            flags = may_hold_nan * _MAY_HOLD_NAN + self.has_checksum * _HAS_CHECKSUM
            header = self._fixed(numel) + struct.pack("=qq", flags, 0)
            self._templates[key] = fill_words(header, device).view(torch.uint8)
        return self._templates[key]

    def _fixed(self, numel: int) -> bytes:
        """Return the part of the header that sender and receiver must agree on."""
        fmt = self.format
        code = _KIND_CODES.index(fmt.kind)
        code += 16 * (not fmt.is_symmetric) + 32 * fmt.has_rotation
        return struct.pack(_LAYOUT, b"ZQ", 2, code, fmt.block_size, numel)

    def _check(self, rows: Tensor, numel: int, senders: Sequence[int]) -> None:
        nbytes = self.nbytes(numel)
        if math.prod(rows.shape[:-1]) != len(senders) or rows.shape[-1] != nbytes:
            raise CorruptMessageError(
                f"messages of {numel} elements from ranks {list(senders)} must be "
                f"{len(senders)} x {nbytes} bytes, found {list(rows.shape)}"
            )
        if rows.is_cpu or self.has_checksum:
            verify = partial(self._verify, *self._inspect(rows, numel), numel, senders)
            if rows.is_cpu or not self._defers:
                verify()
            else:
                self._deferred.append(verify)

    def check_deferred(self) -> None:
        """Check the messages whose checks were deferred. The host waits for the device."""
        while self._deferred:
            self._deferred.pop(0)()

    def _inspect(self, rows: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return headers, [messages, 32], and whether scales and checksums are good, [messages]."""
        fmt, headers = self.format, rows[..., :HEADER_NBYTES].clone()
        start, stop = (HEADER_NBYTES + at(numel) for at in (fmt.codes_nbytes, fmt.used_nbytes))
        scales = rows[..., start:stop]
        if fmt.is_symmetric:
            maxima = scales.view(torch.bfloat16)
            good, nan = (maxima > 0) & (maxima < torch.inf), maxima.isnan()
        else:
            low, high = scales.view(torch.float32).view(*rows.shape[:-1], -1, 2).unbind(-1)
            good = (low <= high) & low.isfinite() & high.isfinite()
            nan = low.isnan() & high.isnan()
        may_hold_nan = (headers[..., _FLAGS_AT] & _MAY_HOLD_NAN).bool()
        has_good_scales = (good | (nan & may_hold_nan[..., None])).all(-1)
        sums = torch.ones_like(has_good_scales)
        if self.has_checksum:
            sums = rows.view(torch.int64)[..., _CHECKSUM_AT // 8] == _checksums(rows)
        return headers.reshape(-1, HEADER_NBYTES), has_good_scales.reshape(-1), sums.reshape(-1)

    def _verify(
        self, headers: Tensor, scales: Tensor, sums: Tensor, numel: int, senders: Sequence[int]
    ) -> None:
        expected = self._fixed(numel)
        for sender, row in zip(senders, headers.cpu(), strict=True):
            header = bytes(row.tolist())
            if header[: len(expected)] != expected:
                found, wanted = map(_description_of, (header, expected))
                raise _damaged(sender, f"its header says {found}; expected {wanted}")
            (flags,) = struct.unpack_from("=q", header, _FLAGS_AT)
            if flags not in ((2, 3) if self.has_checksum else (0, 1)):
                raise _damaged(sender, f"its flags are {flags:#x}, unknown to this rank's settings")
        for is_right, what in (
            (scales, "a block's scale is not finite or not positive"),
            (sums, "its checksum does not match its bytes"),
        ):
            if wrong := torch.nonzero(~is_right).flatten().tolist():
                raise _damaged(senders[wrong[0]], what)


def fill_words(data: bytes, device: torch.device) -> Tensor:
    """Return ``data`` as int64 words. On an accelerator the host does not wait for a copy."""
    if device.type == "cpu":
        return torch.frombuffer(bytearray(data), dtype=torch.int64)
    words = torch.empty(len(data) // 8, dtype=torch.int64, device=device)
    for place, word in zip(words, struct.unpack(f"={len(words)}q", data), strict=True):
        place.fill_(word)
    return words


def _checksums(rows: Tensor) -> Tensor:
    return checksums(rows[..., HEADER_NBYTES:]) + rows.view(torch.int64)[..., _FLAGS_AT // 8]


def _description_of(header: bytes) -> str:
    letters, layout, code, block_size, numel = struct.unpack_from(_LAYOUT, header)
    return f"{letters!r} layout {layout}, format code {code}, {numel} in blocks of {block_size}"


def _damaged(sender: int, what: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"the quantized message of rank {sender} is damaged or of other settings: {what}. If all "
        "ranks have the same versions and settings, suspect memory or the network"
    )
