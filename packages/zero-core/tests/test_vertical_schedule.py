"""The vertical schedule: the horizontal one's bits, two passes of gathers, and what it refuses."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
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
from zero_core.testing.training import assert_same

WIDTH, VOCAB = 8, 37
VERTICAL = {"accumulation_schedule": "vertical"}


def _config(stage: int = 3, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
        **further,
    }


# --------------------------------------------------------------------------------------- models


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class _Net(nn.Module):
    """A model of four blocks that ``way`` connects.

    The code between the blocks is this schedule's difficulty.
    """

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        with seeded(1):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_mlp() for _ in range(4))
            self.out = nn.Linear(WIDTH, 1)
            self.bias = nn.Parameter(torch.ones(WIDTH))
            self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.way = way
        self.stashed: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def _plain(net: _Net, x: Tensor) -> Tensor:
    x = net.first(x)
    for block in net.blocks:
        x = x + block(x)
    return net.out(x).square().mean()


def _drops(net: _Net, x: Tensor) -> Tensor:
    """Apply dropout before, around and behind the blocks."""
    x = nn.functional.dropout(net.first(x), 0.3)
    for block in net.blocks:
        x = x + nn.functional.dropout(block(nn.functional.dropout(x, 0.2)), 0.3)
    return nn.functional.dropout(net.out(x), 0.3).square().mean()


def _branches(net: _Net, x: Tensor) -> Tensor:
    """Leave out a parameter and the head in some micro-batches."""
    is_even = x.shape[0] % 2 == 0
    x = net.first(x) + net.bias if is_even else net.first(x)
    for block in net.blocks:
        x = x + block(x)
    return net.out(x).square().mean() if is_even else x.square().mean()


def _skips(net: _Net, x: Tensor) -> Tensor:
    """Add outputs of early blocks between late ones and behind them."""
    kept: list[Tensor] = []
    for number, block in enumerate(net.blocks):
        x = block(x * net.scale[number] + (kept[-2] * kept[-2] if number > 1 else 0.0))
        kept.append(x)
    return (x + kept[0] + kept[1] * kept[0]).square().mean()


def _adds_the_first(net: _Net, x: Tensor) -> Tensor:
    x = first = net.first(x)
    for block in net.blocks:
        x = block(x) + first
    return x.square().mean()


def _hooks(net: _Net, x: Tensor) -> Tensor:
    """Change gradients by hooks between the blocks and use the head twice."""
    x = net.first(x)
    for block in net.blocks:
        x = x + block(x)
        x.register_hook(lambda grad: grad * 0.9)
    return (net.out(x) + net.out(x + 1.0)).square().mean()


def _in_order(*order: int) -> Callable[[Any, Tensor], Tensor]:
    def call(net: _Net, x: Tensor) -> Tensor:
        for number in order:
            x = x + net.blocks[number](x)
        return x.square().mean()

    return call


def _reads_another(net: _Net, x: Tensor) -> Tensor:
    for number, block in enumerate(net.blocks):
        x = x + block(x)
        if number == 0:
            x = x + net.blocks[3][0].bias[:WIDTH]
    return x.square().mean()


def _square(net: _Net) -> Tensor:
    """Return a part of the loss from a weight that is also used before the blocks."""
    return net.first.weight.square().mean()


class _UnevenBlock(nn.Module):
    """A block that returns a mapping with a second entry for the loss, as a router does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"x": x + (self.side(y) if x.shape[0] % 2 else y), "gate": y.sigmoid().mean()}


def _sums_gates(net: _Net, x: Tensor) -> Tensor:
    gates = []
    for block in net.blocks:
        found = block(x)
        x = found["x"] * 1.5
        gates.append(found["gate"])
    return x.square().mean() + torch.stack(gates).sum()


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        if isinstance(memory, _Box):
            return x + self.own(x) * memory.held
        scores = self.cross(x) @ memory.transpose(1, 2)
        return x + self.own(x) + scores.softmax(-1) @ memory


class _Box:
    """An object of no known type that hides a tensor."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class _EncoderDecoder(nn.Module):
    """A model whose decoder blocks each take the encoder's output."""

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


def _boxes(net: _Net, x: Tensor) -> Tensor:
    box = _Box(net.first(x))
    for block in net.blocks:
        x = block(x, box)
    return x.square().mean()


class _LanguageBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor, *, bias: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        scores = self.mix(self.norm(x)) @ x.transpose(1, 2) + bias + bias.square()
        x = x + scores.masked_fill(mask, float("-inf")).softmax(-1) @ x
        return x + self.down(torch.nn.functional.gelu(self.up(x))), None


class _Language(nn.Module):
    """A language model with tied weights, odd sizes, and a trained bias that the blocks share."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.bias = nn.Embedding(16, 1)
            self.blocks = nn.ModuleList(_LanguageBlock() for _ in range(3))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        given, wanted = ids[:, :-1], ids[:, 1:]
        x, places = self.embed(given), torch.arange(given.shape[1], device=ids.device)
        bias = self.bias((places[:, None] - places).abs()).squeeze(-1)
        mask = places[:, None] < places
        for block in self.blocks:
            x, _ = block(x, bias=bias, mask=mask)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())}


def _make(kind: str) -> nn.Module:
    if kind in ("tied", "untied"):
        return _Language(is_tied=kind == "tied")
    if kind == "encoder and decoder":
        return _EncoderDecoder()
    net = _Net(_plain if kind.endswith("frozen blocks") else WAYS[kind])
    with seeded(2):
        if kind == "mappings":
            net.blocks = nn.ModuleList(_UnevenBlock() for _ in range(3))
        elif kind == "boxed":
            net.blocks = nn.ModuleList(_Decoder() for _ in range(3))
    if kind.endswith("frozen blocks"):
        for part in (net.first, *net.blocks[: int(kind[0])]):
            part.requires_grad_(False)
    elif kind == "hooks":
        net.out.weight.register_hook(lambda grad: grad * 0.5)
        net.blocks[1][0].weight.register_hook(lambda grad: grad * 0.5)
    elif kind.startswith("a weight with a hook"):
        net.first.weight.register_hook(lambda grad: grad * 0.5)
    elif kind == "stashed":

        def stash(module: Any, args: Any) -> None:
            net.stashed = module[0](args[0]).square().mean()

        net.blocks[1].register_forward_pre_hook(stash)
    return net


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": _plain,
    "branches": _branches,
    "mappings": _sums_gates,
    "skips": _skips,
    "the first added": _adds_the_first,
    "hooks": _hooks,
    "dropout": _drops,
    "called again": _in_order(0, 1, 2, 3, 0),
    "reversed": _in_order(3, 2, 1, 0),
    "left out": _in_order(0, 1),
    "boxed": _boxes,
    "stashed": lambda net, x: _plain(net, x) + net.stashed,  # by a block, beside its output
    "reads another": _reads_another,
    "a weight with a hook": lambda net, x: _plain(net, x) + _square(net),
    "a weight with a hook and dropout": lambda net, x: _drops(net, x) + _square(net),
}


def _batches(model: nn.Module, step: int, rank: int, number: int = 3) -> list[Any]:
    """Draw micro-batches of different sizes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if isinstance(model, _Language):
        sizes = [(1 + (step + micro) % 3, 5 + micro) for micro in range(number)]
        return [{"ids": torch.randint(0, VOCAB, s, generator=generator)} for s in sizes]
    return [torch.randn(2 + micro, 4, WIDTH, generator=generator) for micro in range(number)]


# ------------------------------------------------------------------------------- the same bits


def _train(
    kind: str | nn.Module, config: dict[str, Any], ranks: SimulatedRanks | None, steps: int = 3
) -> tuple[Any, ...]:
    """Train and return losses and norms, skipped steps, and values."""
    model = _make(kind) if isinstance(kind, str) else kind
    engine = zero_core.build(model, config, process_group=ranks)
    seen = []
    for step in range(steps):
        batches = [
            x.to(engine.device) if isinstance(x, Tensor) else x
            for x in _batches(model, step, engine.rank, engine.gradient_accumulation_steps)
        ]
        loss = engine.train_batch(batches).item()
        seen.append((loss, repr(engine.get_global_grad_norm())))  # NaN is NaN
    values = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return seen, engine.skipped_steps, {name: value.cpu() for name, value in values.items()}


def _same_bits(
    ranks: SimulatedRanks | None,
    kind: str,
    config: dict[str, Any],
    schedule: str = "vertical",
    steps: int = 3,
) -> int:
    expected = _train(kind, config, ranks, steps)
    found = _train(kind, config | {"accumulation_schedule": schedule}, ranks, steps)
    assert found[:2] == expected[:2]
    assert_same(found[2], expected[2])
    return expected[1]


KINDS = [
    *("tied", "untied", "plain", "2 frozen blocks", "4 frozen blocks", "branches", "mappings"),
    *("encoder and decoder", "skips", "the first added", "hooks"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_bits_are_those_of_the_horizontal_schedule(world_size, stage, kind):
    simulate(_same_bits, world_size, kind, _config(stage))


SETTINGS: dict[str, dict[str, Any]] = {
    "activations kept": {"activation_checkpointing": None},
    "inputs on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "sums in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "a seed": {"seed": 5},
    "any number of ranks": {"world_size_invariant": True},
    "a sum, not a mean": {"gradient_allreduce_op": "sum"},
    **{
        name: {"optimizer": {"type": name, "params": {"lr": 1e-2}}}
        for name in ("Adam", "Adagrad", "Lion", "Muon")
    },
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_are_the_same_with(world_size, name):
    simulate(_same_bits, world_size, "plain", _config(3) | SETTINGS[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_bits_are_the_same_at_every_precision_with_clipping_and_overflow(world_size, stage, dtype):
    further: dict[str, Any] = {"gradient_clipping": 0.5}
    if dtype != "fp32":
        further[dtype] = {"enabled": True}
    if dtype == "fp16":
        further["fp16"] |= {"hysteresis": 1, "initial_scale_power": 18}
    skipped = simulate(_same_bits, world_size, "tied", _config(stage, **further), "vertical", 8)
    assert [0 < num < 8 for num in skipped] == [dtype == "fp16"] * world_size


def _draws_the_same(ranks: SimulatedRanks | None, further: dict[str, Any]) -> None:
    for stage in (0, 3):
        _same_bits(ranks, "dropout", _config(stage) | further)


def _draws_the_same_alone() -> None:
    _draws_the_same(None, {})


@pytest.mark.slow
def test_dropout_draws_the_same_numbers():
    run_alone(_draws_the_same_alone)
    run_on_processes(_draws_the_same, 2, {})
    run_on_processes(_draws_the_same, 2, {"world_size_invariant": True})


def _falls_back_with_dropout(ranks: SimulatedRanks) -> None:
    _same_bits(ranks, "a weight with a hook and dropout", _config(), "auto")


def test_step_draws_the_same_numbers_after_auto_refused_the_vertical_schedule():
    run_on_processes(_falls_back_with_dropout, 2)


def test_random_numbers_of_the_program_are_left_alone():
    for schedule in ("horizontal", "vertical"):
        model = _make("dropout")
        engine = zero_core.build(model, _config(3, accumulation_schedule=schedule))
        before = torch.get_rng_state()
        engine.train_batch(_batches(model, 0, 0))
        assert torch.equal(torch.get_rng_state(), before)


def _like_a_loop(ranks: SimulatedRanks, stage: int) -> None:
    model = _make("tied")
    engine = zero_core.build(model, _config(stage), process_group=ranks)
    for step in range(3):
        for inputs in _batches(model, step, ranks.rank):
            engine.backward(engine(**inputs)["loss"])
            engine.step()
    vertical = _train("tied", _config(stage) | VERTICAL, ranks)
    assert_same(vertical[2], engine.full_state_dict(dtype=torch.float32))


@pytest.mark.parametrize("stage", [0, 3])
def test_bits_are_those_of_a_loop_of_forward_backward_and_step(stage):
    simulate(_like_a_loop, 2, stage)


def _train_on_late_device(world_size: int) -> None:
    late_device.load()
    host = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for seed, further in enumerate(({}, host, {"zero_optimization": {"stage": 1}})):
        config = _config() | further

        def train(ranks: Any, schedule: dict[str, str], config: Any = config) -> tuple[Any, ...]:
            return _train("plain", config | schedule, ranks)

        expected = simulate(train, world_size, {})
        late_device.set_delays(seed=seed, kernel_s=5e-5, copy_s=2e-3)
        for found, exact in zip(
            simulate(train, world_size, VERTICAL, device="late"), expected, strict=True
        ):
            assert found[0] == exact[0]
            assert_same(found[2], exact[2])


@pytest.mark.parametrize("world_size", [1, 2])
def test_bits_on_an_accelerator_are_those_of_the_cpu(world_size):
    run_alone(_train_on_late_device, world_size)


def _compiled() -> None:
    for block in (None, {}):
        found = []
        for schedule in ("horizontal", "vertical"):
            model = _make("plain")
            for module in model.blocks:
                module.compile(backend="aot_eager")
            config = _config(activation_checkpointing=block, accumulation_schedule=schedule)
            found.append(_train(model, config, None))
        assert found[0][0] == found[1][0]
        assert_same(found[0][2], found[1][2])


def test_bits_are_the_same_with_compiled_blocks():
    run_alone(_compiled)


# ------------------------------------------------------------------------------------ its costs


def _gathers_twice(ranks: SimulatedRanks, micro_steps: int) -> None:
    config = _config(3, gradient_accumulation_steps=micro_steps)
    found = {}
    for schedule in ("horizontal", "vertical"):
        config["accumulation_schedule"] = schedule
        engine = zero_core.build(_make("untied"), config, process_group=ranks)
        for step in range(3):
            engine.train_batch(_batches(engine.module, step, ranks.rank, micro_steps))
        with torch.device("meta"):
            model = _make("untied")
        planned = zero_core.plan(model, config, ranks.size, device_type="cpu").traffic
        rows = {(row.collective, row.content): row for row in engine.comm_report()}
        assert {(row.collective, row.content): row for row in planned} == rows
        found[schedule] = rows["all_gather", "parameters"]
        engine.close()
    assert found["horizontal"].num_calls == micro_steps * found["vertical"].num_calls
    assert found["horizontal"].sent_bytes == micro_steps * found["vertical"].sent_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_steps", [2, 5])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_are_gathered_in_two_passes_per_step_however_many_micro_batches(
    world_size, micro_steps
):
    simulate(_gathers_twice, world_size, micro_steps)


def test_logits_of_one_micro_batch_are_in_memory_at_a_time():
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append(weakref.ref(output))
        alive.append(sum(ref() is not None for ref in made))

    engine = zero_core.build(_make("plain"), _config() | VERTICAL)
    engine.module.out.register_forward_hook(note)
    engine.train_batch(_batches(engine.module, 0, 0))
    assert max(alive) == 1
    assert all(ref() is None for ref in made)


# ---------------------------------------------------------------------- failures and evaluations


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fails_in", ["blocks.0", "blocks.2", "out"])
def test_training_goes_on_after_a_forward_that_failed_and_an_evaluation(fails_in, stage):
    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        if is_failing and output.shape[0] == 3:
            raise ArithmeticError("on purpose")

    config = _config(stage) | VERTICAL
    expected = _train("plain", config, None)
    engine = zero_core.build(_make("plain"), config)
    engine.module.get_submodule(fails_in).register_forward_hook(fail)
    for step in range(3):
        batches = _batches(engine.module, step, 0)
        is_failing = True
        with pytest.raises(ArithmeticError, match="on purpose"):
            engine.train_batch(batches)
        is_failing = False
        with torch.no_grad():
            engine(_batches(engine.module, 9, 0)[0])
        loss = engine.train_batch(batches, lambda x: engine(x)).item()
        assert loss == expected[0][step][0]
    assert engine.global_steps == 3
    assert_same(engine.full_state_dict(), expected[2])


REFUSED = [
    ("called again", r"unit 1 \(blocks.0\) is called again after unit 4 \(blocks.3\)"),
    ("reversed", r"unit 4 \(blocks.3\) is called before unit 1 \(blocks.0\)"),
    ("left out", r"forward ended without a call of unit 3 \(blocks.2\)"),
    ("boxed", r"unit 1 \(blocks.0\) uses a tensor .* the code before the blocks computed"),
    ("stashed", r"leaves a tensor in the attribute stashed, where another micro-batch would"),
    ("a weight with a hook", r"before the blocks and code behind it use first.weight, on which a"),
    ("reads another", r"uses blocks.3.0.bias of unit 4"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind for kind, _ in REFUSED])
def test_blocks_that_are_no_sequence_are_refused_by_name(kind, message):
    engine = zero_core.build(_make(kind), _config(2) | VERTICAL)
    with pytest.raises(AccumulationScheduleError, match=message):
        engine.train_batch(_batches(engine.module, 0, 0))


def test_model_without_blocks_is_refused():
    with pytest.raises(AccumulationScheduleError, match="Linear has none"):
        zero_core.build(nn.Linear(3, 3), _config() | VERTICAL)


def _changes_buffers(ranks: SimulatedRanks) -> None:
    def count(module: Any, args: Any, output: Any) -> None:
        module.num_calls += 1

    def train(*, broadcasts: bool) -> None:
        model: Any = _make("plain")
        model.blocks[1].register_buffer("num_calls", torch.zeros(()))
        model.blocks[1].register_forward_hook(count)
        config = _config(2, broadcast_buffers=broadcasts) | VERTICAL
        engine = zero_core.build(model, config, process_group=ranks)
        engine.train_batch(_batches(model, 0, ranks.rank))

    train(broadcasts=False)
    with pytest.raises(AccumulationScheduleError, match=r"blocks.1\) changes its buffer num_calls"):
        train(broadcasts=True)


def test_block_that_changes_a_buffer_of_all_ranks_is_refused():
    simulate(_changes_buffers, 2)


def test_loop_over_micro_batches_is_refused():
    engine = zero_core.build(_make("plain"), _config() | VERTICAL)
    loss = engine(_batches(engine.module, 0, 0)[0])
    with pytest.raises(AccumulationScheduleError, match=r"backward\(\): .* call engine"):
        engine.backward(loss)
    loss.backward()
    with pytest.raises(AccumulationScheduleError, match=r"step\(\): .* call engine"):
        engine.step()
    with pytest.raises(AccumulationScheduleError, match=r"idle_step\(\)"):
        engine.idle_step()


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_step_needs_all_of_its_micro_batches_and_none_before(schedule):
    engine = zero_core.build(_make("plain"), _config(accumulation_schedule=schedule))
    with pytest.raises(ValueError, match="has 3 micro-batches, found 2"):
        engine.train_batch(_batches(engine.module, 0, 0, 2))
    engine.train_batch(iter(_batches(engine.module, 0, 0, 5)))
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    if schedule == "horizontal":
        engine.backward(engine(_batches(engine.module, 0, 0)[0]))
        engine.step()
        with pytest.raises(RuntimeError, match="runs a whole step"):
            engine.train_batch(_batches(engine.module, 0, 0))


# ----------------------------------------------------------------------------------------- auto


def _build(ranks: SimulatedRanks, config: dict[str, Any]) -> None:
    zero_core.build(_make("plain"), config, process_group=ranks)


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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plain", r"auto chose (vertical|horizontal): a step took .* s vertically"),
        # Seen within a forward, and when it has ended.
        ("called again", "auto chose horizontal: rank 0: accumulation_schedule = 'vertical'"),
        ("a weight with a hook", "auto chose horizontal: rank 0: accumulation_schedule ="),
    ],
)
def test_auto_tries_both_schedules_and_says_which_one_it_chose(kind, said, caplog):
    caplog.set_level("INFO", "zero_core")
    simulate(_same_bits, 2, kind, _config(), "auto", 6)
    assert re.search(said, caplog.text)
