"""Compiled kernels. Private, because addresses are not checked."""

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
        """Update every item. Releases the GIL.

        Args:
            isa: index in `available_isas`.
            grad_type: element type of the gradients, as in `_memory`.
            out_type: element type of ``out``. 3: no ``out``. 4: the master weights are split.
            items: ``master, grad, *states, out, numel`` of each item, concatenated: addresses, and
                the number of elements. ``out`` is 0 if there is none. If the master weights are
                split, ``master`` is a bf16 parameter and ``out`` its remainder. Items of
                `adam_bfloat16` end with the stream of their random numbers.
            scalars: scalars of the update rule, as in `_scalars`.
            more_grads: only with one item: address and type of each gradient that is added to the
                item's gradient, in order.
            copies: only with one item: source, target, bytes per block of elements, and total
                bytes of each copy. Elements are copied just before they are updated.
        """

adam: _Update  # states: exp_avg, exp_avg_sq
adam_int8: _Update  # states: exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
adam_bfloat16: _Update  # states: exp_avg, exp_avg_sq
adagrad: _Update  # state: state_sum
lion: _Update  # state: exp_avg
sgd: _Update  # state: momentum_buffer
sgd_plain: _Update  # no state

def sum_of_squares(
    isa: int,
    grad_type: int,
    address: int,
    numel: int,
    num_threads: int,
    more_grads: list[int] = ...,
) -> float:
    """Return the sum of squares in double precision. ``more_grads`` is as in `adam`."""

BLOCK_NUMEL: int

def available_isas() -> list[str]: ...
def known_isas() -> list[str]: ...
def count_up(addresses: list[int]) -> None:
    """Add 1 to the fp32 number at each address."""

def read_numbers(addresses: list[int]) -> list[float]:
    """Return the fp32 number at each address."""

def read_dlpack(
    capsule: object,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int, bool]:
    """Return address, shape, strides, type code, bits, lanes, device type, is_read_only."""
