"""`CPUAdam` behaves like other torch optimizers."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

from support.torch_cases import make_params, set_grads, train  # noqa: E402

import cpu_adam  # noqa: E402
from cpu_adam import CPUAdam  # noqa: E402


def as_tensor(text):
    return torch.tensor(float(text))


def assert_params_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_it_is_a_torch_optimizer_with_groups():
    params = make_params([(3,), (4,)])
    optimizer = CPUAdam([{"params": [params[0]], "lr": 0.5}, {"params": [params[1]]}], lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param, old, rate in zip(params, before, (0.5, 0.1), strict=True):
        torch.testing.assert_close(param, old - rate)


def test_a_closure_is_called_with_gradients_enabled():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param])

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()


def test_autograd_notices_the_update():
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param**2).sum()
    param.grad = torch.ones(3)
    CPUAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_moves_to_torchs_adamw_and_back():
    straight, params = make_params([(40,), (7,)]), make_params([(40,), (7,)])
    train(torch.optim.AdamW(straight, fused=True), straight, 9)
    ours, theirs = CPUAdam(params, weight_decay=0.01), torch.optim.AdamW(params, fused=True)
    for step in range(9):
        optimizer, other = (ours, theirs) if step // 3 % 2 == 0 else (theirs, ours)
        set_grads(params, step)
        optimizer.step()
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(straight, params, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-8)


def test_the_mode_of_torchs_adam_is_taken_over_with_its_state():
    params = make_params([(4,)])
    for torch_class, is_decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        saved = torch_class(params, lr=0.25).state_dict()
        optimizer = CPUAdam(params)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25
        if "decoupled_weight_decay" in saved["param_groups"][0]:
            assert optimizer.param_groups[0]["adamw_mode"] is is_decoupled


def test_a_load_hook_may_replace_the_state():
    params = make_params([(4,)], dtype=torch.bfloat16)
    source, target = CPUAdam(params), CPUAdam(params)
    set_grads(params, 0)
    source.step()

    def triple(_, state_dict):
        state = copy.deepcopy(state_dict)
        state["state"][0]["exp_avg"] *= 3
        return state

    target.register_load_state_dict_pre_hook(triple)
    target.load_state_dict(source.state_dict())
    expected = source.state[params[0]]["exp_avg"] * 3
    assert torch.equal(target.state[params[0]]["exp_avg"], expected)


@pytest.mark.parametrize("how", [copy.deepcopy, "pickle"])
def test_a_copied_optimizer_goes_on(how):
    import pickle

    params = make_params([(20,)], dtype=torch.bfloat16)
    optimizer = CPUAdam(params, num_threads=3)
    train(optimizer, params, 2)
    twin = pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else how(optimizer)
    assert twin.num_threads == 3
    twin_params = twin.param_groups[0]["params"]
    set_grads(params, 5)
    set_grads(twin_params, 5)
    optimizer.step()
    twin.step()
    assert_params_equal(params, twin_params)


def test_a_parameter_that_changes_its_dtype_goes_on_from_its_state():
    params = make_params([(20,)])
    optimizer = CPUAdam(params)
    train(optimizer, params, 2)
    params[0].data = params[0].data.to(torch.bfloat16)
    params[0].grad = None
    set_grads(params, 3)
    optimizer.step()
    state = optimizer.state[params[0]]
    assert state["step"].item() == 3
    assert torch.equal(params[0], state["master_weight"].to(torch.bfloat16))


def refused(error, match, action, params=()):
    before = [param.detach().clone() for param in params]
    with pytest.raises(error, match=match):
        action()
    assert_params_equal(params, before)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"amsgrad": True}, ValueError, "amsgrad: "),
            ({"lr": -1.0}, ValueError, "lr: "),
            ({"lr": float("nan")}, ValueError, "lr: "),
            ({"betas": (1.0, 0.9)}, ValueError, "beta1: "),
            ({"betas": (0.9, -0.1)}, ValueError, "beta2: "),
            *(({"betas": b}, TypeError, "beta") for b in (0.9, (0.9,), (0.9, 0.9, 0.9), "ab")),
            ({"eps": -1e-8}, ValueError, "eps: "),
            ({"weight_decay": -0.1}, ValueError, "weight_decay: "),
            ({"num_threads": 0}, ValueError, "num_threads: "),
            ({"master_dtype": "bfloat16"}, ValueError, "master_dtype: must be one of float32, spl"),
            ({"master_dtype": torch.float32}, TypeError, "master_dtype: expected a name"),
            ({"state_dtype": "int4"}, ValueError, "state_dtype: must be one of"),
            ({"state_dtype": torch.int8}, TypeError, "state_dtype: expected a name"),
            ({"seed": -1}, ValueError, "seed: "),
            ({"seed": 0.5}, TypeError, "seed: "),
        ],
    )
    def test_a_setting_that_is_none_of_its_values(self, options, error, match):
        params = make_params([(3,)], dtype=torch.bfloat16)
        refused(error, f"^{match}", lambda: CPUAdam(params, **options))
        if "num_threads" not in options:  # a group may have the other settings
            optimizer, group = CPUAdam(params), {"params": make_params([(2,)]), **options}
            refused(error, f"^{match}", lambda: optimizer.add_param_group(group))
            assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize(
        ("value", "error", "match"),
        [
            (torch.zeros(3, dtype=torch.float64), TypeError, "^params: dtype must be"),
            (torch.zeros(3, dtype=torch.complex64), TypeError, "^params: dtype must be"),
            (torch.zeros(3, device="meta"), ValueError, "^params: .*meta"),
            (torch.zeros(6)[::2], ValueError, "^params: .*gaps"),
        ],
    )
    def test_parameters_that_cannot_be_updated(self, value, error, match):
        refused(error, match, lambda: CPUAdam([torch.nn.Parameter(value)]))

    @pytest.mark.filterwarnings("ignore:.*duplicate parameters")
    def test_a_parameter_given_twice(self):
        (param,) = make_params([(3,)])
        refused(ValueError, "^params: a group has a parameter twice", lambda: CPUAdam([param] * 2))

    def test_a_bad_value_in_a_later_group_touches_nothing(self):
        params = make_params([(4,), (5,)])
        optimizer = CPUAdam([{"params": [param]} for param in params])
        set_grads(params, 0)
        optimizer.param_groups[1]["lr"] = float("nan")
        refused(ValueError, "^lr: ", optimizer.step, params)

    def test_state_of_the_wrong_kind(self):
        params = make_params([(4,)])
        set_grads(params, 0)
        for wrong, error in [
            (torch.zeros(5), ValueError),
            (torch.zeros(4, dtype=torch.float64), TypeError),
            (torch.zeros(4, device="meta"), ValueError),
            (torch._neg_view(torch.zeros(4)), ValueError),
            ([0.0] * 4, TypeError),
        ]:
            optimizer = CPUAdam(params)
            optimizer.step()
            optimizer.state[params[0]]["exp_avg"] = wrong
            refused(error, "^state 'exp_avg'", optimizer.step, params)

    def test_loaded_amsgrad_state(self):
        params = make_params([(4,)])
        saved = torch.optim.AdamW(params, amsgrad=True).state_dict()
        refused(ValueError, "^amsgrad", lambda: CPUAdam(params).load_state_dict(saved))


class TestWhatCannotBeUsed:
    def trained(self):
        params = make_params([(3,), (4,)])
        optimizer = CPUAdam(params)
        train(optimizer, params, 2)
        set_grads(params, 2)
        return params, optimizer

    def assert_step_is_refused(self, params, optimizer, error, match):
        before = [param.detach().clone() for param in params]
        with pytest.raises(error, match=match):
            optimizer.step()
        assert_params_equal(params, before)
        assert float(optimizer.state[params[0]]["step"]) == 2.0

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            *((kind(x), ValueError) for x in ("inf", "-inf", "nan") for kind in (float, as_tensor)),
            (10**400, ValueError),
            (-3, ValueError),
            (None, TypeError),
            ("many", TypeError),
            ([1.0], TypeError),
            (torch.zeros(2, dtype=torch.float64), TypeError),
            (torch.zeros((), device="meta"), TypeError),
        ],
    )
    def test_a_step_count_that_is_none(self, value, error):
        params, optimizer = self.trained()
        optimizer.state[params[1]]["step"] = value
        self.assert_step_is_refused(params, optimizer, error, r"^(state 'step'|step): ")

    def test_a_loss_scale_that_is_none(self):
        params, optimizer = self.trained()
        for value in (0.0, -0.0, float("nan"), float("inf"), 1e-320):
            for scale in (value, torch.tensor(value)):
                optimizer.grad_scale = scale
                self.assert_step_is_refused(params, optimizer, ValueError, r"^grad_scale: ")
        optimizer.grad_scale = "1024"
        self.assert_step_is_refused(params, optimizer, TypeError, r"^grad_scale: ")

    @pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "exp_avg_scale", "remainder"])
    def test_a_loaded_state_that_is_no_tensor(self, name):
        params, optimizer = self.trained()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 7.0
        saved["state"][1][name] = [1.0, 2.0, 3.0, 4.0]
        states = {param: dict(optimizer.state[param]) for param in params}
        with pytest.raises(TypeError, match=rf"^state '{name}': expected a tensor, got list"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        for param, state in states.items():
            assert optimizer.state[param] == state

    def test_a_loaded_state_that_is_no_dictionary(self):
        _, optimizer = self.trained()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1] = torch.zeros(4)
        with pytest.raises(TypeError, match=r"^state_dict: .* got Tensor"):
            optimizer.load_state_dict(saved)


class TestAdamStepOnTensors:
    @pytest.fixture
    def tensors(self):
        from support.kernel_cases import make_arrays

        return {name: torch.from_numpy(array) for name, array in make_arrays(50).items()}

    def test_the_update_is_seen_by_autograd(self, tensors, hyper):
        versions = {name: tensor._version for name, tensor in tensors.items()}
        cpu_adam.adam_step(**tensors, **hyper)
        changed = {name for name, tensor in tensors.items() if tensor._version > versions[name]}
        assert changed == {"master", "exp_avg", "exp_avg_sq"}

    @pytest.mark.parametrize("name", ["master", "grad", "exp_avg", "exp_avg_sq", "out"])
    def test_wrong_tensors_are_refused_by_name(self, tensors, hyper, name):
        tensors["out"] = torch.zeros(50)
        freed = torch.zeros(60)[10:]
        freed.untyped_storage().resize_(0)
        wrong = [
            (TypeError, "dtype", torch.zeros(50, dtype=torch.float64)),
            (TypeError, "dtype", torch.zeros(50, dtype=torch.int32)),
            (ValueError, "host memory", torch.zeros(50, device="meta")),
            (ValueError, "contiguous", torch.zeros(100)[::2]),
            (ValueError, "contiguous", torch.zeros(1).expand(50)),
            (ValueError, "dense", torch.zeros(50).to_sparse()),
            (ValueError, "shape", torch.zeros(49) if name != "master" else torch.zeros(2, 25)),
            (ValueError, "freed", freed),
        ]
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        for error, match, tensor in wrong:
            with pytest.raises(error, match=match) as caught:
                cpu_adam.adam_step(**{**tensors, name: tensor}, **hyper)
            if name != "master":
                assert str(caught.value).startswith(name)
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True)

    def test_fake_tensors_are_refused(self, tensors, hyper):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.zeros(50)
        with pytest.raises(ValueError, match=r"^grad: a FakeTensor"):
            cpu_adam.adam_step(**{**tensors, "grad": fake}, **hyper)

    def test_inference_tensors_are_updated(self, tensors, hyper):
        with torch.inference_mode():
            tensors["master"] = tensors["master"].clone()
        before = tensors["master"].clone()
        cpu_adam.adam_step(**tensors, **hyper)
        assert not torch.equal(before, tensors["master"])
