"""The vertical schedule on models of other kinds, and what it refuses by name."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.errors import AccumulationScheduleError
from zero_core.testing import (
    SimulatedRanks,
    late_device,
    run_alone,
    run_on_processes,
    seeded,
    simulate,
)

WIDTH = 8


def _config(stage: int = 3, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
        **further,
    }


def _inputs(step: int, rank: int, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(2 + n, 4, WIDTH, generator=generator) for n in range(number)]


def _train(
    model: nn.Module, config: dict[str, Any], ranks: SimulatedRanks | None, steps: int = 3
) -> tuple[list[float], dict[str, Tensor]]:
    engine = zero_core.build(model, config, process_group=ranks)
    rank = 0 if ranks is None else ranks.rank
    losses = [engine.train_batch(_inputs(step, rank)).item() for step in range(steps)]
    state = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return losses, state


def _same_bits(ranks: SimulatedRanks | None, kind: type[nn.Module], config: dict[str, Any]) -> None:
    models = kind(), kind()  # before any rank trains: simulated ranks share a generator
    expected = _train(models[0], config, ranks)
    found = _train(models[1], config | {"accumulation_schedule": "vertical"}, ranks)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=0.0)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class _Plain(nn.Module):
    """Blocks, some of which are left out of backward."""

    num_frozen = 0

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_mlp() for _ in range(4))
            self.out = nn.Linear(WIDTH, 1)
            self.complete()
        if self.num_frozen:
            self.first.requires_grad_(False)
        for block in self.blocks[: self.num_frozen]:
            block.requires_grad_(False)

    def complete(self) -> None:
        """Add more to the model."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).square().mean()


class _LowerFrozen(_Plain):
    num_frozen = 2


class _AllFrozenButHead(_Plain):
    num_frozen = 4


class _Dropout(_Plain):
    """Draws before, within and behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.3)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(nn.functional.dropout(x, 0.2)), 0.3)
        return nn.functional.dropout(self.out(x), 0.3).square().mean()


class _Branches(_Plain):
    """Some micro-batches leave a parameter, the head or a half of a block out."""

    def complete(self) -> None:
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(3))
        for block in self.blocks:
            block.register_module("3", nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        is_even = x.shape[0] % 2 == 0
        y = self.first(x) + self.bias if is_even else self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return self.out(y).square().mean() if is_even else y.square().mean()


class _UnevenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"x": x + (self.side(y) if x.shape[0] % 2 else y), "gate": y.sigmoid().mean()}


class _SideOutputs(nn.Module):
    """Blocks return a mapping, whose second entry all go to the loss, as of a router."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.blocks = nn.ModuleList(_UnevenBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = []
        for block in self.blocks:
            found = block(x)
            x = found["x"] * 1.5
            gates.append(found["gate"])
        return x.square().mean() + torch.stack(gates).sum()


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.cross(x) @ memory.transpose(1, 2)
        return x + self.own(x) + scores.softmax(-1) @ memory


class _EncoderDecoder(nn.Module):
    """Each decoder block takes what the encoder returned."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.encoder = nn.ModuleList(_mlp() for _ in range(2))
            self.norm = nn.LayerNorm(WIDTH)
            self.decoder = nn.ModuleList(_Decoder() for _ in range(3))
            self.lm_head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = memory + block(memory)
        memory = self.norm(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.lm_head(x).square().mean()


class _Skips(nn.Module):
    """What early blocks return is added between late ones."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.scale = nn.Parameter(torch.ones(4))
            self.blocks = nn.ModuleList(_mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x) * self.scale[number]
            kept.append(x)
        return (x + kept[0] + kept[1] * kept[0]).square().mean()


class _SkipsOfOutputs(_Skips):
    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x * self.scale[number] + (kept[-2] * kept[-2] if number > 1 else 0.0))
            kept.append(x)
        return (x + kept[0] + kept[1] * kept[0]).square().mean()


class _MixedBetween(_Plain):
    """What lies before the blocks is added between them."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        x = first
        for block in self.blocks:
            x = block(x) + first
        return x.square().mean()


class _Hooked(_Plain):
    """Hooks of its own change gradients of what goes from block to block, and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight.register_hook(lambda grad: grad * 0.5)
        self.blocks[1][0].weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
            x.register_hook(lambda grad: grad * 0.9)
        return (self.out(x) + self.out(x + 1.0)).square().mean()


KINDS = [
    _Plain,
    _LowerFrozen,
    _AllFrozenButHead,
    _Branches,
    _SideOutputs,
    _EncoderDecoder,
    _Skips,
    _SkipsOfOutputs,
    _MixedBetween,
    _Hooked,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_are_those_of_the_horizontal_schedule(world_size, stage, kind):
    simulate(_same_bits, world_size, kind, _config(stage))


SETTINGS: dict[str, dict[str, Any]] = {
    "activations kept": {"activation_checkpointing": None},
    "inputs on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "sums in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "one update of many micro-batches": {"gradient_accumulation_steps": 3, "seed": 5},
    "any number of ranks": {"world_size_invariant": True},
    "a sum, not a mean": {"gradient_allreduce_op": "sum"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_are_the_same_with(world_size, name):
    simulate(_same_bits, world_size, _Plain, _config(3) | SETTINGS[name])


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "Adam", "params": {"lr": 1e-2}},
        {"type": "Adagrad", "params": {"lr": 1e-2}},
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        {"type": "Lion", "params": {"lr": 1e-2}},
        {"type": "Muon", "params": {"lr": 1e-2}},
    ],
    ids=lambda optimizer: optimizer["type"],
)
def test_bits_are_the_same_with_optimizer(optimizer):
    simulate(_same_bits, 2, _Plain, _config(3, optimizer=optimizer))


def _draws_the_same(ranks: SimulatedRanks | None, further: dict[str, Any]) -> None:
    for stage in (0, 3):
        _same_bits(ranks, _Dropout, _config(stage) | further)


def _draws_the_same_alone() -> None:
    _draws_the_same(None, {})


@pytest.mark.slow
def test_dropout_draws_the_same_numbers():
    run_alone(_draws_the_same_alone)
    run_on_processes(_draws_the_same, 2, {})
    run_on_processes(_draws_the_same, 2, {"world_size_invariant": True})


def _keeps_states() -> None:
    for schedule in ("horizontal", "vertical"):
        engine = zero_core.build(_Dropout(), _config(3, accumulation_schedule=schedule))
        before = torch.get_rng_state()
        engine.train_batch(_inputs(0, 0))
        assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_of_the_program_are_left_alone():
    run_alone(_keeps_states)


class _Logits(_Plain):
    """Notes how many micro-batches' logits are in memory when one's are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.out(x)
        self.made.append(weakref.ref(logits))
        self.most = max(self.most, sum(ref() is not None for ref in self.made))
        return logits.square().mean()


def test_logits_of_one_micro_batch_are_in_memory_at_a_time():
    engine = zero_core.build(_Logits(), _config(3, accumulation_schedule="vertical"))
    engine.train_batch(_inputs(0, 0))
    assert engine.module.most == 1
    assert all(ref() is None for ref in engine.module.made)


class _Failing(_Plain):
    """Raises in one block, for one micro-batch."""

    fails_in = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == self.fails_in and x.shape[0] == 3:
                raise ArithmeticError("on purpose")
        if self.fails_in == len(self.blocks) and x.shape[0] == 3:
            raise ArithmeticError("on purpose")
        return self.out(x).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fails_in", [0, 2, 4])
def test_training_goes_on_after_a_forward_that_failed(fails_in, stage):
    config = _config(stage, accumulation_schedule="vertical")
    expected = _train(_Plain(), config, None)
    engine = zero_core.build(_Failing(), config)
    losses = []
    for step in range(3):
        engine.module.fails_in = fails_in
        with pytest.raises(ArithmeticError, match="on purpose"):
            engine.train_batch(_inputs(step, 0))
        engine.module.fails_in = -1
        losses.append(engine.train_batch(_inputs(step, 0)).item())
    assert (losses, engine.global_steps) == (expected[0], 3)
    torch.testing.assert_close(engine.full_state_dict(), expected[1], rtol=0.0, atol=0.0)


class _CalledAgain(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return x.square().mean()


class _OtherOrder(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = x + block(x)
        return x.square().mean()


class _LeftOut(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = x + block(x)
        return x.square().mean()


class _Stashing(_Plain):
    """A block leaves a part of the loss behind, beside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(self._stash)
        self.stashed = torch.zeros(())

    def _stash(self, module: nn.Module, args: Any) -> None:
        self.stashed = module[0](args[0]).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.stashed


class _Box:
    """Holds a tensor where nobody looks for it."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class _BoxedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor, box: _Box) -> Tensor:
        return x + self.inner(x) * box.held


class _Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_BoxedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        box = _Box(self.first(x))
        for block in self.blocks:
            x = block(x, box)
        return x.square().mean()


class _HookedTwice(_Plain):
    """A weight with a hook, before and behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.first.weight.square().mean()


class _DropoutHookedTwice(_Dropout):
    """As `_HookedTwice`, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.first.weight.square().mean()


class _BlockReadsAnother(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 0:
                x = x + self.blocks[3][0].bias[:WIDTH]
        return x.square().mean()


REFUSED: list[tuple[type[nn.Module], str]] = [
    (_CalledAgain, r"unit 1 \(blocks.0\) is called again after unit 4 \(blocks.3\)"),
    (_OtherOrder, r"unit 4 \(blocks.3\) is called before unit 1 \(blocks.0\)"),
    (_LeftOut, r"forward ended without a call of unit 3 \(blocks.2\)"),
    (_Boxed, r"unit 1 \(blocks.0\) uses a tensor .* the code before the blocks computed"),
    (_Stashing, r"leaves a tensor in the attribute stashed, where another micro-batch would"),
    (_HookedTwice, r"code before the blocks and code behind it use first.weight, on which a hook"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_blocks_that_are_no_sequence_are_refused_by_name(kind, message):
    engine = zero_core.build(kind(), _config(2, accumulation_schedule="vertical"))
    with pytest.raises(AccumulationScheduleError, match=message):
        engine.train_batch(_inputs(0, 0))


def test_block_that_reads_a_parameter_of_another_one_is_refused_by_name():
    engine = zero_core.build(_BlockReadsAnother(), _config(2, accumulation_schedule="vertical"))
    with pytest.raises(AccumulationScheduleError, match=r"uses blocks.3.0.bias of unit 4"):
        engine.train_batch(_inputs(0, 0))


def test_model_without_blocks_is_refused():
    with pytest.raises(AccumulationScheduleError, match="Linear has none"):
        zero_core.build(nn.Linear(3, 3), _config(accumulation_schedule="vertical"))


def _changes_buffers(ranks: SimulatedRanks) -> None:
    class Counting(_Plain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].register_buffer("num_calls", torch.zeros(()))
            self.blocks[1].register_forward_hook(self._count)

        def _count(self, module: nn.Module, args: Any, output: Any) -> None:
            module.num_calls += 1

    config = _config(2, accumulation_schedule="vertical", broadcast_buffers=False)
    engine = zero_core.build(Counting(), config, process_group=ranks)
    engine.train_batch(_inputs(0, ranks.rank))
    engine.close()
    engine = zero_core.build(Counting(), config | {"broadcast_buffers": True}, process_group=ranks)
    with pytest.raises(AccumulationScheduleError, match=r"blocks.1\) changes its buffer num_calls"):
        engine.train_batch(_inputs(0, ranks.rank))


def test_block_that_changes_a_buffer_of_all_ranks_is_refused():
    simulate(_changes_buffers, 2)


def test_loop_over_micro_batches_is_refused():
    engine = zero_core.build(_Plain(), _config(accumulation_schedule="vertical"))
    loss = engine(_inputs(0, 0)[0])
    with pytest.raises(AccumulationScheduleError, match=r"backward\(\): .* call engine"):
        engine.backward(loss)
    loss.backward()
    with pytest.raises(AccumulationScheduleError, match=r"step\(\): .* call engine"):
        engine.step()
    with pytest.raises(AccumulationScheduleError, match=r"idle_step\(\)"):
        engine.idle_step()


def test_step_needs_all_of_its_micro_batches():
    for schedule in ("horizontal", "vertical"):
        engine = zero_core.build(_Plain(), _config(accumulation_schedule=schedule))
        with pytest.raises(ValueError, match="has 3 micro-batches, found 2"):
            engine.train_batch(_inputs(0, 0, 2))
        engine.train_batch(iter(_inputs(0, 0, 5)))
        assert (engine.global_steps, engine.micro_steps) == (1, 3)


def test_step_is_not_run_in_the_middle_of_another_one():
    engine = zero_core.build(_Plain(), _config())
    engine.backward(engine(_inputs(0, 0)[0]))
    engine.step()
    with pytest.raises(RuntimeError, match="runs a whole step"):
        engine.train_batch(_inputs(0, 0))


def test_evaluation_between_two_steps_changes_nothing():
    config = _config(accumulation_schedule="vertical")
    expected = _train(_Plain(), config, None)
    engine = zero_core.build(_Plain(), config)
    for step in range(3):
        with torch.no_grad():
            engine(_inputs(9, 0)[0])
        engine.train_batch(_inputs(step, 0), lambda x: engine(x))
    torch.testing.assert_close(engine.full_state_dict(), expected[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "further",
    [
        {"zero_optimization": {"stage": 2}},
        {"activation_checkpointing": None},
        {"gradient_accumulation_steps": 1},
    ],
)
def test_auto_stays_horizontal_where_no_gather_is_saved(further, caplog):
    caplog.set_level("INFO", "zero_core")
    simulate(_build, 2, _config(accumulation_schedule="auto") | further)
    assert "accumulation_schedule: auto chose horizontal: no gather" in caplog.text


def _build(ranks: SimulatedRanks, config: dict[str, Any]) -> None:
    zero_core.build(_Plain(), config, process_group=ranks)


def _chooses(ranks: SimulatedRanks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    models = _Plain(), _Plain()
    expected = _train(models[0], _config(), ranks, steps=6)
    found = _train(models[1], _config(accumulation_schedule="auto"), ranks, steps=6)
    assert found[0] == expected[0]
    return found[1], expected[1]


def test_auto_tries_both_schedules_and_says_which_one_it_chose(caplog):
    caplog.set_level("INFO", "zero_core")
    for found, expected in simulate(_chooses, 2):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert re.search(r"auto chose (vertical|horizontal): a step took .* s vertically", caplog.text)


def _falls_back(ranks: SimulatedRanks) -> None:
    for kind in (_CalledAgain, _HookedTwice):  # seen within a forward, and when it has ended
        models = kind(), kind()
        expected = _train(models[0], _config(), ranks)
        found = _train(models[1], _config(accumulation_schedule="auto"), ranks)
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=0.0)


def _falls_back_with_dropout(ranks: SimulatedRanks) -> None:
    models = _DropoutHookedTwice(), _DropoutHookedTwice()
    expected = _train(models[0], _config(), ranks)
    found = _train(models[1], _config(accumulation_schedule="auto"), ranks)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=0.0)


def test_step_draws_the_same_numbers_after_auto_refused_the_vertical_schedule():
    run_on_processes(_falls_back_with_dropout, 2)


def test_auto_stays_horizontal_where_blocks_are_no_sequence(caplog):
    simulate(_falls_back, 2)
    assert "auto chose horizontal: rank 0: accumulation_schedule = 'vertical'" in caplog.text


def _train_on(ranks: Any, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = zero_core.build(_Plain(), config, process_group=ranks)
    losses = [
        engine.train_batch([x.to(engine.device) for x in _inputs(step, ranks.rank)])
        for step in range(3)
    ]
    return [loss.item() for loss in losses], engine.full_state_dict()


def _train_on_late_device(world_size: int) -> None:
    late_device.load()
    for seed, further in enumerate(
        (
            {},
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"zero_optimization": {"stage": 1}},
        )
    ):
        config = _config() | further
        expected = simulate(_train_on, world_size, config)
        late_device.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        config |= {"accumulation_schedule": "vertical"}
        found = simulate(_train_on, world_size, config, device="late")
        for (losses, values), (exact_losses, exact_values) in zip(found, expected, strict=True):
            assert losses == exact_losses
            torch.testing.assert_close(values, exact_values, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_on_an_accelerator_are_those_of_the_cpu(world_size):
    run_alone(_train_on_late_device, world_size)


def _compiled() -> None:
    for block in (None, {}):
        found = []
        for schedule in ("horizontal", "vertical"):
            model = _Plain()
            for module in model.blocks:
                module.compile(backend="aot_eager")
            config = _config(activation_checkpointing=block, accumulation_schedule=schedule)
            found.append(_train(model, config, None))
        assert found[0][0] == found[1][0]
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0.0, atol=0.0)


def test_bits_are_the_same_with_compiled_blocks():
    run_alone(_compiled)
