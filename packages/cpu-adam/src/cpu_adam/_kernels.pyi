"""The compiled kernels. Private: nothing here checks what an address points to."""

def available_isas() -> list[str]: ...
def known_isas() -> list[str]: ...
def adam(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item: ``(master, grad, exp_avg, exp_avg_sq, out, numel)``, one after another.

    Addresses as integers (``out`` is 0 for type 3, no copy). ``more_grads``, with one item alone:
    address and type of each gradient that is added to the item's, in order. ``copies``, likewise:
    source, target, bytes per block of elements and all bytes of what is copied before its elements
    are updated. The lock of the interpreter is released meanwhile.
    """

def adam_int8(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item, with 8-bit states.

    ``(master, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, out, numel)``, one after
    another. ``out_type`` 4: master is a bf16 parameter, out its remainder; in `adam` as well.
    """

def adam_bfloat16(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    key: int,
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item, with bf16 states: as in `adam`, and the stream last."""

def adagrad(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item: ``(master, grad, state_sum, out, numel)``, one after another."""

def lion(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item: ``(master, grad, exp_avg, out, numel)``, one after another."""

def sgd(
    isa: int,
    grad_type: int,
    out_type: int,
    items: list[int],
    scalars: tuple[float, ...],
    has_momentum: bool,
    is_nesterov: bool,
    num_threads: int,
    more_grads: list[int] = ...,
    copies: list[int] = ...,
) -> None:
    """Update every item: ``(master, grad, [momentum_buffer,] out, numel)``, one after another."""

def sum_of_squares(
    isa: int,
    grad_type: int,
    address: int,
    numel: int,
    num_threads: int,
    more_grads: list[int] = ...,
) -> float:
    """The sum of the squares of all elements, in double precision; ``more_grads`` as in `adam`."""

BLOCK_NUMEL: int

def count_up(addresses: list[int]) -> None:
    """Add 1 to the fp32 number at each address."""

def read_numbers(addresses: list[int]) -> list[float]:
    """The fp32 number at each address."""

def read_dlpack(
    capsule: object,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int, bool]:
    """Address, shape, strides, type code, bits, lanes, device type, whether it is read-only."""
