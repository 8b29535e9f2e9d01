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
) -> None:
    """Update every item: ``(master, grad, exp_avg, exp_avg_sq, out, numel)``, one after another.

    Addresses as integers (``out`` is 0 for type 3, no copy). The lock of the interpreter is
    released meanwhile.
    """

def count_up(addresses: list[int]) -> None:
    """Add 1 to the fp32 number at each address."""

def read_dlpack(
    capsule: object,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int, bool]:
    """Address, shape, strides, type code, bits, lanes, device type, whether it is read-only."""
