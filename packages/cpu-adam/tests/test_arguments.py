"""A wrong argument is refused by name, before anything is touched."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_cases import Bfloat16, assert_same_bits, copies, make_arrays, make_capsule

import cpu_adam

NAMES = ["master", "grad", "exp_avg", "exp_avg_sq", "out"]
FLOAT32_ONLY = ["master", "exp_avg", "exp_avg_sq"]
WRITTEN = ["master", "exp_avg", "exp_avg_sq", "out"]


@pytest.fixture
def arrays():
    return {**make_arrays(20), "out": np.zeros(20, np.float32)}


def refuse(arrays, hyper, error, match, **changes):
    """The call raises, and no array has changed."""
    arguments = {**arrays, **hyper, **changes}
    before = copies(arrays)
    with pytest.raises(error, match=match):
        cpu_adam.adam_step(**arguments)
    for name, array in arrays.items():
        assert_same_bits(array, before[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [3.0, "text", [1.0] * 20, object(), b"bytes"])
def test_something_that_is_no_array(arrays, hyper, name, value):
    # A list as a gradient is several gradients.
    place = r"\[0\]" if name == "grad" and isinstance(value, list) else ""
    message = f"^{name}{place}: expected a .*, a NumPy array"
    refuse(arrays, hyper, TypeError, message, **{name: value})


@pytest.mark.parametrize("name", FLOAT32_ONLY)
def test_none_for_a_required_array(arrays, hyper, name):
    refuse(arrays, hyper, TypeError, f"^{name}: expected", **{name: None})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["f8", "i4", "c8", "u2", "?", ">f4", "O"])
def test_wrong_dtype(arrays, hyper, name, dtype):
    refuse(arrays, hyper, TypeError, f"^{name}: dtype", **{name: np.zeros(20, dtype)})


@pytest.mark.parametrize("name", FLOAT32_ONLY)
def test_16_bit_state(arrays, hyper, name):
    wrong = np.zeros(20, np.float16)
    refuse(arrays, hyper, TypeError, f"^{name}: dtype must be float32; got", **{name: wrong})
    refuse(arrays, hyper, TypeError, f"^{name}: dtype", **{name: Bfloat16(np.zeros(20, "u2"))})


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("shape", [(19,), (21,), (0,), (), (4, 5), (20, 1)])
def test_wrong_shape(arrays, hyper, name, shape):
    wrong = np.zeros(shape, np.float32)
    refuse(arrays, hyper, ValueError, f"^{name}: must have master's shape", **{name: wrong})


@pytest.mark.parametrize("name", NAMES)
def test_gaps_in_memory(arrays, hyper, name):
    wrong = np.zeros(40, np.float32)[::2]
    refuse(arrays, hyper, ValueError, f"^{name}: must be contiguous", **{name: wrong})


@pytest.mark.parametrize("name", WRITTEN)
def test_read_only_memory_that_is_written(arrays, hyper, name):
    wrong = np.zeros(20, np.float32)
    wrong.flags.writeable = False
    refuse(arrays, hyper, ValueError, f"^{name}: .*read-only", **{name: wrong})


def test_a_read_only_gradient_is_fine(arrays, hyper):
    arrays["grad"].flags.writeable = False
    cpu_adam.adam_step(**arrays, **hyper)


@pytest.mark.parametrize("first", WRITTEN)
@pytest.mark.parametrize("second", NAMES)
@pytest.mark.parametrize("shift", [0, 1, 19])
def test_overlapping_memory(arrays, hyper, first, second, shift):
    if first == second:
        return
    memory = np.zeros(40, np.float32)
    changes = {first: memory[:20], second: memory[shift : shift + 20]}
    with pytest.raises(ValueError, match="their memory overlaps") as caught:
        cpu_adam.adam_step(**{**arrays, **changes, **hyper})
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_neighbouring_memory_is_fine(hyper):
    memory = np.zeros(100, np.float32)
    cpu_adam.adam_step(*memory[:80].reshape(4, 20), out=memory[80:], **hyper)


@pytest.mark.parametrize("name", ["lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"])
class TestHyperparameters:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
    def test_not_finite(self, arrays, hyper, name, value):
        refuse(arrays, hyper, ValueError, f"^{name}: ", **{name: value})

    @pytest.mark.parametrize("value", ["0.1", None, [0.1], b"1", 1j])
    def test_no_number(self, arrays, hyper, name, value):
        refuse(arrays, hyper, TypeError, f"^{name}: expected a number", **{name: value})

    def test_out_of_range(self, arrays, hyper, name):
        value = 1e39 if name == "grad_scale" else -1e-3
        refuse(arrays, hyper, ValueError, f"^{name}: ", **{name: value})


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_beta_of_one(arrays, hyper, name):
    refuse(arrays, hyper, ValueError, f"^{name}: must be in", **{name: 1.0})


def test_products_that_fp32_cannot_hold(arrays, hyper):
    refuse(arrays, hyper, ValueError, "^lr: ", lr=1e38, beta1=0.9999, step=1)
    refuse(arrays, hyper, ValueError, "^weight_decay: ", lr=1e30, weight_decay=1e30, step=9999)


@pytest.mark.parametrize("step", [0, -1])
def test_step_below_one(arrays, hyper, step):
    refuse(arrays, hyper, ValueError, "^step: counts from 1", step=step)


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_step_that_is_no_integer(arrays, hyper, step):
    refuse(arrays, hyper, TypeError, "^step: expected an integer", step=step)


def test_num_threads(arrays, hyper):
    refuse(arrays, hyper, ValueError, "^num_threads: must be at least 1", num_threads=0)
    refuse(arrays, hyper, TypeError, "^num_threads: expected", num_threads=1.5)
    cpu_adam.adam_step(**arrays, **hyper, num_threads=10**30)


class Exporter:
    """An object with DLPack, of 0.x (no arguments) or 1.x."""

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
            cpu_adam.adam_step(
                **{
                    name: Exporter(
                        lambda array=array, version=version: make_capsule(
                            array, code=2, version=version
                        ),
                        is_old=is_old,
                    )
                    for name, array in actual.items()
                },
                **hyper,
            )
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
