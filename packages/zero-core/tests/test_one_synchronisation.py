"""A step makes the host wait for the device once, and updates as one that waits does."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_core.protocols import AheadTier
from zero_core.testing import late_device, run_alone

WIDTH, NUM_STEPS = 16, 5
OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
}


class Net(nn.Module):
    """Three blocks, the last of them used in every other call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uses_last = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks if self.uses_last else self.blocks[:2]:
            x = block(x).relu()
        return x.float().square().mean()


class Twice(nn.Module):
    """A block that is used twice, recomputed by reentrant checkpointing: gradients come late."""

    uses_last = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for index in (1, 2, 1):
            x = checkpoint(self.blocks[index], x, use_reentrant=True).relu()
        return x.float().square().mean()


def make_config(dtype: str, optimizer: str, clipping: float, micro_steps: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": clipping,
        "optimizer": OPTIMIZERS[optimizer],
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":  # it overflows in the first steps
        config["fp16"] = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}
    return config


STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
CASES = [
    (Net, dtype, optimizer, clipping, micro_steps, max_norm)
    for dtype, clipping, (micro_steps, max_norm) in product(
        ("fp32", "bf16", "fp16"), (0.0, 0.05), ((1, 0.0), (2, 0.0), (1, 0.01))
    )
    for optimizer in OPTIMIZERS
]
CASES += [(Twice, "fp32", "adamw", 0.05, 1, 0.0), (Twice, "fp16", "adamw", 0.0, 1, 0.0)]


def train(case: Any, device: str) -> tuple[list[dict[str, int]], list[Any]]:
    """Return the synchronisations of each step that was taken, and the results of all."""
    kind, dtype, optimizer, clipping, micro_steps, max_norm = case
    torch.manual_seed(0)
    model = kind().to(device)
    engine = zero_core.build(model, make_config(dtype, optimizer, clipping, micro_steps))
    is_late = device != "cpu"
    assert engine.device.type == ("late" if is_late else "cpu")
    syncs, results = [], []
    for step in range(NUM_STEPS):
        inputs = [torch.randn(2, WIDTH) for _ in range(micro_steps)]
        inputs[0][0, 0] = torch.nan if step == 2 else 1.0
        inputs = [x.to(device) for x in inputs]
        model.uses_last = bool(step % 2)
        if is_late:
            late_device.reset_counters()
        for x in inputs:
            engine.backward(engine(x))
            if max_norm and engine.is_gradient_accumulation_boundary():
                results.append(engine.clip_grad_norm_(max_norm))
            engine.step()
        if is_late and not engine.optimizer.overflow:
            syncs.append(late_device.counters().syncs)
        results.append((engine.skipped_steps, engine.get_global_grad_norm(), engine.loss_scale))
    results += engine.full_state_dict(dtype=torch.float32).values()
    for name, _ in model.named_parameters():
        results += [engine.states.get_full(name, what) for what in STATES[optimizer]]
    engine.close()
    return syncs, results


def _train_late(folder: str) -> None:
    late_device.load()
    expected = torch.load(f"{folder}/expected")
    for case, on_cpu in zip(CASES, expected, strict=True):
        syncs, found = train(case, "late")
        assert len(syncs) >= 2, case
        budget = 2 if case[0] is Twice else 1  # the ranks agree again on gradients that came late
        assert all(sum(kinds.values()) <= budget for kinds in syncs), (case, syncs)
        assert all(map(same, found, on_cpu)), (case, found[:NUM_STEPS], on_cpu[:NUM_STEPS])


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)


def test_a_step_waits_for_the_device_once_and_has_the_bits_of_the_cpu(tmp_path) -> None:
    torch.save([train(case, "cpu")[1] for case in CASES], tmp_path / "expected")
    run_alone(_train_late, str(tmp_path))


def _order_of_a_step(engine: zero_core.Engine) -> list[str]:
    """Return the kernel of the update and the host's wait, in their order."""
    engine.backward(engine(torch.ones(2, WIDTH, device="late")))
    late_device.start_trace()
    engine.step()
    trace = [(r.kind, r.name) for r in late_device.stop_trace()]
    seen = ["wait" if kind == "event_synchronize" else name for kind, name in trace]
    return [what for what in seen if what == "wait" or "_fused_adamw_" in what]


def _trace_steps() -> None:
    late_device.load()
    engine = zero_core.build(Net().to("late"), make_config("bf16", "adamw", 1.0, 1))
    tier = engine.sharded_state.tier
    assert isinstance(tier, AheadTier)
    assert tier.can_step_ahead
    assert _order_of_a_step(engine) == ["aten::_fused_adamw_", "wait"]
    engine.optimizer.register_step_pre_hook(lambda *_: None)  # it may change the groups
    assert _order_of_a_step(engine) == ["wait", "aten::_fused_adamw_"]
    engine.close()


def test_the_update_is_enqueued_before_the_host_reads_the_decision() -> None:
    run_alone(_trace_steps)
