"""`CPUAdam` compared with torch.optim.Adam and AdamW."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

from support.torch_cases import make_params, set_grads, train  # noqa: E402

from cpu_adam import CPUAdam  # noqa: E402

HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
RTOL = 0.0 if HAS_FMA else 2e-6
"""Without FMA, torch rounds differently: after ten updates, results differ by a few ulps."""


@pytest.fixture
def rounded_sqrt(monkeypatch):
    """Round torch's square root correctly, by computing it in double precision.

    On x86, torch's vector math library is off by 1 ulp for about one number in six. The rest of
    torch's for-loop is IEEE arithmetic.
    """
    original = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda self: original(self.double()).to(self.dtype))


SIZES = [(1,), (7,), (16,), (33,), (5, 9), (100, 31), (), (0,), (40_003,)]
MODES = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "lr": 0.3, "eps": 1e-3},
    {"betas": (0.3, 0.7)},
    {"betas": (0.5, 0.0)},
    {"betas": (0.0, 0.999), "weight_decay": 0.5},
]


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_fp32_is_bit_identical_to_the_for_loop(rounded_sqrt, isa, adamw_mode, mode):
    torch_class = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    theirs, ours = make_params(SIZES), make_params(SIZES)
    their_optimizer = torch_class(theirs, foreach=False, **{"weight_decay": 0.0, **mode})
    our_optimizer = CPUAdam(ours, adamw_mode=adamw_mode, num_threads=2, **mode)
    train(their_optimizer, theirs)
    train(our_optimizer, ours)
    for their, our in zip(theirs, ours, strict=True):
        torch.testing.assert_close(our, their, rtol=RTOL, atol=RTOL / 200)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            found, expected = our_optimizer.state[our][name], their_optimizer.state[their][name]
            torch.testing.assert_close(found, expected, rtol=RTOL, atol=RTOL / 200)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_an_fp32_master(rounded_sqrt, isa, dtype):
    if not HAS_FMA:
        pytest.skip("torch rounds otherwise where it runs without FMA")
    ours = make_params(SIZES, dtype=dtype)
    masters = [torch.nn.Parameter(param.detach().float()) for param in ours]
    our_optimizer = CPUAdam(ours, weight_decay=0.1)
    their_optimizer = torch.optim.AdamW(masters, weight_decay=0.1, foreach=False)
    for step in range(10):
        set_grads(ours, step)
        for master, our in zip(masters, ours, strict=True):
            master.grad = our.grad.float()
        our_optimizer.step()
        their_optimizer.step()
    for master, our in zip(masters, ours, strict=True):
        assert torch.equal(our_optimizer.state[our]["master_weight"], master)
        assert torch.equal(our, master.to(dtype))


def test_a_tensor_learning_rate_is_read_at_each_step():
    ours, plain = make_params([(50,)]), make_params([(50,)])
    rate = torch.tensor(1e-3)
    optimizer, other = CPUAdam(ours, lr=rate), CPUAdam(plain, lr=1e-3)
    for step in range(3):
        set_grads(ours, step)
        set_grads(plain, step)
        rate.fill_(1e-3 * (step + 1))
        other.param_groups[0]["lr"] = float(rate)
        optimizer.step()
        other.step()
    assert torch.equal(ours[0], plain[0])


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "expanded_grad"])
def test_any_dense_layout_is_updated(rounded_sqrt, layout):
    if not HAS_FMA:
        pytest.skip("torch rounds otherwise where it runs without FMA")
    shape = (4, 6, 5, 3)

    def make():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        if layout == "transposed":
            value = value.transpose(1, 3).contiguous().transpose(1, 3)
        elif layout == "channels_last":
            value = value.to(memory_format=torch.channels_last)
        return torch.nn.Parameter(value)

    theirs, ours = make(), make()
    optimizers = [torch.optim.AdamW([theirs], foreach=False, weight_decay=0.0), CPUAdam([ours])]
    for step in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        if layout == "expanded_grad":
            grad = grad[:1].expand(shape)
        theirs.grad, ours.grad = grad, grad
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_scaled_gradients_are_unscaled_in_the_kernel():
    plain, scaled = make_params([(40,)]), make_params([(40,)])
    plain_optimizer, optimizer = CPUAdam(plain), CPUAdam(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    target = torch.arange(40.0)
    for poison in (1.0, float("inf"), 1.0):
        scale = scaler.get_scale()
        scaler.scale((scaled[0] * target * poison).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if poison == 1.0:
            plain[0].grad = target.clone()
            plain_optimizer.step()
        else:
            assert scaler.get_scale() == scale / 2
    assert torch.equal(plain[0], scaled[0])
    assert optimizer.state[scaled[0]]["step"].item() == 2.0
