"""Copies made during an update: old values of states, or values that the update starts from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from support.kernel_cases import as_argument, copies
from support.rule_cases import UPDATES, assert_same, run

import cpu_adam
from cpu_adam import reference

CHUNK = reference.CHUNK_NUMEL
LENGTHS, LONG = [0, 1, 15, 127, 300, 2049], CHUNK + 333  # threads share LONG, in five grains
Arrays = dict[str, np.ndarray]


@pytest.fixture(params=list(UPDATES))
def update(request):
    return UPDATES[request.param]


def like(arrays: Arrays, shift: int = 0) -> Arrays:
    """Allocate arrays like ``arrays``, aligned to 64 bytes only if ``shift`` is 0."""
    made = {}
    for name, array in arrays.items():
        raw = np.full(array.nbytes + 128, 7, np.uint8)
        start = -raw.ctypes.data % 64 + shift * array.itemsize
        made[name] = raw[start : start + array.nbytes].view(array.dtype)
    return made


def states_of(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "grad"}


def pairs(sources: Arrays, targets: Arrays) -> Iterator[tuple[object, object]]:
    return ((as_argument(sources[name]), as_argument(targets[name])) for name in targets)


def test_old_values_are_kept_and_the_update_has_its_bits(isa, update):
    for numel, shift, num_threads in [*product(LENGTHS, [0, 3], [1]), (LONG, 0, 1), (LONG, 3, 3)]:
        arrays = update.make(numel)
        expected, before = copies(arrays), copies(states_of(arrays))
        kept = like(before, shift)
        run(getattr(cpu_adam, update.function), expected, **update.options)
        options = {**update.options, "num_threads": num_threads}
        copied = list(pairs(states_of(arrays), kept))
        run(getattr(cpu_adam, update.function), arrays, copies=copied, **options)
        assert_same(arrays, expected)
        for name, values in before.items():
            assert kept[name].tobytes() == values.tobytes()


def test_an_update_starts_from_what_is_copied_to_its_arrays(isa, update):
    for numel in [1, 300, 2 * CHUNK + 5]:
        sources = update.make(numel)
        before, expected = copies(sources), copies(sources)
        run(getattr(cpu_adam, update.function), expected, **update.options)
        arrays = like(sources, 1)
        arrays["grad"][...] = sources["grad"]
        copied = list(pairs(sources, states_of(arrays)))
        run(getattr(cpu_adam, update.function), arrays, copies=copied, **update.options)
        assert_same(arrays, expected)
        for name, values in before.items():
            assert sources[name].tobytes() == values.tobytes()


def test_bits_of_nan_are_copied_as_they_are(isa):
    arrays = UPDATES["adam_step"].make(64)
    bits = np.arange(64, dtype=np.uint32) + np.uint32(0x7F800001)  # signalling NaNs
    arrays["exp_avg"].view(np.uint32)[...] = bits
    kept = like({"exp_avg": arrays["exp_avg"]})
    cpu_adam.adam_step(
        **arrays, copies=[(arrays["exp_avg"], kept["exp_avg"])], **UPDATES["adam_step"].options
    )
    np.testing.assert_array_equal(kept["exp_avg"].view(np.uint32), bits)


def test_a_target_counts_as_changed_for_autograd():
    torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")
    update = UPDATES["adam_step"]
    arrays = {name: torch.from_numpy(a) for name, a in update.make(8).items()}
    target = torch.zeros(8)
    version = target._version
    cpu_adam.adam_step(**arrays, copies=[(arrays["exp_avg"], target)], **update.options)
    assert target._version == version + 1


def test_wrong_copies_are_refused_by_their_place():
    arrays = UPDATES["adam_step"].make(8)
    good, wrong = np.zeros(8, np.float32), np.zeros(7, np.float32)
    read_only = np.zeros(8, np.float32)
    read_only.flags.writeable = False
    moments = arrays["exp_avg"], arrays["exp_avg_sq"]
    for copied, error, message in [
        ([(moments[0], wrong)], ValueError, r"copies\[0\]: both must have the shape"),
        ([(moments[0], good), (wrong, wrong.copy())], ValueError, r"copies\[1\]: both must"),
        ([(moments[0], good.astype(np.float16))], TypeError, r"copies\[0\]\[1\]: dtype"),
        ([(moments[0], read_only)], ValueError, r"copies\[0\]\[1\]: is written to"),
        ([(moments[0], moments[0])], ValueError, r"copies\[0\]: source and target"),
        ([(moments[0], good), (moments[1], good)], ValueError, "overlaps"),
        ([(moments[0], arrays["grad"])], ValueError, "overlaps"),
    ]:
        before = copies(arrays)
        with pytest.raises(error, match=message):
            cpu_adam.adam_step(**arrays, copies=copied, **UPDATES["adam_step"].options)
        assert_same(arrays, before)
