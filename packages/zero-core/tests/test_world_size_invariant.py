"""``world_size_invariant``: results do not depend on the number of ranks, bit for bit."""

import itertools

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from torch import nn

import zero_core
from zero_core.extensions.invariance import bin_powers, chunk_norms, sum_bins
from zero_core.layout.arithmetic import CHUNK_NUMEL
from zero_core.testing import alone, make_model, make_tower, on_ranks, simulate

MICRO_BATCHES, STEPS, WIDTH = 4, 3, 33


def batch(step, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    return {
        "ids": torch.randint(0, 37, (2, 9), generator=generator),
        "use_sometimes": number == 1,
        "use_side": (step + number) % 3 == 0,
    }


def config(world_size, **changed):
    return {
        "train_batch_size": 2 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "world_size_invariant": True,
        **changed,
    }


def train(ranks, changed):
    engine = zero_core.build(make_model(WIDTH), config(ranks.size, **changed), process_group=ranks)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps):
            number = micro * ranks.size + ranks.rank
            given = batch(step, number)
            loss = engine(**{**given, "ids": given["ids"].to(engine.device)})["loss"]
            engine.backward(loss)
            engine.step()
            losses.append((step * MICRO_BATCHES + number, loss.detach().cpu()))
        norms.append(engine.get_global_grad_norm())
    values = engine.full_state_dict(dtype=torch.float32).items()
    engine.close()
    return losses, norms, {name: value.cpu().view(torch.int32) for name, value in values}


def run(world_size, changed, run=simulate, **simulated):
    found = run(train, world_size, changed, **simulated)
    losses = sorted(itertools.chain(*(own for own, _, _ in found)), key=lambda pair: pair[0])
    for _, *agreed in found[1:]:
        torch.testing.assert_close(agreed, [*found[0][1:]], rtol=0.0, atol=0.0, equal_nan=True)
    return losses, *found[0][1:]


def assert_same_bits(one, other):
    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def plain_torch(_):
    model = make_model(WIDTH)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            (model(**batch(step, number))["loss"] / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().view(torch.int32) for name, param in params.items()}


# One case for each path of gradients. integration/faults runs others on processes.
KINDS = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.5},
    "fp16": {"fp16": {"enabled": True, "hysteresis": 1}},
    "narrow": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "gradient_clipping": 0.5,
    },
    "sent in bf16": {"communication_data_type": "bf16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_norms_and_weights_have_the_bits_of_one_rank(kind):
    alone = run(1, KINDS[kind])
    even = list(KINDS).index(kind) % 2 == 0
    for world_size, stage in [(2, 0), (4, 3)] if even else [(2, 2), (4, 1)]:
        changed = {**KINDS[kind], "zero_optimization": {"stage": stage}}
        assert_same_bits(run(world_size, changed), alone)
    if kind == "fp32":
        # Simulate plain torch too, because the number of torch's threads changes the bits.
        (expected,) = simulate(plain_torch, 1)
        assert all(torch.equal(alone[2][name], expected[name]) for name in expected)


def test_the_norm_of_edited_gradients_is_that_of_torch():
    model = make_model(WIDTH)
    engine = zero_core.build(model, config(1, train_batch_size=2))
    engine.backward(engine(**batch(0, 0))["loss"])
    grads = [p.grad.mul_(2) for p in model.parameters() if p.grad is not None]
    for p in (1.0, 3.0, 2.0):
        expected = nn.utils.get_total_norm(grads, p).item()
        assert engine.clip_grad_norm_(1e6, p) == pytest.approx(expected, rel=1e-6)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)


@pytest.mark.cuda
@alone
def test_accelerators_on_nodes_have_the_bits_of_one_host():
    for kind in ({**KINDS["narrow"], "zero_optimization": {"stage": 3}}, {}):
        alone = run(1, kind)
        fake_cuda.set_delays(seed=0, kernel_s=5e-5, copy_s=2e-3)
        assert_same_bits(run(4, kind, simulate_on_devices, ranks_per_node=2), alone)
    block = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    with pytest.raises(zero_core.ConfigError, match="border elsewhere"):
        run(1, {"zero_optimization": block}, simulate_on_devices)


def test_sums_of_powers_are_exact_in_any_order_and_show_what_is_not_finite():
    numel = 40 * CHUNK_NUMEL
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-12, 3, numel)
    whole = bin_powers(chunk_norms(values))
    for num_chunks in (20, 14, 1):  # chunks per rank
        shards = values.split(num_chunks * CHUNK_NUMEL)
        parts = [bin_powers(chunk_norms(shard.clone())) for shard in reversed(shards)]
        assert torch.equal(sum(parts), whole)
    assert float(sum_bins(whole)) == pytest.approx(float(values.double().square().sum()), rel=1e-6)
    for value, expected in ((1e-30, 0.0), (1e25, torch.inf), (torch.nan, torch.nan)):
        found = sum_bins(bin_powers(chunk_norms(torch.full((CHUNK_NUMEL,), value))))
        assert float(found) == pytest.approx(expected, nan_ok=True)


def test_backwards_that_would_be_added_in_another_order_are_refused():
    model = nn.Linear(3, 3)
    engine = zero_core.build(model, config(1))

    def loss():
        return engine(torch.ones(1, 3)).sum()

    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\)"):
        loss().backward()
    engine.backward(loss())
    with pytest.raises(RuntimeError, match="a second backward in one micro-step"):
        engine.backward(loss())
    with pytest.raises(RuntimeError, match="each backward is reduced"), engine.no_sync():
        pass
    with pytest.raises(RuntimeError, match="each backward is reduced"):
        engine.set_requires_gradient_sync(False)
    engine.close()


def _dropping():
    model, masks = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)), []
    model[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    return zero_core.build(model, config(1, seed=3)), masks


def test_random_numbers_follow_the_micro_batch_and_not_what_was_drawn_before():
    found = []
    for num_steps in (2, 1):
        engine, masks = _dropping()
        for _ in range(num_steps * MICRO_BATCHES):
            torch.rand(7 * num_steps)
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
        found.append(masks)
        engine.close()
    assert len({tuple(mask.flatten().tolist()) for mask in found[0]}) == 2 * MICRO_BATCHES
    assert all(map(torch.equal, found[0][:MICRO_BATCHES], found[1]))


def test_a_micro_batch_that_is_repeated_draws_the_same_numbers():
    engine, masks = _dropping()
    failing = set()

    def fail(where):
        if where in failing:
            failing.discard(where)
            raise torch.OutOfMemoryError(where)

    def note(module, args, output):
        output.register_hook(lambda grad: fail("backward"))
        fail("forward")

    engine.module[1].register_forward_hook(note)
    for where in ("forward", "backward"):
        failing.add(where)
        with pytest.raises(torch.OutOfMemoryError):
            engine.backward(engine(torch.ones(1, 4)).sum())
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.optimizer.zero_grad()
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert len(masks) == 5
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    engine(torch.ones(1, 4))  # the second forward in a micro-step
    assert not torch.equal(masks[-1], masks[0])
    engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_two_gradients_of_a_parameter_in_one_backward_are_refused(ranks):
    model = make_tower(1, recompute="reentrant")
    engine = zero_core.build(model, config(ranks.size), process_group=ranks)
    out = engine(torch.ones(1, 7, requires_grad=True), (0, 0))
    with pytest.raises(RuntimeError, match="two gradients in one backward"):
        engine.backward(out.sum())
