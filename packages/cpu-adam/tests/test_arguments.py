"""Wrong arguments raise an error that names them, and no array changes."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_cases import (
    Bfloat16,
    as_argument,
    assert_same_bits,
    copies,
    make_arrays,
    make_capsule,
)
from support.rule_cases import UPDATES, assert_same

import cpu_adam

NUMEL = 300  # several blocks of 8-bit moments
WRONG_DTYPES = ("f8", "i4", "c8", "u2", "?", ">f4", "O")
OPTIONAL = ("out", "remainder")
NOT_FINITE = (float("nan"), float("inf"), -float("inf"), 10**400)


@pytest.fixture(params=list(UPDATES))
def update(request):
    return UPDATES[request.param]


@pytest.fixture
def arrays():
    return {**make_arrays(20), "out": np.zeros(20, np.float32)}


def arrays_of(update):
    arrays = update.make(NUMEL)
    return {**arrays, "out": np.zeros(NUMEL, np.float32)} if update.has_out else arrays


def refuse_update(update, error, match, *, arrays=None, **changes):
    """Check that the call raises and that no array changes. Return the error message."""
    arrays = arrays_of(update) if arrays is None else arrays
    arguments = {name: as_argument(array) for name, array in arrays.items()}
    before = copies(arrays)
    with pytest.raises(error, match=match) as caught:
        getattr(cpu_adam, update.function)(**{**arguments, **update.options, **changes})
    assert_same(arrays, before)
    return str(caught.value)


def refuse(arrays, hyper, error, match, **changes):
    refuse_update(UPDATES["adam_step"], error, match, arrays=arrays, **hyper | changes)


def test_an_argument_that_is_no_array_of_its_types_is_refused(update):
    for name, array in arrays_of(update).items():
        for wrong in (3.0, np.float64(3.0), "text", [1.0] * NUMEL, object(), b"bytes"):
            # a list as ``grad`` means several gradients
            place = r"\[0\]" if name == "grad" and isinstance(wrong, list) else ""
            refuse_update(update, TypeError, f"^{name}{place}: expected a", **{name: wrong})
        if name not in OPTIONAL:
            refuse_update(update, TypeError, f"^{name}: expected", **{name: None})
        others = [np.zeros(array.shape, dtype) for dtype in WRONG_DTYPES]
        if name not in ("grad", "out", "param"):  # no other argument accepts fp16
            others.append(np.zeros(array.shape, np.float16))
            if array.dtype != np.uint16:
                others.append(Bfloat16(np.zeros(array.shape, np.uint16)))
        for wrong in others:
            refuse_update(update, TypeError, f"^{name}: dtype", **{name: wrong})


def test_an_array_of_another_shape_or_layout_is_refused(update):
    for place, (name, array) in enumerate(arrays_of(update).items()):
        for shape in [(299,), (301,), (0,), (), (15, 20), (300, 1), (3, 1)] if place else []:
            wrong = as_argument(np.zeros(shape, array.dtype))
            refuse_update(update, ValueError, f"^{name}: must have", **{name: wrong})
        if array.dtype == np.uint16:
            continue  # Bfloat16 has no strides and flags
        gaps, frozen = np.zeros(2 * array.size, array.dtype)[::2], array.copy()
        refuse_update(update, ValueError, f"^{name}: must be contiguous", **{name: gaps})
        frozen.flags.writeable = False
        if name == "grad":
            arguments = {n: as_argument(a) for n, a in arrays_of(update).items()}
            getattr(cpu_adam, update.function)(**{**arguments, "grad": frozen, **update.options})
        else:
            refuse_update(update, ValueError, f"^{name}: .*read-only", **{name: frozen})


def test_memory_that_is_written_may_not_overlap(update):
    arrays = arrays_of(update)
    for first, one in arrays.items():
        for second, other in arrays.items():
            for offset in (0, one.nbytes - one.itemsize):
                if first == "grad" or first == second:
                    continue
                memory = np.zeros(8 * NUMEL, np.uint8)
                views = {
                    first: memory[: one.nbytes].view(one.dtype),
                    second: memory[offset : offset + other.nbytes].view(other.dtype),
                }
                changes = {name: as_argument(view) for name, view in views.items()}
                said = refuse_update(update, ValueError, "their memory overlaps", **changes)
                assert first in said
                assert second in said


def test_neighbouring_memory_is_fine(hyper):
    memory = np.zeros(100, np.float32)
    cpu_adam.adam_step(*memory[:80].reshape(4, 20), out=memory[80:], **hyper)


def test_a_number_that_is_not_finite_none_or_out_of_range_is_refused(update):
    for name in {*update.options, "grad_scale"} - {"step"}:
        out_of_range = 1e39 if name in ("grad_scale", "dampening") else -1e-3
        for wrong in (*NOT_FINITE, 1e39, out_of_range):
            refuse_update(update, ValueError, f"^{name}: ", **{name: wrong})
        for wrong in ("0.1", None, [0.1], b"1", 1j):
            refuse_update(update, TypeError, f"^{name}: expected a number", **{name: wrong})
    refuse_update(update, ValueError, "^num_threads: must be at least 1", num_threads=0)
    refuse_update(update, TypeError, "^num_threads: expected", num_threads=1.5)
    if "step" in update.options:
        for step in (0, -1):
            refuse_update(update, ValueError, "^step: counts from 1", step=step)
        for step in (1.0, "1", None):
            refuse_update(update, TypeError, "^step: expected an integer", step=step)
    for name in {"beta1", "beta2"} & set(update.options):
        refuse_update(update, ValueError, f"^{name}: must be in", **{name: 1.0})


def test_as_many_threads_as_one_likes(arrays, hyper):
    cpu_adam.adam_step(**arrays, **hyper, num_threads=10**30)


def test_products_that_fp32_cannot_hold(arrays, hyper):
    refuse(arrays, hyper, ValueError, "^lr: ", lr=1e38, beta1=0.9999, step=1)
    refuse(arrays, hyper, ValueError, "^weight_decay: ", lr=1e30, weight_decay=1e30, step=9999)


@pytest.mark.parametrize("function", ["adam_step_8bit", "adam_step_bf16"])
def test_a_compact_master_is_either_split_or_fp32(function):
    split, whole = (UPDATES[f"{function}, {kind} master"] for kind in ("split", "fp32"))
    arrays = arrays_of(split)
    del arrays["remainder"]
    refuse_update(split, ValueError, "^remainder: .* needs one", arrays=arrays)
    extra = {"remainder": np.zeros(NUMEL, np.int16)}
    refuse_update(whole, ValueError, "^remainder: an fp32 param", **extra)
    refuse_update(split, ValueError, "^out: a bf16 param", out=np.zeros(NUMEL, np.float32))


def test_a_seed_that_makes_no_sense_is_refused():
    for seed, error in ((-1, ValueError), (2**64, ValueError), (0.5, TypeError)):
        refuse_update(UPDATES["adam_step_bf16, split master"], error, "^seed: ", seed=seed)


def test_what_sgd_and_adagrad_cannot_do():
    sgd = UPDATES["sgd_step"]
    refuse_update(sgd, ValueError, "^momentum_buffer: has no use", momentum=0.0)
    refuse_update(sgd, ValueError, "^nesterov: ", nesterov=True)
    refuse_update(UPDATES["adagrad_step"], ValueError, "^eps: ", eps=-1)


class Exporter:
    """Object with the DLPack protocol, version 0.x (without arguments) or 1.x."""

    def __init__(self, make, *, device=1, is_old=False):
        self.make, self.device = make, device
        if is_old:
            self.__class__ = OldExporter

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.make()


class OldExporter(Exporter):
    def __dlpack__(self, stream=None):
        return self.make()


class TestDLPack:
    def test_old_and_new_exporters_are_read(self, arrays, hyper):
        expected = copies(arrays)
        cpu_adam.adam_step(**expected, **hyper)
        for is_old in (False, True):
            version = None if is_old else (1, 1)
            actual = copies(arrays)
            exported = {
                name: Exporter(
                    lambda a=array, v=version: make_capsule(a, code=2, version=v), is_old=is_old
                )
                for name, array in actual.items()
            }
            cpu_adam.adam_step(**exported, **hyper)
            for name, array in actual.items():
                assert_same_bits(array, expected[name])

    def test_device_memory_is_refused(self, arrays, hyper):
        wrong = Exporter(lambda: None, device=2)
        refuse(arrays, hyper, ValueError, "^grad: must be in host memory", grad=wrong)

    def test_other_types_are_refused(self, arrays, hyper):
        grad = arrays["grad"]
        for code, bits, lanes in [(0, 32, 1), (2, 64, 1), (2, 32, 4), (4, 32, 1), (99, 16, 1)]:
            wrong = Exporter(
                lambda c=code, b=bits, n=lanes: make_capsule(grad, code=c, bits=b, lanes=n)
            )
            refuse(arrays, hyper, TypeError, "^grad: dtype", grad=wrong)

    def test_strides_and_read_only_flags_are_respected(self, arrays, hyper):
        memory = np.zeros(40, np.float32)
        gaps = Exporter(lambda: make_capsule(memory, code=2, shape=(20,), strides=(2,)))
        refuse(arrays, hyper, ValueError, "^grad: must be contiguous", grad=gaps)
        dense = Exporter(lambda: make_capsule(memory, code=2, shape=(20,), strides=(1,)))
        cpu_adam.adam_step(**{**arrays, "grad": dense}, **hyper)
        locked = Exporter(
            lambda: make_capsule(memory[:20], code=2, version=(1, 0), is_read_only=True)
        )
        refuse(arrays, hyper, ValueError, "^out: .*read-only", out=locked)
        cpu_adam.adam_step(**{**arrays, "grad": locked}, **hyper)

    def test_used_foreign_and_future_capsules_are_refused(self, arrays, hyper):
        grad = arrays["grad"]
        used = Exporter(lambda: make_capsule(grad, code=2, name=b"used_dltensor"))
        refuse(arrays, hyper, TypeError, "^grad: .*not a DLPack capsule", grad=used)
        future = Exporter(lambda: make_capsule(grad, code=2, version=(2, 0)))
        refuse(arrays, hyper, TypeError, "^grad: .*major version", grad=future)
        negative = Exporter(lambda: make_capsule(grad, code=2, shape=(-4, -5)))
        refuse(arrays, hyper, ValueError, "^grad: its __dlpack__ gave shape", grad=negative)
        nowhere = Exporter(lambda: make_capsule(grad, code=2, address=0))
        refuse(arrays, hyper, ValueError, "^grad: its __dlpack__ gave .* 0x0", grad=nowhere)
        nonsense = Exporter(lambda: "no capsule")
        refuse(arrays, hyper, TypeError, "^grad: .*unusable", grad=nonsense)


def test_any_shape_is_one_array(hyper):
    flat = make_arrays(60)
    cube = {name: array.reshape(3, 4, 5).copy() for name, array in flat.items()}
    cpu_adam.adam_step(**flat, **hyper)
    cpu_adam.adam_step(**cube, **hyper)
    for name in flat:
        assert_same_bits(cube[name].reshape(-1), flat[name])
