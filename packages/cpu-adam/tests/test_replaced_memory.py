"""`CPUAdam` notices when memory or settings are replaced between two steps."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

from support.torch_cases import make_params, set_grads, train  # noqa: E402

from cpu_adam import CPUAdam  # noqa: E402

SIZES = [(n % 7 + 1,) for n in range(20)] + [(3, 4), (), (0,), (2, 3, 2, 2)]
SETTINGS = [{}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}, {"master_dtype": "split"}]


def mixed_params(half):
    params = make_params(SIZES)
    for index, dtype in ((0, torch.bfloat16), (1, half)):
        for param in params[index::3]:
            param.data = param.data.to(dtype)
    params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
    return params


@contextmanager
def refused(params, error, match):
    """Check that the code in this context raises ``error`` and changes no parameter."""
    before = [param.detach().clone() for param in params]
    with pytest.raises(error, match=match):
        yield
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)


class Pair:
    """Parameters in one group, and twins of them with one optimizer each.

    Each step creates the twins' optimizers anew from their states, so that nothing is cached.
    """

    def __init__(self, **options):
        self.options = {"weight_decay": 0.1, **options}
        half = torch.bfloat16 if "master_dtype" in options else torch.float16
        self.params, self.twins = mixed_params(half), mixed_params(half)
        self.optimizer = CPUAdam(self.params, num_threads=2, **self.options)
        self.states = [{} for _ in self.twins]
        self.steps = 0

    def step(self, *, skip=()):
        set_grads(self.params, self.steps)
        set_grads(self.twins, self.steps)
        self.steps += 1
        for index in skip:
            self.params[index].grad = self.twins[index].grad = None
        self.step_with_these_gradients()

    def step_with_these_gradients(self):
        self.optimizer.step()
        for twin, state in zip(self.twins, self.states, strict=True):
            single = CPUAdam([twin], **self.options)
            single.state[twin] = state
            single.step()

    def check(self):
        for param, twin, state in zip(self.params, self.twins, self.states, strict=True):
            assert torch.equal(param, twin)
            found = self.optimizer.state.get(param, {})
            assert set(found) == set(state)
            for name, value in state.items():
                assert torch.equal(found[name], value), name


# bf16 moments are left out: their rounding depends on a parameter's index in its group.
@pytest.fixture(params=[options for options in SETTINGS if "bfloat16" not in options.values()])
def pair(request):
    return Pair(**request.param)


def test_gradients_that_come_and_go(pair):
    generator = random.Random(0)
    for _ in range(12):
        pair.step(skip=generator.sample(range(len(SIZES)), generator.choice([0, 1, 10, 24])))
        pair.check()


def test_bf16_moments_are_rounded_by_the_place_in_the_group_whichever_have_gradients():
    def trained(skipped):
        params = make_params(SIZES)
        optimizer = CPUAdam([{"params": params[:5]}, {"params": params[5:]}])
        for group in optimizer.param_groups:
            group["state_dtype"] = "bfloat16"
        set_grads(params, 0)
        for index in skipped:
            params[index].grad = None
        optimizer.step()
        return [optimizer.state.get(param, {}).get("exp_avg_sq") for param in params]

    first, second = trained(()), trained((0, 3, 7, 8))
    for one, two in zip(first, second, strict=True):
        assert two is None or torch.equal(one, two)


@pytest.mark.parametrize(
    "change",
    [
        lambda p, s: setattr(p, "data", p.detach().clone()),
        lambda p, s: setattr(p, "grad", p.grad.clone()),
        lambda p, s: setattr(p.grad, "data", p.grad.detach().clone()),
        lambda p, s: s.update({name: value.clone() for name, value in s.items()}),
        lambda p, s: [setattr(value, "data", value.clone()) for value in s.values()],
        lambda p, s: s["step"].fill_(7.0),
        lambda p, s: s.update(step=11),
        lambda p, s: s.update(exp_avg=torch.zeros_like(s["exp_avg"])),
        lambda p, s: s["exp_avg_sq"].zero_(),
        lambda p, s: s.clear(),
        lambda p, s: s.pop("exp_avg_sq"),
    ],
)
def test_what_is_replaced_is_used(pair, change):
    for _ in range(2):
        pair.step()
    for index in (0, 1, 7, len(SIZES) - 1):
        change(pair.params[index], pair.optimizer.state[pair.params[index]])
        change(pair.twins[index], pair.states[index])
    for _ in range(2):
        pair.step()
        pair.check()


def test_the_dictionary_of_a_state_may_be_replaced(pair):
    pair.step()
    for param in pair.params[3:6]:
        pair.optimizer.state[param] = {
            name: value.clone() for name, value in pair.optimizer.state[param].items()
        }
    pair.step()
    pair.check()


def test_parameters_may_join_and_leave_a_group_and_groups_an_optimizer():
    params, twins = make_params(SIZES), make_params(SIZES)
    optimizer, expected = CPUAdam(params[:6]), CPUAdam(twins)

    groups, some, every = optimizer.param_groups, {*range(10)} - {2, 3}, {*range(24)} - {2, 3}
    for number, (numbers, change_after) in enumerate(
        [
            (range(6), lambda: groups[0]["params"].extend(params[6:10])),
            (range(10), lambda: groups[0]["params"].__delitem__(slice(2, 4))),
            (some, lambda: optimizer.add_param_group({"params": params[10:]})),
            (every, lambda: groups.reverse()),
            (every, lambda: groups[1]["params"].reverse()),
            (every, lambda: groups.pop(0)),
            (some, lambda: None),
        ]
    ):
        set_grads(params, number)
        set_grads(twins, number)
        for index, twin in enumerate(twins):
            if index not in numbers:
                twin.grad = None
        optimizer.step()
        expected.step()
        change_after()
    for one, two in zip(params, twins, strict=True):
        assert torch.equal(one, two)


def test_a_group_that_is_gone_is_not_remembered():
    params = make_params([(3,), (4,)])
    optimizer = CPUAdam([{"params": [param]} for param in params])
    train(optimizer, params, 1)
    gone = weakref.ref(params[1])
    del optimizer.state[params[1]]
    del optimizer.param_groups[1], params[1]
    train(optimizer, params, 1)
    gc.collect()
    assert gone() is None


def test_a_parameter_without_a_gradient_is_not_looked_at():
    params = make_params(SIZES)
    optimizer = CPUAdam(params)
    train(optimizer, params, 2)
    params[4].data = params[4].data.double()
    optimizer.state[params[5]]["exp_avg"] = "nonsense"
    set_grads(params[:4] + params[6:], 3)
    params[4].grad = params[5].grad = None
    before = [param.detach().clone() for param in params]
    optimizer.step()
    is_changed = [not torch.equal(*two) for two in zip(params[:6], before[:6], strict=True)]
    assert is_changed == [True] * 4 + [False] * 2
    assert [optimizer.state[params[i]]["step"].item() for i in (3, 4)] == [3.0, 2.0]
    set_grads(params[:6:5], 4)
    with pytest.raises(TypeError, match=r"^state 'exp_avg'"):
        optimizer.step()


class TestGradientsUnlikeTheOthers:
    @pytest.mark.parametrize("at", [0, 20, len(SIZES) - 1])
    def test_other_strides(self, pair, at):
        pair.step()
        for params in (pair.params, pair.twins):
            size = params[at].shape
            wide = torch.randn(*size, 3, generator=torch.Generator().manual_seed(1))
            params[at].grad = wide.to(params[at].dtype)[..., 1]
        pair.step_with_these_gradients()
        pair.check()

    @pytest.mark.parametrize("size", [(5,), (1,)])  # a view with gaps, and one too short for gaps
    def test_lazily_negated_ones(self, size):
        params, twins = make_params([size] * 3), make_params([size] * 3)
        values = [torch.randn(size, dtype=torch.complex64) for _ in params]
        for param, twin, value in zip(params, twins, values, strict=True):
            param.grad = value.conj().imag
            twin.grad = -value.imag.clone()
            assert param.grad.is_neg()
        for each in (params, twins):
            CPUAdam(each, adamw_mode=False, eps=1.0).step()
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(param, twin)

    def test_zeros_that_were_never_allocated(self):
        params = make_params([(6,)] * 3)
        set_grads(params, 0)
        params[1].grad = torch._efficientzerotensor(6)
        with refused(params, ValueError, r"^gradient: .*never allocated"):
            CPUAdam(params).step()

    def test_views_of_one_buffer(self, pair):
        pair.step()
        for params in (pair.params, pair.twins):
            generator = torch.Generator().manual_seed(2)
            for dtype in (torch.float32, torch.bfloat16):
                some = [p for p in params if p.dtype is dtype and p.is_contiguous()]
                flat = torch.randn(sum(p.numel() for p in some), generator=generator).to(dtype)
                for param, part in zip(some, flat.split([p.numel() for p in some]), strict=True):
                    param.grad = part.view(param.shape)
        pair.step_with_these_gradients()
        pair.check()

    @pytest.mark.parametrize("bytes_left", [0, 4, 23])
    @pytest.mark.parametrize("offset", [0, 5])
    def test_freed_ones(self, bytes_left, offset):
        params = make_params([(6,)] * 5)
        optimizer = CPUAdam(params)
        train(optimizer, params, 2)
        set_grads(params, 2)
        params[3].grad = torch.zeros(20)[offset : offset + 6]
        params[3].grad.untyped_storage().resize_(bytes_left + 4 * offset if bytes_left else 0)
        with refused(params, ValueError, r"^gradient: its memory has been freed"):
            optimizer.step()

    @pytest.mark.parametrize(
        ("grad", "error", "match"),
        [
            (torch.zeros(6).to_sparse(), TypeError, "sparse"),
            (torch.zeros(7), ValueError, "has 7 elements"),
            (torch.zeros(6, dtype=torch.float64), TypeError, "dtype"),
        ],
    )
    def test_ones_that_cannot_be_used(self, grad, error, match):
        params = make_params([(6,)] * 5)
        optimizer = CPUAdam(params)
        train(optimizer, params, 2)
        # This order avoids torch's check that a gradient matches its parameter.
        old = params[3].data
        params[3].grad = None
        params[3].data = torch.zeros(grad.shape, dtype=grad.dtype)
        params[3].grad = grad
        params[3].data = old
        set_grads(params[:3], 2)
        with refused(params, error, f"^gradient: .*{match}"):
            optimizer.step()


class TestShapesThatChangeInPlace:
    def trained(self):
        params = make_params([(4, 5)] * 4)
        optimizer = CPUAdam(params)
        train(optimizer, params, 2)
        return params, optimizer

    @pytest.mark.parametrize(
        "change",
        [
            lambda param: setattr(param, "data", param.data.t()),
            lambda param: setattr(param, "data", param.data[:2]),
            lambda param: param.requires_grad_(False).resize_(2, 5),
            lambda param: param.requires_grad_(False).resize_(8, 5).zero_(),
            lambda param: setattr(param, "data", param.data.view(torch.bfloat16)),
        ],
    )
    def test_of_a_parameter(self, change):
        params, optimizer = self.trained()
        set_grads(params, 3)
        params[2].grad = None
        change(params[2])
        params[2].grad = torch.zeros_like(params[2])
        with refused(params, ValueError, r"^state 'exp_avg'"):
            optimizer.step()

    def test_of_a_state(self):
        params, optimizer = self.trained()
        set_grads(params, 3)
        optimizer.state[params[2]]["exp_avg"].resize_(9, 5)
        with pytest.raises(ValueError, match=r"^state 'exp_avg'"):
            optimizer.step()


def test_the_same_bits_as_another_type_are_noticed():
    params = make_params([(4,)] * 3, dtype=torch.bfloat16)
    optimizer = CPUAdam(params)
    train(optimizer, params, 2)
    params[1].grad = None
    params[1].data = params[1].data.view(torch.float16)
    set_grads(params, 3)
    optimizer.step()
    expected = optimizer.state[params[1]]["master_weight"].to(torch.float16)
    assert torch.equal(params[1], expected)


def test_settings_of_a_group_may_change_between_steps():
    params, twins = make_params(SIZES), make_params(SIZES)
    optimizer, expected = CPUAdam(params), CPUAdam(twins)
    for step in range(4):
        for each in (optimizer, expected):
            each.param_groups[0].update(lr=10.0**-step, betas=(0.9 - step / 10, 0.99))
            if each is expected:
                each.__setstate__({})  # drops the rosters, so the next step verifies all memory
        set_grads(params, step)
        set_grads(twins, step)
        optimizer.step()
        expected.step()
    for one, two in zip(params, twins, strict=True):
        assert torch.equal(one, two)
    optimizer.param_groups[0]["state_dtype"] = "int8"
    set_grads(params, 5)
    with pytest.raises(TypeError, match="convert_state"):
        optimizer.step()


class TestMemoryThatShrinks:
    """Storages that shrink at the same address. See [Note: extents] in `cpu_adam._slots`."""

    NUMEL = 20_000

    def trained(self, dtype=torch.float32, **options):
        params = make_params([(self.NUMEL,)] * 3, dtype=dtype)
        optimizer = CPUAdam(params, **options)
        train(optimizer, params, 1)
        set_grads(params, 1)
        return params, optimizer

    def assert_refused(self, optimizer, params, intact, match):
        # Check this first, because a step that is not refused would write to freed memory.
        states = optimizer.state
        assert not optimizer._rosters[0]._snapshot.is_current(states)
        with refused(intact, ValueError, match):
            optimizer.step()
        assert [float(states[param]["step"]) for param in params] == [1.0] * 3

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            *((name, {}) for name in ("exp_avg", "exp_avg_sq", "parameter")),
            ("master_weight", {"dtype": torch.bfloat16, "master_dtype": "float32"}),
            ("remainder", {"dtype": torch.bfloat16, "master_dtype": "split"}),
            ("exp_avg_scale", {"state_dtype": "int8"}),
        ],
    )
    @pytest.mark.parametrize("is_grown_again", [False, True])
    def test_the_storage_of_a_state_or_of_a_parameter(self, name, options, is_grown_again):
        params, optimizer = self.trained(**options)
        victim = optimizer.state[params[1]].get(name, params[1])
        storage = victim.untyped_storage()
        num_bytes = storage.nbytes()
        if is_grown_again:
            storage.resize_(0)
        storage.resize_(3 * num_bytes // 4)
        intact = [param for param in params if param is not victim]
        self.assert_refused(optimizer, params, intact, f"^{name}: its memory has been freed")

    @pytest.mark.parametrize(
        "change",
        [
            lambda s: (s.set_(), s.resize_(10_000)),
            lambda s: s.resize_(10_000),
            lambda s: setattr(s, "data", s.data[:10_000]),
        ],
    )
    def test_a_state_of_fewer_elements(self, change):
        params, optimizer = self.trained()
        change(optimizer.state[params[1]]["exp_avg"])
        self.assert_refused(optimizer, params, params, r"^state 'exp_avg': must have")

    def test_a_view_from_within_its_storage(self):
        params, optimizer = self.trained()
        state = optimizer.state[params[1]]["exp_avg"]
        whole = torch.zeros(2 * self.NUMEL)
        state.data = whole[self.NUMEL :]
        set_grads(params, 1)
        optimizer.step()
        set_grads(params, 2)
        whole.untyped_storage().resize_(6 * self.NUMEL)
        with pytest.raises(ValueError, match=r"^exp_avg: its memory has been freed"):
            optimizer.step()

    @pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
    def test_a_smaller_state_where_the_old_one_was(self, name):
        # Retry until the allocator reuses the old address.
        params, optimizer = self.trained()
        state = optimizer.state[params[1]][name]
        for numel in (*range(self.NUMEL - 1, self.NUMEL - 40, -1), 15_000) * 4:
            address = state.data_ptr()
            state.data = torch.empty(0)
            state.data = torch.zeros(numel)
            is_same_place = state.data_ptr() == address
            if is_same_place:
                self.assert_refused(optimizer, params, params, rf"^state '{name}': must have")
                return
            state.data = torch.zeros(self.NUMEL)
            optimizer.step()  # the new memory is large enough
            for each in params:
                optimizer.state[each]["step"].fill_(1.0)
        pytest.skip("the allocator never gave the same address again")

    def test_as_much_memory_at_the_same_place_is_used(self):
        params, optimizer = self.trained()
        twins, expected = self.trained()
        for each, some in ((optimizer, params), (expected, twins)):
            each.state[some[1]]["exp_avg"].data = torch.empty(0)
            each.state[some[1]]["exp_avg"].data = torch.zeros(self.NUMEL)
        expected.__setstate__({})  # drops the rosters, so the next step verifies all memory
        optimizer.step()
        expected.step()
        for one, two in zip(params, twins, strict=True):
            assert torch.equal(one, two)
