"""Compiled kernels. `native_backend` checks the memory behind every address."""

# (kind, block_size, is_symmetric, has_rotation, dtype, elements of a row)
_Shape = tuple[int, int, bool, bool, int, int]

def available_isas() -> list[str]: ...
def known_isas() -> list[str]: ...
def encode(
    isa: int,
    shape: _Shape,
    x: int,
    rows: int,
    stride: int,
    count: int,
    seed: int | None,
    num_threads: int,
) -> bool: ...
def decode(
    isa: int, shape: _Shape, rows: int, stride: int, count: int, out: int, num_threads: int
) -> None: ...
def decode_sum(
    isa: int, shape: _Shape, rows: int, stride: int, count: int, out: int, num_threads: int
) -> None: ...
def encode_blocks(
    isa: int,
    coding: int,
    itemsize: int,
    old: int,
    now: int,
    numel: int,
    out: int,
    num_threads: int,
) -> int: ...
def decode_blocks(
    isa: int,
    coding: int,
    itemsize: int,
    codes: int,
    nbytes: int,
    values: int,
    numel: int,
    num_threads: int,
) -> bool: ...
def checksum(isa: int, words: int, count: int, odd: int) -> int: ...
