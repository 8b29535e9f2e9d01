"""Steps in which the host waits for the device once, and still updates correctly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from unittest import TestCase

import pytest
import torch
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from support.tiers import MadeTier
from torch import Tensor

from zero_core.testing import Case, alone, make_tower, simulate

WIDTH, NUM_STEPS = 16, 5
OPTIMIZERS = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-2}}
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


@dataclass(frozen=True)
class Training(Case):
    """A case with an optimizer and further settings.

    ``is_twice`` uses a block twice. ``max_norm`` is passed to ``clip_grad_norm_`` in each step.
    ``has_patches`` enables weight patches.
    """

    optimizer: str = "AdamW"
    is_twice: bool = False
    max_norm: float = 0.0
    has_patches: bool = False

    def config(self):
        optimizer = {"type": self.optimizer, "params": OPTIMIZERS[self.optimizer]}
        config = {**super().config(), "optimizer": optimizer}
        config["fp16"]["initial_scale_power"] = 17
        if self.has_patches:
            config["weight_patches"] = {}
        return config


def make(*, is_twice=False):
    return make_tower(3, WIDTH, recompute="reentrant" if is_twice else "none")


HOW = ({}, {"clipping": 0.05, "accumulation": 2}, {"clipping": 0.05, "max_norm": 0.01})
ALONE = [
    Training(dtype=dtype, optimizer=optimizer, **how)
    for dtype, optimizer, how in product(("fp32", "bf16", "fp16"), OPTIMIZERS, HOW)
]
ALONE += [Training(is_twice=True, clipping=0.05), Training(is_twice=True, dtype="fp16")]
WAYS = [
    *(("fp32", {"clipping": 0.05}), ("bf16", {"accumulation": 2})),
    *(("fp16", {"clipping": 0.05}), ("bf16", {"max_norm": 0.1})),
]
# The two ranks run each stage and each of `WAYS` at least once.
TOGETHER = [
    Training(stage, dtype, **how)
    for stage, numbers in enumerate([(0,), (1,), (0, 2), (1, 3)])
    for dtype, how in [WAYS[number] for number in numbers]
]
TOGETHER += [Training(stage, "bf16", has_patches=True) for stage in (1, 3)]


def blocks_of(number, *, is_twice=False):
    return (0, 1, 2, 1) if is_twice else (0, 1, 2)[: 3 - number % 2]


def train(ranks, case):
    model = make(is_twice=case.is_twice)
    engine = case.build(ranks, model)
    is_late = ranks.device.type == "cuda"
    generator = torch.Generator().manual_seed(ranks.rank)
    waits, results = [], []
    for step in range(NUM_STEPS):
        inputs = [torch.randn(2, WIDTH, generator=generator) for _ in range(case.accumulation)]
        inputs[0][0, 0] = torch.nan if step == 2 and ranks.rank == 0 else 1.0
        inputs = [x.to(ranks.device).requires_grad_(case.is_twice) for x in inputs]
        # The last block is updated on each rank even if only one rank uses it.
        used = blocks_of(step + ranks.rank, is_twice=case.is_twice)
        before = count_waits(ranks) if is_late else 0
        if step == 2 and case.optimizer == "SGD":  # skipped, so momentum begins in the next step
            engine.optimizer.param_groups[0]["momentum"] = 0.9
        for x in inputs:
            engine.backward(engine(x, used))
            if case.max_norm and engine.is_gradient_accumulation_boundary():
                results.append(engine.clip_grad_norm_(case.max_norm))
            engine.step()
        if is_late and not engine.optimizer.overflow:
            waits.append(count_waits(ranks) - before)
        results.append((engine.skipped_steps, engine.get_global_grad_norm(), engine.loss_scale))
        if case.optimizer == "SGD":
            results.append(engine.sharded_state.state_names())
    results += engine.full_state_dict(dtype=torch.float32).values()
    for name, _ in model.named_parameters():
        results += [engine.states.get_full(name, what) for what in STATES[case.optimizer]]
    if case.has_patches:
        state = engine.sharded_state
        assert state.changes.collect(state.params)
        for segment in state.layout.segments:
            results += state.changes.changed(segment.index, 0, segment.shard_numel)
    engine.close()
    return waits, results


def count_waits(ranks):
    return sum(fake_cuda.counters(ranks.device.index).syncs.values())


def same(a, b):
    return torch.equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [pytest.param(1, ALONE, marks=pytest.mark.slow), (1, ALONE[3:4]), (2, TOGETHER)],
    ids=["all", "SGD", "together"],
)
@alone
def test_a_step_waits_for_the_device_once_and_has_the_bits_of_the_cpu(world_size, cases):
    for case in cases:
        expected = simulate(train, world_size, case)
        fake_cuda.set_delays(seed=world_size, kernel_s=2e-5, copy_s=2e-4)
        found = simulate_on_devices(train, world_size, case)
        for (waits, results), (_, on_cpu) in zip(found, expected, strict=True):
            assert len(waits) >= 2, case
            budget = 2 if case.is_twice else 1  # late gradients need a second all-reduce
            assert max(waits) <= budget, (case, waits)
            assert all(map(same, results, on_cpu)), (case, results[:NUM_STEPS], on_cpu[:NUM_STEPS])


def _order_of_a_step(engine):
    engine.backward(engine(torch.ones(2, WIDTH, device="cuda")))
    fake_cuda.start_trace()
    engine.step()
    trace = [(r.kind, r.name) for r in fake_cuda.stop_trace()]
    seen = ["wait" if kind == "event_synchronize" else name for kind, name in trace]
    return [what for what in seen if what == "wait" or "_fused_adamw_" in what]


@pytest.mark.cuda
@alone
def test_the_update_is_enqueued_before_the_host_reads_the_decision():
    engine = Training(dtype="bf16", clipping=1.0).build(model=make())
    assert _order_of_a_step(engine) == ["aten::_fused_adamw_", "wait"]
    engine.optimizer.register_step_pre_hook(lambda *_: None)
    assert _order_of_a_step(engine) == ["wait", "aten::_fused_adamw_"]
    engine.close()


@pytest.mark.cuda
@alone
def test_an_optimizer_without_a_choice_of_kernels_is_advised_to_be_fused():
    for chosen in ({}, {"fused": True}, {"fused": False}, {"foreach": True}):
        optimizer = torch.optim.AdamW((model := make().cuda()).parameters(), **chosen)
        expects = TestCase().assertNoLogs if chosen else TestCase().assertLogs
        with expects("zero_core.optim.factory", "WARNING"):
            Training().build(model=model, optimizer=optimizer).close()
        assert optimizer.param_groups[0]["fused"] is chosen.get("fused")


class BrokenOff(MadeTier):
    """A tier that raises KeyboardInterrupt after its second `step_ahead`."""

    num_updates = 0

    def step_ahead(self, *args, **kwargs):
        super().step_ahead(*args, **kwargs)
        self.num_updates += 1
        if self.num_updates == 2:
            raise KeyboardInterrupt


@pytest.mark.cuda
@alone
def test_a_step_that_was_broken_off_after_its_update_needs_a_load(tmp_path):
    engine = Training(dtype="bf16").build(model=make(), state_tier=BrokenOff.made)
    found = []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, device="cuda")))
        if not found:
            engine.step()
            engine.save_checkpoint(tmp_path)
        else:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            with pytest.raises(RuntimeError, match=r"step\(\) was left in the middle"):
                engine.step()
            engine.load_checkpoint(tmp_path)
        found.append(
            [engine.sharded_state.tier.read_scalars(0), *engine.full_state_dict().values()]
        )
    assert all(map(same, *found)), found
    engine.backward(engine(torch.ones(2, WIDTH, device="cuda")))
    engine.step()
    engine.close()


@pytest.mark.cuda
@alone
def test_groups_with_other_kernels_are_updated_after_the_decision():
    model = make()
    groups = [
        {"params": [*model.first.parameters(), *model.head.parameters()], "fused": True},
        {"params": model.blocks.parameters(), "fused": False},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    engine = Training(clipping=1.0).build(model=model, optimizer=optimizer)
    before = engine.full_state_dict()
    assert _order_of_a_step(engine)[0] == "wait"
    after = engine.full_state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    engine.close()
