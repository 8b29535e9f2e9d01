"""Adam with 8-bit and bf16 states: bit-identical to `cpu_adam.reference`, and precise enough."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_cases import assert_same_bits, copies
from support.rule_cases import (
    BLOCK,
    assert_rule_is_reference,
    assert_same,
    make_bf16,
    make_int8,
    run,
)

import cpu_adam
from cpu_adam import reference


class TestSplitMaster:
    def masters(self):
        """Return masters with every upper half and 8 lower halves, of which 0x8000 is a tie."""
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
        # Test all masters where the step keeps them, and every seventh where it changes them.
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
            # An infinite weight times ``lr * weight_decay`` (0) is NaN, and NaNs may differ. A zero
            # parameter gives a zero weight. All other weights must stay the same.
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
        assert (back[3:] > 0).all()  # the decoded denominator never becomes zero

    def test_small_roots_survive_beside_large_ones(self):
        root = np.float32(10.0) ** -np.linspace(0, 8, BLOCK, dtype=np.float32)
        _, codes, _, scale = reference.quantize_moments(root, root)
        back = reference.dequantize_exp_avg_sq_root(codes, scale)
        is_large = root > 2.0**-15
        assert (np.abs(back / root - 1)[is_large] <= 1 / 32).all()
        assert (back[~is_large] > 2.0**-16).all()  # a zero root would make updates explode

    def test_small_averages_survive_beside_large_ones(self):
        average = np.float32(10.0) ** -np.linspace(0, 8, BLOCK, dtype=np.float32)
        codes, _, scale, _ = reference.quantize_moments(average, average)
        back = reference.dequantize_exp_avg(codes, scale)
        is_large = average > 1e-2
        # The bound is half the spacing of the codes around code 12.
        assert (np.abs(back / average - 1)[is_large] < 0.09).all()
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
        keys = [(0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 1, 1), (2**64 - 1, 9, 3)]
        draws = [
            reference.random_bits(numel, reference.random_key(seed, step), stream)
            for seed, step, stream in keys
        ]
        for draw in draws:
            for bit in range(32):
                assert abs(((draw >> bit) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(numel)
        for one in range(len(draws)):
            for other in range(one):
                same = (draws[one] & 0xFF) == (draws[other] & 0xFF)
                assert abs(same.mean() - 1 / 256) < 5 / 16 / np.sqrt(numel)

    def test_the_seed_decides_and_a_step_may_be_an_integer_of_numpy(self, hyper):
        first, second, third = (make_bf16(500, is_split=True) for _ in range(3))
        run(cpu_adam.adam_step_bf16, first, seed=5, **hyper)
        run(cpu_adam.adam_step_bf16, second, seed=5, **{**hyper, "step": np.int8(hyper["step"])})
        run(cpu_adam.adam_step_bf16, third, seed=6, **hyper)
        assert_same(first, second)
        assert (first["exp_avg_sq"] != third["exp_avg_sq"]).any()
