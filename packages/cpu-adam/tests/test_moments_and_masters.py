"""`CPUAdam` with every dtype of moments, and whole or split master weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

from support.torch_cases import (  # noqa: E402
    assert_states_equal,
    bf16_bits,
    make_params,
    one_rank,
    resume,
    save,
    set_grads,
    train,
)

import cpu_adam  # noqa: E402
from cpu_adam import CPUAdam, convert_state, reference  # noqa: E402

MASTERS = ["float32", "split"]
WIDTHS = ["float32", "bfloat16", "int8"]
COMPACT = WIDTHS[1:]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(40,), (3, 5), (), (0,), (17, 19)]
KEPT = {"float32": "master_weight", "split": "remainder"}


def master_of(param, state):
    """Return the fp32 master weight, combined from both halves if it is split."""
    if "master_weight" in state:
        return state["master_weight"]
    return torch.as_tensor(
        reference.combine_master(bf16_bits(param), state["remainder"].contiguous().numpy())
    )


def is_tie(master):
    """Find masters midway between two bf16 numbers, of which the smaller magnitude is even."""
    return (master.view(torch.int32) & 0x1FFFF) == 0x8000


@pytest.mark.parametrize(
    ("state_dtype", "master_dtype", "expected"),
    [
        ("float32", None, 14.0),
        ("float32", "float32", 14.0),
        ("float32", "split", 12.0),
        ("bfloat16", None, 8.0),
        ("bfloat16", "float32", 10.0),
        ("bfloat16", "split", 8.0),
        ("int8", None, 6.0625),
        ("int8", "float32", 8.0625),
        ("int8", "split", 6.0625),
    ],
)
def test_each_combination_keeps_its_bytes(state_dtype, master_dtype, expected):
    params = make_params([(1024,)], dtype=torch.bfloat16)
    optimizer = CPUAdam(params, state_dtype=state_dtype, master_dtype=master_dtype)
    train(optimizer, params, 1)
    state = optimizer.state[params[0]]
    kept = sum(value.nbytes for name, value in state.items() if name != "step")
    assert params[0].element_size() + kept / 1024 == expected


def test_a_split_master_takes_the_same_way_as_an_fp32_parameter(isa):
    # An fp32 parameter is its own master, so it is the expected result for equal gradients.
    split = make_params(SIZES, dtype=torch.bfloat16)
    oracle = [torch.nn.Parameter(param.detach().float()) for param in split]
    options = {"weight_decay": 0.1, "lr": 3e-3}
    optimizer, expected = (
        CPUAdam(split, master_dtype="split", **options),
        CPUAdam(oracle, **options),
    )
    for step in range(30):
        set_grads(split, step)
        for one, other in zip(oracle, split, strict=True):
            one.grad = other.grad.float()
        optimizer.step()
        expected.step()
        for one, other in zip(oracle, split, strict=True):
            is_same, state = ~is_tie(one.detach()), optimizer.state[other]
            assert "master_weight" not in state
            assert torch.equal(master_of(other, state), one)
            assert torch.equal(other[is_same], one.to(torch.bfloat16)[is_same])
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[name], expected.state[one][name])


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_compact_moments_take_the_same_way_with_either_master(isa, state_dtype):
    split, whole = (make_params(SIZES, dtype=torch.bfloat16) for _ in range(2))
    options = {"state_dtype": state_dtype, "seed": 3, "lr": 1e-5}
    optimizer = CPUAdam(split, master_dtype="split", **options)
    expected = CPUAdam(whole, master_dtype="float32", **options)
    before = [param.detach().float() for param in split]
    train(optimizer, split, 5)
    train(expected, whole, 5)
    for one, other, old in zip(split, whole, before, strict=True):
        state, master = optimizer.state[one], expected.state[other]["master_weight"]
        assert "master_weight" not in state
        assert torch.equal(one, other)
        assert torch.equal(master_of(one, state).to(torch.bfloat16), one)
        # Updates far below the resolution of bf16 must not be lost.
        assert not old.numel() or (master != old).any()


@pytest.mark.parametrize("state_dtype", WIDTHS)
@pytest.mark.parametrize("master_dtype", MASTERS)
def test_fp32_parameters_are_their_own_master(state_dtype, master_dtype):
    params, plain = make_params(SIZES), make_params(SIZES)
    optimizer = CPUAdam(params, state_dtype=state_dtype, master_dtype=master_dtype)
    train(optimizer, params, 3)
    train(CPUAdam(plain, state_dtype=state_dtype), plain, 3)
    for param, other in zip(params, plain, strict=True):
        assert torch.equal(param, other)
        assert not {"master_weight", "remainder"} & set(optimizer.state[param])


@pytest.mark.parametrize("state_dtype", WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "master_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "split"),
    ],
)
def test_training_resumes_bit_identically_from_a_state_dict(state_dtype, dtype, master_dtype):
    options = {"state_dtype": state_dtype, "master_dtype": master_dtype, "weight_decay": 0.1}
    straight = make_params(SIZES, dtype=dtype)
    train(CPUAdam(straight, seed=7, **options), straight, 10)

    params = make_params(SIZES, dtype=dtype)
    optimizer = CPUAdam(params, seed=7, **options)
    train(optimizer, params, 5)
    saved = save(optimizer, params)
    # Any constructor argument works, because the state dict overrides it.
    for given in (None, *MASTERS) if dtype is torch.bfloat16 else (None,):
        resumed, other = resume(saved, partial(CPUAdam, lr=123.0, master_dtype=given))
        assert other.param_groups[0]["master_dtype"] == master_dtype
        assert_states_equal(other, resumed, optimizer, params)
        for step in range(5, 10):
            set_grads(resumed, step)
            other.step()
        for one, two in zip(resumed, straight, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("master_dtype", MASTERS)
def test_a_state_dict_that_says_nothing_of_it_keeps_what_it_has(master_dtype):
    params = make_params(SIZES, dtype=torch.bfloat16)
    optimizer = CPUAdam(params, master_dtype=master_dtype)
    train(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["master_dtype"]
    for given in (None, *MASTERS):
        other = CPUAdam(params, master_dtype=given)
        other.load_state_dict(saved)
        set_grads(params, 2)
        other.step()
        assert KEPT[master_dtype] in other.state[params[0]]


@pytest.mark.parametrize("master_dtype", MASTERS)
def test_torchs_state_dict_has_no_master_so_the_setting_stays(master_dtype):
    wide, params = make_params(SIZES), make_params(SIZES, dtype=torch.bfloat16)
    theirs = torch.optim.AdamW(wide)
    train(theirs, wide, 2)
    ours = CPUAdam(params, master_dtype=master_dtype)
    ours.load_state_dict(theirs.state_dict())
    set_grads(params, 2)
    ours.step()
    assert ours.param_groups[0]["master_dtype"] == master_dtype
    assert KEPT[master_dtype] in ours.state[params[0]]


def test_each_group_has_its_own():
    params = make_params([(40,), (50,), (60,)], dtype=torch.bfloat16)
    settings = ("split", "float32", None)
    groups = [
        {"params": [param], "master_dtype": setting}
        for param, setting in zip(params, settings, strict=True)
    ]
    optimizer = CPUAdam(groups[:2], master_dtype="float32")
    optimizer.add_param_group(groups[2])
    train(optimizer, params, 2)
    kept = [KEPT["split"], KEPT["float32"], KEPT["float32"]]
    assert [name in optimizer.state[p] for p, name in zip(params, kept, strict=True)] == [True] * 3


@pytest.mark.parametrize("state_dtype", WIDTHS)
@pytest.mark.parametrize("master_dtype", MASTERS)
def test_dtensor_parameters_are_updated_through_their_local_part(state_dtype, master_dtype):
    with one_rank() as mesh:
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        value = torch.randn(8, 3).to(torch.bfloat16)
        param = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
        plain = torch.nn.Parameter(value.clone())
        options = {"state_dtype": state_dtype, "master_dtype": master_dtype}
        optimizer, expected = CPUAdam([param], **options), CPUAdam([plain], **options)
        for step in range(4):
            set_grads([plain], step)
            param.grad = distribute_tensor(plain.grad.clone(), mesh, [Shard(0)])
            optimizer.step()
            expected.step()
            if step == 1:
                other = "split" if master_dtype == "float32" else "float32"
                convert_state(optimizer, state_dtype, other)
                convert_state(expected, state_dtype, other)
        assert torch.equal(param.detach().to_local(), plain)
        assert isinstance(optimizer.state[param][KEPT[other]], DTensor)
        assert state_dtype != "float32" or isinstance(optimizer.state[param]["exp_avg"], DTensor)


@pytest.mark.parametrize("state_dtype", COMPACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_flat_function(isa, hyper, state_dtype, dtype):
    (param,) = make_params([(1000,)], dtype=dtype)
    optimizer = CPUAdam([param], state_dtype=state_dtype, weight_decay=0.01, seed=3)
    own, options = param.detach().clone(), {**hyper}
    master = own if dtype is torch.bfloat16 else own.float()
    if dtype is torch.bfloat16:
        options["remainder"] = torch.zeros(1000, dtype=torch.int16)
    elif dtype is torch.float16:
        options["out"] = own
    if state_dtype == "int8":
        states = [torch.zeros(1000, dtype=kind) for kind in (torch.int8, torch.uint8)]
        flat, states = cpu_adam.adam_step_8bit, [*states, torch.zeros(8), torch.zeros(8)]
    else:
        states = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2)]
        flat, options["seed"] = cpu_adam.adam_step_bf16, 3
    for step in range(4):
        set_grads([param], step)
        optimizer.step()
        flat(master, param.grad, *states, **{**options, "step": step + 1})
    assert torch.equal(param, master.to(dtype))
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], states[1])


class TestConvertState:
    def trained(self, state_dtype, master_dtype=None, dtype=torch.bfloat16):
        params = make_params(SIZES, dtype=dtype)
        optimizer = CPUAdam(params, state_dtype=state_dtype, master_dtype=master_dtype, lr=1e-4)
        train(optimizer, params, 5)
        return params, optimizer

    @pytest.mark.parametrize("state_dtype", WIDTHS)
    @pytest.mark.parametrize("source", MASTERS)
    @pytest.mark.parametrize("target", MASTERS)
    def test_an_optimizer_goes_on_with_the_same_master(self, state_dtype, source, target):
        params, optimizer = self.trained(state_dtype, source)
        old = [p.detach().clone() for p in params]
        before = [master_of(p, optimizer.state[p]).clone() for p in params]
        assert convert_state(optimizer, state_dtype, target) is optimizer
        assert optimizer.param_groups[0]["master_dtype"] == target
        for param, value, master in zip(params, old, before, strict=True):
            state = optimizer.state[param]
            assert {"master_weight", "remainder"} & set(state) == {KEPT[target]}
            assert torch.equal(param, value)
            after = master_of(param, state)
            assert torch.equal(after[~is_tie(master)], master[~is_tie(master)])
        set_grads(params, 6)
        optimizer.step()
        assert KEPT[target] in optimizer.state[params[0]]

    def test_a_tie_moves_by_one_unit_in_the_last_place(self):
        param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        optimizer = CPUAdam([param], master_dtype="float32")
        train(optimizer, [param], 1)
        master = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F808001], dtype=torch.int32)
        optimizer.state[param]["master_weight"].copy_(master.view(torch.float32))
        param.data.copy_(master.view(torch.float32))
        convert_state(optimizer, "float32", "split")
        after = master_of(param, optimizer.state[param]).view(torch.int32)
        assert (master - after).tolist() == [1, 0, 1, 0]

    @pytest.mark.parametrize("state_dtype", WIDTHS)
    def test_a_state_dict_is_split_without_its_parameters(self, state_dtype):
        params, optimizer = self.trained("float32", "float32")
        saved = copy.deepcopy(optimizer.state_dict())
        split = convert_state(saved, state_dtype, "split")
        assert "master_weight" in saved["state"][0]
        assert split["param_groups"][0]["master_dtype"] == "split"
        twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
        loaded = CPUAdam(twins)
        loaded.load_state_dict(split)
        convert_state(optimizer, state_dtype, "split")
        for one, two in zip(params, twins, strict=True):
            state, other = optimizer.state[one], loaded.state[two]
            assert set(state) == set(other)
            for name, value in state.items():
                assert torch.equal(other[name], value)

    def test_a_split_master_cannot_be_joined_without_its_parameter(self):
        _, optimizer = self.trained("float32", "split")
        saved = optimizer.state_dict()
        with pytest.raises(ValueError, match=r"^master_dtype: .*remainder.*convert the optimizer"):
            convert_state(saved, "float32", "float32")
        assert convert_state(saved, "int8", "split")["state"][0]["remainder"].dtype is torch.int16
        assert convert_state(saved, "int8")["param_groups"][0]["master_dtype"] == "split"

    def test_a_parameter_that_is_not_its_master_rounded_is_refused(self):
        params, optimizer = self.trained("float32", "float32")
        params[-1].data += 1
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"^master_dtype: .*master weight, rounded"):
            convert_state(optimizer, "int8", "split")
        assert optimizer.param_groups[0]["state_dtype"] == "float32"
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(before["state"][key][name], value)

    def split_of(self, param, master):
        params = [torch.nn.Parameter(torch.tensor([param], dtype=torch.bfloat16))]
        optimizer = CPUAdam(params, master_dtype="float32")
        train(optimizer, params, 1)
        params[0].data.fill_(param)
        optimizer.state[params[0]]["master_weight"].fill_(master)
        convert_state(optimizer, "float32", "split")
        return params[0], optimizer.state[params[0]]

    def test_zeros_of_either_sign_are_the_same_and_nan_stays_nan(self):
        for given, master in [(-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0), (1.0, 1.0)]:
            param, state = self.split_of(given, master)
            assert state["remainder"].tolist() == [0]
            assert torch.equal(master_of(param, state), torch.full((1,), master))
        for nan in (float("nan"), -float("nan")):
            param, state = self.split_of(nan, nan)
            assert state["remainder"].tolist() == [0]
            assert master_of(param, state).isnan().all()

    @pytest.mark.parametrize("param", [0.0, 1.0, -2.0, float("inf")])
    def test_nan_beside_a_number_and_other_signs_are_refused(self, param):
        nan = float("nan")
        beside = [(param, nan), (nan, param), (-0.0, 1e-45), (0.0, -1e-45), (1.0, -1.0)]
        for given, master in beside:
            with pytest.raises(ValueError, match=r"^master_dtype: .*master weight, rounded"):
                self.split_of(given, master)

    def test_other_strides_are_kept(self):
        value = torch.randn(2, 3, 4, 5).to(torch.bfloat16).to(memory_format=torch.channels_last)
        param, twin = (torch.nn.Parameter(value.clone()) for _ in range(2))
        optimizer, expected = CPUAdam([param], master_dtype="split"), CPUAdam([twin])
        for step, master in enumerate(["float32", "split", "float32", "split"]):
            set_grads([param], step)
            twin.grad = param.grad.clone()
            optimizer.step()
            expected.step()
            convert_state(optimizer, "float32", master)
            assert optimizer.state[param][KEPT[master]].stride() == param.stride()
        assert torch.equal(param, twin)
        before = optimizer.state[param]["exp_avg"].clone()
        for width in ("int8", "float32"):
            convert_state(optimizer, width)
        after = optimizer.state[param]["exp_avg"]
        assert after.stride() == param.stride()
        assert (after - before).abs().max() <= 0.02 * before.abs().max()

    @pytest.mark.parametrize("source", WIDTHS)
    @pytest.mark.parametrize("target", WIDTHS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_an_optimizer_goes_on_in_every_width(self, source, target, dtype):
        params, optimizer = self.trained(source, dtype=dtype)
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
        # Converting the state dict gives the same result and leaves the state dict unchanged.
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
        _, optimizer = self.trained("float32", "split")
        with pytest.raises(ValueError, match=r"^dtype: must be one of"):
            convert_state(optimizer, "int4")
        for wrong in ({}, [], None, torch.optim.SGD(make_params([(3,)]))):
            with pytest.raises(TypeError, match=r"^optimizer_or_state: "):
                convert_state(wrong, "int8")
        for wrong, error in (("int16", ValueError), (16, TypeError)):
            with pytest.raises(error, match=r"^master_dtype: "):
                convert_state(optimizer, "float32", wrong)
            with pytest.raises(error, match=r"^master_dtype: "):
                convert_state(optimizer.state_dict(), "float32", wrong)
        halves = make_params([(4,)], dtype=torch.float16)
        half = CPUAdam(halves)
        train(half, halves, 1)
        with pytest.raises(ValueError, match=r"^master_dtype: .*fp16"):
            convert_state(half, "float32", "split")


class TestRefusals:
    def test_an_fp16_parameter_cannot_be_split(self):
        halves = make_params([(3,)], dtype=torch.float16)
        match = r"^master_dtype: .*bf16 parameters.*fp16"
        with pytest.raises(ValueError, match=match):
            CPUAdam(halves, master_dtype="split")
        optimizer = CPUAdam(make_params([(3,)], dtype=torch.bfloat16), master_dtype="split")
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group({"params": halves})
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0]["params"][0].data = torch.zeros(3, dtype=torch.float16)
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(3, dtype=torch.float16)
        with pytest.raises(ValueError, match=match):
            optimizer.step()

    def test_an_fp16_parameter_cannot_load_a_split_state(self):
        params = make_params([(3,)], dtype=torch.bfloat16)
        source = CPUAdam(params, master_dtype="split")
        train(source, params, 1)
        halves = make_params([(3,)], dtype=torch.float16)
        with pytest.raises(ValueError, match=r"^master_dtype: .*bf16 parameters.*fp16"):
            CPUAdam(halves).load_state_dict(source.state_dict())

    @pytest.mark.parametrize("source", MASTERS)
    def test_a_state_with_the_other_master(self, source):
        params = make_params([(3,)], dtype=torch.bfloat16)
        optimizer = CPUAdam(params, master_dtype=source)
        train(optimizer, params, 1)
        before = params[0].detach().clone()
        for wrong in set(MASTERS) - {source}:
            optimizer.param_groups[0]["master_dtype"] = wrong
            with pytest.raises(ValueError, match=rf"^state '{KEPT[source]}': .*convert_state"):
                optimizer.step()
        assert torch.equal(params[0], before)
        optimizer.param_groups[0]["master_dtype"] = None
        optimizer.step()

    def test_scales_of_another_shape(self):
        params = make_params([(300,)])
        optimizer = CPUAdam(params, state_dtype="int8")
        train(optimizer, params, 1)
        optimizer.state[params[0]]["exp_avg_scale"] = torch.zeros(2)
        with pytest.raises(ValueError, match=r"^state 'exp_avg_scale': must have shape \(3,\)"):
            optimizer.step()
