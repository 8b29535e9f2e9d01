"""The compiled kernels. Private: nothing here checks what an address points to."""

from typing import Protocol

class _Update(Protocol):
    def __call__(
        self,
        isa: int,
        grad_type: int,
        out_type: int,
        items: list[int],
        scalars: tuple[float, ...],
        num_threads: int,
        more_grads: list[int] = ...,
        copies: list[int] = ...,
    ) -> None:
        """Update every item. The lock of the interpreter is released meanwhile.

        Args:
            isa: index in `available_isas`.
            grad_type: element type of the gradients, as in `_memory`.
            out_type: of the copies. 3: there is none. 4: the master weights are split.
            items: ``master, grad, *states, out, numel`` of each, one after another: addresses, and
                the number of elements. ``out`` is 0 without a copy. If the master weights are
                split, ``master`` is a bf16 parameter and ``out`` its remainder. Items of
                `adam_bfloat16` end with the stream of their random numbers.
            scalars: of the rule, as in `_scalars`.
            more_grads: with one item alone: address and type of each gradient that is added to the
                item's, in order.
            copies: with one item alone: source, target, bytes per block of elements and all bytes
                of what is copied before its elements are updated.
        """

adam: _Update  # its states: exp_avg, exp_avg_sq
adam_int8: _Update  # exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
adam_bfloat16: _Update  # exp_avg, exp_avg_sq
adagrad: _Update  # state_sum
lion: _Update  # exp_avg
sgd: _Update  # momentum_buffer
sgd_plain: _Update  # none

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

def available_isas() -> list[str]: ...
def known_isas() -> list[str]: ...
def count_up(addresses: list[int]) -> None:
    """Add 1 to the fp32 number at each address."""

def read_numbers(addresses: list[int]) -> list[float]:
    """The fp32 number at each address."""

def read_dlpack(
    capsule: object,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int, bool]:
    """Address, shape, strides, type code, bits, lanes, device type, whether it is read-only."""
