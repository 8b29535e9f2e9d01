"""`CPUAdam` with 8-bit and bf16 moments, and `convert_state`."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

from support.torch_cases import (  # noqa: E402
    assert_states_equal,
    bf16_bits,
    make_params,
    resume,
    save,
    set_grads,
    train,
)

import cpu_adam  # noqa: E402
from cpu_adam import CPUAdam, convert_state, reference  # noqa: E402

COMPACT = ["int8", "bfloat16"]
SIZES = [(40,), (3, 5), (), (17, 19)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def state_bytes(optimizer, param):
    state = optimizer.state[param]
    return sum(value.nbytes for name, value in state.items() if name != "step")


@pytest.mark.parametrize(("state_dtype", "expected"), [("int8", 6.0625), ("bfloat16", 8.0)])
def test_a_bf16_parameter_keeps_few_bytes(state_dtype, expected):
    params = make_params([(1024,)], dtype=torch.bfloat16)
    optimizer = CPUAdam(params, state_dtype=state_dtype)
    train(optimizer, params, 1)
    assert params[0].element_size() + state_bytes(optimizer, params[0]) / 1024 == expected


@pytest.mark.parametrize("state_dtype", COMPACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_resumes_bit_identically_from_a_state_dict(state_dtype, dtype):
    straight = make_params(SIZES, dtype=dtype)
    train(CPUAdam(straight, weight_decay=0.1, state_dtype=state_dtype, seed=7), straight, 10)

    params = make_params(SIZES, dtype=dtype)
    optimizer = CPUAdam(params, weight_decay=0.1, state_dtype=state_dtype, seed=7)
    train(optimizer, params, 5)
    resumed, other = resume(save(optimizer, params), lambda new: CPUAdam(new, lr=123.0))
    assert_states_equal(other, resumed, optimizer, params)
    for step in range(5, 10):
        set_grads(resumed, step)
        other.step()
    for one, two in zip(resumed, straight, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_bf16_parameter_is_its_master_rounded(state_dtype):
    params = make_params(SIZES, dtype=torch.bfloat16)
    optimizer = CPUAdam(params, lr=1e-5, state_dtype=state_dtype)
    before = [param.detach().clone() for param in params]
    train(optimizer, params, 3)
    for param, old in zip(params, before, strict=True):
        state = optimizer.state[param]
        assert "master_weight" not in state
        remainder = state["remainder"].numpy()
        master = torch.as_tensor(reference.combine_master(bf16_bits(param), remainder))
        assert torch.equal(master.to(torch.bfloat16), param)
        # updates far below bf16's resolution are not lost
        assert (master != old.float()).any()


@pytest.mark.parametrize("state_dtype", COMPACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_flat_function(isa, state_dtype, dtype):
    param = make_params([(1000,)], dtype=dtype)[0]
    optimizer = CPUAdam([param], state_dtype=state_dtype, weight_decay=0.1, seed=3)
    master = param.detach().float().clone() if dtype is not torch.bfloat16 else None
    own = param.detach().clone()
    kinds = {"int8": (torch.int8, torch.uint8), "bfloat16": (torch.bfloat16, torch.bfloat16)}
    states = [torch.zeros(1000, dtype=kind) for kind in kinds[state_dtype]]
    options = {"remainder": torch.zeros(1000, dtype=torch.int16)} if master is None else {}
    if dtype is torch.float16:
        options["out"] = own
    if state_dtype == "int8":
        states += [torch.zeros(8), torch.zeros(8)]
    else:
        options["seed"] = 3
    flat = {"int8": cpu_adam.adam_step_8bit, "bfloat16": cpu_adam.adam_step_bf16}[state_dtype]
    for step in range(4):
        set_grads([param], step)
        optimizer.step()
        flat(
            own if master is None else master,
            param.grad,
            *states,
            step=step + 1,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.1,
            **options,
        )
    assert torch.equal(param, own if dtype is not torch.float32 else master)
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], states[1])


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_many_parameters_step_together_as_alone(isa, state_dtype):
    sizes = [(n,) for n in range(1, 300, 23)]
    together = make_params(sizes, dtype=torch.bfloat16)
    threaded = make_params(sizes, dtype=torch.bfloat16)
    train(CPUAdam(together, state_dtype=state_dtype, num_threads=1), together, 3)
    train(CPUAdam(threaded, state_dtype=state_dtype, num_threads=3), threaded, 3)
    for one, two in zip(together, threaded, strict=True):
        assert torch.equal(one, two)


class TestConvertState:
    def trained(self, state_dtype, dtype=torch.bfloat16, steps=5):
        params = make_params(SIZES, dtype=dtype)
        optimizer = CPUAdam(params, state_dtype=state_dtype)
        train(optimizer, params, steps)
        return params, optimizer

    @pytest.mark.parametrize("source", ["float32", *COMPACT])
    @pytest.mark.parametrize("target", ["float32", *COMPACT])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_an_optimizer_goes_on_in_every_width(self, source, target, dtype):
        params, optimizer = self.trained(source, dtype)
        before = copy.deepcopy(optimizer.state_dict())
        assert convert_state(optimizer, target) is optimizer
        after = optimizer.state_dict()
        for key, state in before["state"].items():
            assert after["state"][key]["step"].item() == 5
            for name in ("master_weight", "remainder"):
                assert (name in after["state"][key]) == (name in state)
        set_grads(params, 6)
        optimizer.step()
        assert optimizer.state[params[0]]["step"].item() == 6
        assert all(param.isfinite().all() for param in params)
        # The same through a state dict, which is left alone.
        other_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
        loaded = CPUAdam(other_params)
        loaded.load_state_dict(convert_state(before, target))
        assert before["param_groups"][0]["state_dtype"] == source
        set_grads(other_params, 6)
        loaded.step()
        for one, two in zip(params, other_params, strict=True):
            state, other = optimizer.state[one], loaded.state[two]
            assert set(state) == set(other)
            assert torch.equal(state["exp_avg"], other["exp_avg"])

    @pytest.mark.parametrize("source", COMPACT)
    def test_there_and_back_changes_nothing_but_a_scales_last_place(self, source):
        _, optimizer = self.trained(source)
        state = copy.deepcopy(optimizer.state_dict())
        back = convert_state(convert_state(state, "float32"), source)
        for key, values in state["state"].items():
            for name, value in values.items():
                rtol = 2**-22 if "scale" in name else 0
                torch.testing.assert_close(back["state"][key][name], value, rtol=rtol, atol=0)

    def test_fp32_moments_come_back_about_as_they_were(self):
        _, optimizer = self.trained("float32")
        state = copy.deepcopy(optimizer.state_dict())
        back = convert_state(convert_state(state, "int8"), "float32")
        for key, values in state["state"].items():
            for name, tolerance in (("exp_avg", 0.02), ("exp_avg_sq", 0.04)):
                largest = values[name].abs().max()
                error = (back["state"][key][name] - values[name]).abs().max()
                assert error <= tolerance * largest

    def test_other_strides_are_kept(self):
        param = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        optimizer = CPUAdam([param])
        param.grad = torch.randn_like(param)
        optimizer.step()
        before = optimizer.state[param]["exp_avg"].clone()
        convert_state(optimizer, "int8")
        optimizer.step()
        convert_state(optimizer, "float32")
        assert optimizer.state[param]["exp_avg"].stride() == param.stride()
        convert_state(optimizer, "bfloat16")
        optimizer.step()
        sign = optimizer.state[param]["exp_avg"].sign()
        assert torch.equal(sign.float(), before.sign())

    def test_torchs_state_dict_is_taken(self):
        params = make_params(SIZES)
        theirs = torch.optim.AdamW(params)
        train(theirs, params, 3)
        ours = CPUAdam(params, state_dtype="int8")
        ours.load_state_dict(convert_state(theirs.state_dict(), "int8"))
        set_grads(params, 3)
        ours.step()
        assert ours.state[params[0]]["exp_avg"].dtype == torch.int8
        assert ours.state[params[0]]["step"].item() == 4

    def test_what_it_refuses(self):
        _, optimizer = self.trained("float32")
        with pytest.raises(ValueError, match=r"^dtype: must be one of"):
            convert_state(optimizer, "int4")
        for wrong in ({}, [], None, torch.optim.SGD(make_params([(3,)]))):
            with pytest.raises(TypeError, match=r"^optimizer_or_state: "):
                convert_state(wrong, "int8")


class TestRefusals:
    def test_no_such_state_dtype(self):
        params = make_params([(3,)])
        with pytest.raises(ValueError, match=r"^state_dtype: must be one of"):
            CPUAdam(params, state_dtype="int4")
        with pytest.raises(TypeError, match=r"^state_dtype: expected a name"):
            CPUAdam(params, state_dtype=torch.int8)

    @pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (0.5, TypeError)])
    def test_a_seed_that_is_none(self, seed, error):
        with pytest.raises(error, match=r"^seed: "):
            CPUAdam(make_params([(3,)]), seed=seed)

    def test_moments_of_another_width(self):
        params = make_params([(3,)])
        optimizer = CPUAdam(params)
        train(optimizer, params, 1)
        optimizer.param_groups[0]["state_dtype"] = "int8"
        before = params[0].detach().clone()
        with pytest.raises(TypeError, match=r"^state 'exp_avg'.*convert_state"):
            optimizer.step()
        assert torch.equal(params[0], before)

    def test_scales_of_another_shape(self):
        params = make_params([(300,)])
        optimizer = CPUAdam(params, state_dtype="int8")
        train(optimizer, params, 1)
        optimizer.state[params[0]]["exp_avg_scale"] = torch.zeros(2)
        with pytest.raises(ValueError, match=r"^state 'exp_avg_scale': must have shape \(3,\)"):
            optimizer.step()


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_small_model_trains_as_with_fp32_states(state_dtype):
    def final_loss(**options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
            torch.nn.Linear(64, 8),
        )  # fmt: skip
        teacher = torch.nn.Linear(16, 8)
        optimizer = CPUAdam(model.parameters(), lr=1e-3, weight_decay=0.01, **options)
        losses = []
        for _ in range(300):
            x = torch.randn(64, 16)
            target = (teacher(x) * 2 + torch.randn(64, 8)).argmax(1)
            loss = torch.nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-50:]) / 50

    assert final_loss(state_dtype=state_dtype) == pytest.approx(final_loss(), rel=0.01)
