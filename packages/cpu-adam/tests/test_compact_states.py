"""Adam with 8-bit and bf16 states: the bits of `cpu_adam.reference`, and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bits, copies
from rule_cases import BLOCK, assert_rule_is_reference, assert_same, make_bf16, make_int8, run

import cpu_adam
from cpu_adam import _isa, reference

MAKERS = {"adam_step_8bit": make_int8, "adam_step_bf16": make_bf16}
GRAD_DTYPES = [np.float32, np.float16, np.uint16]
LENGTHS = [0, 1, 15, 16, 17, 100, 127, 128, 129, 255, 256, 300, 1000]


@pytest.fixture(params=list(MAKERS))
def function(request):
    return request.param


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("step", [1, 2**40])
def test_each_mode_matches_the_reference(
    isa, function, adamw_mode, bias_correction, beta1, step, hyper
):
    hyper.update(beta1=beta1, step=step, weight_decay=0.1)
    arrays = MAKERS[function](200, is_split=True)
    modes = {"adamw_mode": adamw_mode, "bias_correction": bias_correction}
    assert_rule_is_reference(function, arrays, **modes, **hyper)


@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 300),
    lr=st.floats(0, 1e3),
    beta1=st.floats(0, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1e-3),
    weight_decay=st.floats(0, 10),
    step=st.integers(1, 10**6),
    grad_scale=st.floats(-1e3, 1e3),
    is_split=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_random_hyperparameters_match_the_reference(seed, numel, is_split, **hyper):
    for function, make in MAKERS.items():
        arrays = make(numel, is_split=is_split, seed=seed)
        for name in cpu_adam.available_isas():
            with _isa.use_isa(name):
                assert_rule_is_reference(function, arrays, **hyper)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("is_split", [True, False])
def test_gradients_that_are_not_finite_match_the_reference(isa, function, value, is_split, hyper):
    arrays = MAKERS[function](5 * BLOCK, is_split=is_split)
    arrays["grad"][3 * BLOCK + 7] = value
    after = assert_rule_is_reference(function, arrays, **hyper)
    if function == "adam_step_8bit":
        assert np.isnan(after["exp_avg_scale"]).tolist() == [False, False, False, True, False]
        # What is lost is seen at the next step, and only there.
        after["grad"][:] = 1
        later = assert_rule_is_reference(function, after, **hyper)
        param = later["param"]
        values = reference.bfloat16_to_float32(param) if is_split else param
        assert (np.isnan(values).reshape(5, -1).any(axis=1) == [0, 0, 0, 1, 0]).all()
        assert np.isnan(values[3 * BLOCK : 4 * BLOCK]).all()


def test_special_numbers_match_the_reference(isa, function, hyper):
    special = np.array([0, -0.0, 1e-45, -1e-39, 1.2e-38, 1e-30, 1e-20, 1, 3e38, -3e38], np.float32)
    for is_split in (True, False):
        arrays = MAKERS[function](1000, is_split=is_split)
        rng = np.random.default_rng(1)
        arrays["grad"] = rng.choice(special, 1000)
        master = rng.choice(special, 1000)
        if is_split:
            arrays["param"], arrays["remainder"] = reference.split_master(master)
        else:
            arrays["param"] = master
        assert_rule_is_reference(function, arrays, **hyper)
        tiny = {**arrays, "grad": np.full(1000, 1e-32, np.float32)}
        assert_rule_is_reference(function, tiny, **hyper)


class TestSplitMaster:
    def masters(self):
        """Every upper half with the lower halves where rounding changes, and random ones."""
        upper = np.arange(2**16, dtype=np.uint32) << 16
        lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xCDEF]
        return np.concatenate([upper + np.uint32(half) for half in lower]).view(np.float32)

    def test_the_parameter_is_the_nearest_and_of_two_the_greater(self):
        masters = self.masters()
        param, _ = reference.split_master(masters)
        even = reference.float32_to_bfloat16(masters)
        bits = masters.view(np.uint32)
        is_other = ((bits & 0xFFFF) == 0x8000) & ((bits >> 16 & 1) == 0) & ~np.isnan(masters)
        assert is_other.any()
        assert_same_bits(param[~is_other], even[~is_other])
        assert_same_bits(param[is_other], even[is_other] + np.uint16(1))

    def test_the_master_comes_back(self):
        masters = self.masters()
        back = reference.combine_master(*reference.split_master(masters))
        is_nan, is_zero = np.isnan(masters), np.abs(masters) < 2.0**-134
        assert np.isnan(back[is_nan]).all()
        assert_same_bits(back[~is_nan & ~is_zero], masters[~is_nan & ~is_zero])
        assert_same_bits(back[is_zero], np.copysign(np.float32(0), masters[is_zero]))

    @pytest.mark.parametrize(("make", "rule"), [(make_bf16, "bf16"), (make_int8, "8bit")])
    def test_a_parameter_set_to_zero_is_updated_from_zero(self, isa, make, rule, hyper):
        arrays = make(300, is_split=True)
        assert (arrays["remainder"] < 0).any()
        arrays["param"] = np.resize([0x0000, 0x8000], 300).astype(np.uint16)
        fresh = {**copies(arrays), "remainder": np.zeros(300, np.int16)}
        after = assert_rule_is_reference(f"adam_step_{rule}", arrays, **hyper)
        again = assert_rule_is_reference(f"adam_step_{rule}", fresh, **hyper)
        assert np.isfinite(reference.bfloat16_to_float32(after["param"])).all()
        assert_same(after, again)

    @pytest.mark.parametrize("is_zero_lr", [True, False])
    def test_the_kernel_stores_every_master_like_the_reference(self, isa, is_zero_lr, hyper):
        # With a step the results are other masters anyway: a seventh of them will do.
        masters = self.masters()[:: 1 if is_zero_lr else 7]
        param, remainder = reference.split_master(masters)
        arrays = {**make_bf16(param.size, is_split=True), "param": param, "remainder": remainder}
        if is_zero_lr:
            hyper.update(lr=0.0, eps=1.0)
            arrays["grad"] = np.zeros(param.size, np.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                arrays[name] = np.zeros(param.size, np.uint16)
        after = assert_rule_is_reference("adam_step_bf16", arrays, **hyper)
        if is_zero_lr:
            # An infinite weight times no weight decay is NaN, and NaNs differ; a weight whose
            # parameter is zero is zero; all others stay.
            is_kept = np.isfinite(masters) & ((param & 0x7FFF) > 0)
            assert_same(
                {name: array[is_kept] for name, array in after.items()},
                {name: array[is_kept] for name, array in arrays.items()},
            )


class TestQuantization:
    def test_codes_are_exact_at_both_ends_of_a_block(self):
        m = np.zeros(BLOCK, np.float32)
        m[:3] = [-3.0, 3.0, 1.5]
        codes, root_codes, scale, root_scale = reference.quantize_moments(m, np.abs(m))
        assert codes[:2].tolist() == [-127, 127]
        assert root_codes[:2].tolist() == [255, 255]
        np.testing.assert_allclose(reference.dequantize_exp_avg(codes, scale)[:2], [-3, 3], 1e-6)
        back = reference.dequantize_exp_avg_sq_root(root_codes, root_scale)
        np.testing.assert_allclose(back[:2], [3, 3], 1e-6)
        assert not codes[3:].any()
        assert (back[3:] > 0).all()  # a denominator never vanishes

    def test_small_roots_survive_beside_large_ones(self):
        root = np.float32(10.0) ** -np.linspace(0, 8, BLOCK, dtype=np.float32)
        _, codes, _, scale = reference.quantize_moments(root, root)
        back = reference.dequantize_exp_avg_sq_root(codes, scale)
        is_large = root > 2.0**-15
        assert (np.abs(back / root - 1)[is_large] <= 1 / 32).all()
        assert (back[~is_large] > 2.0**-16).all()  # none is lost: a zero would make updates explode

    def test_small_averages_survive_beside_large_ones(self):
        average = np.float32(10.0) ** -np.linspace(0, 8, BLOCK, dtype=np.float32)
        codes, _, scale, _ = reference.quantize_moments(average, average)
        back = reference.dequantize_exp_avg(codes, scale)
        is_large = average > 1e-2
        assert (np.abs(back / average - 1)[is_large] < 0.09).all()  # half a code of about 12
        assert (codes[average > 1e-4] > 0).all()

    def test_every_code_survives_a_round_trip(self):
        m_codes = np.resize(np.arange(-127, 128), 2 * BLOCK).astype(np.int8)
        root_codes = np.arange(2 * BLOCK).astype(np.uint8)
        m_codes[[0, BLOCK]], root_codes[[0, BLOCK]] = 127, 255
        scales = np.array([1e-3, 7.0], np.float32)
        m = reference.dequantize_exp_avg(m_codes, scales)
        root = reference.dequantize_exp_avg_sq_root(root_codes, scales)
        again = reference.quantize_moments(m, root)
        np.testing.assert_array_equal(again[0], m_codes)
        np.testing.assert_array_equal(again[1], root_codes)

    def test_a_block_of_tiny_values_is_zero(self):
        tiny = np.full(BLOCK, 1e-31, np.float32)
        for array in reference.quantize_moments(tiny, tiny):
            assert not array.any()

    def test_a_state_takes_less_than_6_1_bytes_per_element(self):
        numel = 64 * BLOCK
        arrays = make_int8(numel, is_split=True)
        kept = sum(array.nbytes for name, array in arrays.items() if name != "grad")
        assert kept / numel == 6.0625


class TestStochasticRounding:
    def test_it_rounds_to_a_neighbour_and_right_on_average(self):
        numel = 1 << 16
        for value in (1.0 + 2**-9, -(1.0 + 3 * 2**-10), 1e-40, 3.14159e5):
            values = np.full(numel, value, np.float32)
            random = reference.random_bits(numel, reference.random_key(3, 1))
            for bits in (random & 0xFFFF, random >> 16):
                rounded = reference.bfloat16_to_float32(
                    reference.round_stochastically(values, bits.astype(np.uint32))
                ).astype(np.float64)
                below, above = rounded.min(), rounded.max()
                assert below <= np.float32(value) <= above
                tolerance = 4 * (above - below) / 2 / np.sqrt(numel)
                assert abs(rounded.mean() - np.float32(value)) <= tolerance

    def test_bits_are_even_and_differ_between_steps_seeds_and_streams(self):
        numel = 1 << 16
        draws = [
            reference.random_bits(numel, reference.random_key(seed, step), stream)
            for seed, step, stream in [
                (0, 1, 0),
                (0, 2, 0),
                (1, 1, 0),
                (0, 1, 1),
                (2**64 - 1, 9, 3),
            ]
        ]
        for draw in draws:
            for bit in range(32):
                assert abs(((draw >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(numel)
        for one in range(len(draws)):
            for other in range(one):
                same = (draws[one] & 0xFF) == (draws[other] & 0xFF)
                assert abs(same.mean() - 1 / 256) < 5 / 16 / np.sqrt(numel)

    def test_the_seed_and_the_step_decide(self, hyper):
        first, second, third = (make_bf16(500, is_split=True) for _ in range(3))
        run(cpu_adam.adam_step_bf16, first, seed=5, **hyper)
        run(cpu_adam.adam_step_bf16, second, seed=5, **hyper)
        run(cpu_adam.adam_step_bf16, third, seed=6, **hyper)
        assert_same(first, second)
        assert (first["exp_avg_sq"] != third["exp_avg_sq"]).any()

    def test_a_step_may_be_an_integer_of_numpy(self, hyper):
        first, second = (make_bf16(500, is_split=True) for _ in range(2))
        run(cpu_adam.adam_step_bf16, first, **hyper)
        run(cpu_adam.adam_step_bf16, second, **{**hyper, "step": np.int8(hyper["step"])})
        assert_same(first, second)

    @pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
    def test_every_seed_matches_the_reference(self, isa, seed, hyper):
        arrays = make_bf16(300, is_split=True)
        assert_rule_is_reference("adam_step_bf16", arrays, seed=seed, **hyper)


@pytest.mark.parametrize(
    ("function", "tolerance"), [("adam_step_8bit", 0.1), ("adam_step_bf16", 0.03)]
)
def test_many_steps_stay_near_adam_with_fp32_states(function, tolerance, hyper):
    numel, steps = 4096, 100
    rng = np.random.default_rng(0)
    magnitudes = 10.0 ** rng.uniform(-3, 0, numel)
    exact = {name: np.zeros(numel, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
    compact = MAKERS[function](numel, is_split=True)
    for array in compact.values():
        array[...] = 0
    hyper.update(weight_decay=0.0)
    for step in range(1, steps + 1):
        grad = ((rng.standard_normal(numel) + 0.5) * magnitudes).astype(np.float32)
        hyper["step"] = step
        cpu_adam.adam_step(grad=grad, **exact, **hyper)
        compact["grad"] = grad
        run(getattr(cpu_adam, function), compact, **hyper)
    moved = reference.combine_master(compact["param"], compact["remainder"])
    error = np.linalg.norm(moved - exact["master"]) / np.linalg.norm(exact["master"])
    assert error < tolerance


class TestArguments:
    def refuse(self, function, arrays, hyper, error, match, **changes):
        before = copies(arrays)
        with pytest.raises(error, match=match):
            run(getattr(cpu_adam, function), {**arrays, **changes}, **hyper)
        assert_same(arrays, before)

    def test_wrong_dtypes_and_shapes_are_refused_by_name(self, function, hyper):
        arrays = MAKERS[function](300, is_split=True)
        for name, array in arrays.items():
            for wrong in (np.zeros(array.shape, np.float64), np.zeros(array.shape, np.int32)):
                self.refuse(function, arrays, hyper, TypeError, f"^{name}: dtype", **{name: wrong})
            if name != "param":
                wrong = np.zeros(array.size + 1, array.dtype)
                self.refuse(
                    function, arrays, hyper, ValueError, f"^{name}: must have", **{name: wrong}
                )
            none = {name: np.float64(3.0)}
            self.refuse(function, arrays, hyper, TypeError, f"^{name}: expected", **none)

    def test_a_scale_of_another_rank_is_refused(self, hyper):
        arrays = make_int8(300, is_split=True)
        wrong = {"exp_avg_scale": np.zeros((3, 1), np.float32)}
        self.refuse("adam_step_8bit", arrays, hyper, ValueError, "^exp_avg_scale: ", **wrong)

    def test_the_master_is_either_split_or_fp32(self, function, hyper):
        split, whole = (MAKERS[function](20, is_split=value) for value in (True, False))
        no_remainder = {name: array for name, array in split.items() if name != "remainder"}
        self.refuse(function, no_remainder, hyper, ValueError, "^remainder: .* needs one")
        extra = {"remainder": np.zeros(20, np.int16)}
        self.refuse(function, whole, hyper, ValueError, "^remainder: an fp32 param", **extra)
        extra = {"out": np.zeros(20, np.float32)}
        self.refuse(function, split, hyper, ValueError, "^out: a bf16 param", **extra)

    def test_overlapping_and_read_only_memory_are_refused(self, function, hyper):
        arrays = MAKERS[function](256, is_split=False)
        shared = arrays["param"].view(arrays["exp_avg"].dtype)[:256]
        self.refuse(function, arrays, hyper, ValueError, "their memory overlaps", exp_avg=shared)
        frozen = arrays["param"].copy()
        frozen.flags.writeable = False
        self.refuse(function, arrays, hyper, ValueError, "^param: .*read-only", param=frozen)

    @pytest.mark.parametrize("value", [-1, 2**64])
    def test_a_seed_out_of_range(self, value, hyper):
        arrays = make_bf16(20, is_split=True)
        self.refuse("adam_step_bf16", arrays, {**hyper, "seed": value}, ValueError, "^seed: ")

    def test_a_seed_that_is_no_integer(self, hyper):
        arrays = make_bf16(20, is_split=True)
        self.refuse("adam_step_bf16", arrays, {**hyper, "seed": 0.5}, TypeError, "^seed: ")

    @pytest.mark.parametrize("name", ["lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"])
    def test_hyperparameters_are_checked(self, function, name, hyper):
        arrays = MAKERS[function](20, is_split=True)
        wrong = {**hyper, name: float("nan")}
        self.refuse(function, arrays, wrong, ValueError, f"^{name}: ")
