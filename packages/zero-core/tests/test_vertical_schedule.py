"""The vertical schedule: the bits of the horizontal one, with two passes of gathers per step."""

import random
import re
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _device, _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

import zero_core
from zero_core.errors import AccumulationScheduleError, MissingPartError, RankMismatchError
from zero_core.testing.failing import Interruption
from zero_core.testing.models import seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import on_processes, spawn
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import assert_same, train

WIDTH, NUM_BLOCKS, STEPS = 7, 4, 3
VERTICAL = {"accumulation_schedule": "vertical"}


def _config(stage=3, **further):
    return Case(stage, accumulation=3, top={"activation_checkpointing": {}, **further}).config()


def _mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class _Net(nn.Module):
    def __init__(self, way, block):
        super().__init__()
        with seeded(1):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.encoder = nn.ModuleList(_mlp() for _ in range(2 * (way is _crosses)))
            self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
            self.out = nn.Linear(WIDTH, 1)
            self.bias = nn.Parameter(torch.ones(WIDTH))
        self.way = way
        self.stashed = None

    def forward(self, x):
        return self.way(self, x).square().mean()


class _UnevenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.side = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x)
        return {"x": x + (self.side(y) if x.shape[0] % 2 else y), "gate": y.sigmoid().mean()}


class _Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, memory):
        memory = getattr(memory, "held", memory)
        scores = self.cross(x) @ memory.transpose(1, 2)
        return x + self.own(x) + scores.softmax(-1) @ memory, None


def _plain(net, x):
    x = net.first(x)
    for block in net.blocks:
        x = x + block(x)
    return net.out(x)


def _drops(net, x):
    x = nn.functional.dropout(net.first(x), 0.3)
    for block in net.blocks:
        x = x + nn.functional.dropout(block(nn.functional.dropout(x, 0.2)), 0.3)
    return nn.functional.dropout(net.out(x), 0.3)


def _branches(net, x):
    is_even = x.shape[0] % 2 == 0
    x = net.first(x) + net.bias if is_even else net.first(x)
    for block in net.blocks:
        x = x + block(x)
    return net.out(x) if is_even else x


def _adds_the_first(net, x):
    x = first = net.first(x)
    for block in net.blocks:
        x = block(x) + first
    return x


def _hooks(net, x):
    x = net.first(x)
    for block in net.blocks:
        x = x + block(x)
        x.register_hook(lambda grad: grad * 0.9)
    return torch.cat([net.out(x), net.out(x + 1.0)])


def _sums_gates(net, x):
    gates = []
    for block in net.blocks:
        found = block(x)
        x = found["x"] * 1.5
        gates.append(found["gate"])
    return torch.cat([x.flatten(), torch.stack(gates)])


def _crosses(net, x):
    memory = x
    for block in net.encoder:
        memory = memory + block(memory)
    memory = net.first(memory)
    for block in net.blocks:
        x, _ = block(x, memory=memory)
    return net.out(x)


def _boxes(net, x):
    box = SimpleNamespace(held=net.first(x))  # an object of unknown type that hides a tensor
    for block in net.blocks:
        x, _ = block(x, memory=box)
    return x


def _differentiates(net, x):
    y = _plain(net, x.requires_grad_())
    return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def _in_order(*order):
    def call(net, x):
        for number in order:
            x = x + net.blocks[number](x)
        return x

    return call


def _reads_another(net, x):
    for number, block in enumerate(net.blocks):
        x = x + block(x)
        if number == 0:
            x = x + net.blocks[3][0].bias[:WIDTH]
    return x


def _in_inference_mode(net, x):
    with torch.inference_mode():
        return net.blocks[0](x)


def _casts_apart(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = net.first(x)
        with torch.autocast("cpu", enabled=False):  # keeps the cached cast of net.first
            for block in net.blocks:
                x = block(x.float())
        return net.out(net.first(x))


def _casts_around_a_pause(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = net.blocks[0](x)
        return _in_order(1, 2, 3)(net, net.first(x))


class _CastsTwice(_UnevenBlock):
    def forward(self, x):
        first, second = (self.side.weight.to(torch.bfloat16).float() for _ in range(2))
        return self.inner(x @ first) @ second


def _in_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return _plain(net, x)


def _ties(net, x):
    return nn.functional.linear(_adds_the_first(net, x), net.first.weight)


WAYS = {
    "tied": _ties,
    "branches": _branches,
    "mappings": _sums_gates,
    "encoder and decoder": _crosses,
    "the first added": _adds_the_first,
    "hooks": _hooks,
    "dropout": _drops,
    "called again": _in_order(0, 1, 2, 3, 0),
    "reversed": _in_order(3, 2, 1, 0),
    "left out": _in_order(0, 1),
    "boxed": _boxes,
    "differentiates": _differentiates,
    "stashed": lambda net, x: _plain(net, x) + net.stashed,
    "reads another": _reads_another,
    "casts apart": _casts_apart,
    "casts around a pause": _casts_around_a_pause,
    "casts twice": _in_autocast,
    "in inference mode": _in_inference_mode,
    "a weight with a hook": _ties,
    "a weight with a hook and dropout": lambda net, x: _drops(net, x) + net.first.weight.sum(),
}
BLOCKS = {
    "casts twice": _CastsTwice,
    "mappings": _UnevenBlock,
    "encoder and decoder": _Decoder,
    "boxed": _Decoder,
}


def _make(kind):
    net = _Net(WAYS.get(kind, _plain), BLOCKS.get(kind, _mlp))
    if kind.endswith("frozen blocks"):
        for part in (net.first, *net.blocks[: int(kind[0])]):
            part.requires_grad_(False)
    elif kind == "compiled":
        for block in net.blocks:
            block.compile(backend="aot_eager")
    elif kind == "hooks":
        net.out.weight.register_hook(lambda grad: grad * 0.5)
        net.blocks[1][0].weight.register_hook(lambda grad: grad * 0.5)
    elif kind.startswith("a weight with a hook"):
        net.first.weight.register_hook(lambda grad: grad * 0.5)
    elif kind == "casts around a pause":
        net.blocks[1].register_forward_pre_hook(lambda _, args: net.first(args[0]))
    elif kind == "stashed":

        def stash(module, args):
            net.stashed = module[0](args[0]).mean()

        net.blocks[1].register_forward_pre_hook(stash)
    return net


def _batches(step, rank=0, number=3):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(2 + micro, 4, WIDTH, generator=generator) for micro in range(number)]


def _train(model, config, ranks):
    engine = zero_core.build(model, config, process_group=ranks)
    seen = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(_batches(step, engine.rank))).item()
        seen.append((loss, repr(engine.get_global_grad_norm())))
    values = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return seen, engine.skipped_steps, values


def _same_bits(ranks, kind, config, schedule="vertical"):
    expected = _train(_make(kind), config, ranks)
    found = _train(_make(kind), config | {"accumulation_schedule": schedule}, ranks)
    assert found[:2] == expected[:2]
    assert_same(found[2], expected[2])
    return expected[1]


KINDS = ["plain", "2 frozen blocks", "4 frozen blocks", *list(WAYS)[:6]]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bits_are_those_of_the_horizontal_schedule(world_size, stage, kind):
    simulate(_same_bits, world_size, kind, _config(stage))


CLIPPED = {"gradient_clipping": 0.5}
OVERFLOWING = {"enabled": True, "hysteresis": 1, "initial_scale_power": 18}
SETTINGS = {
    "clipping in bf16": {**CLIPPED, "bf16": {"enabled": True}},
    "clipping and overflow": {**CLIPPED, "fp16": OVERFLOWING},
    "activations kept": {"activation_checkpointing": None},
    "inputs on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "sums in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "a weight that is cast twice": {},
    "any number of ranks": {"world_size_invariant": True},
    "a sum, not a mean": {"gradient_allreduce_op": "sum"},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bits_are_the_same_with(world_size, stage, name):
    # Below stage 3 a tied weight is refused with autocast, which casts a weight once for all uses.
    kind = {"autocast": "plain", "a weight that is cast twice": "casts twice"}.get(name, "tied")
    config = _config(stage) | SETTINGS[name]
    skipped = simulate(_same_bits, world_size, kind, config)
    assert [0 < num < STEPS for num in skipped] == [name == "clipping and overflow"] * world_size


CASES_OF = {
    1: [("compiled", {"activation_checkpointing": again}, "vertical") for again in (None, {})],
    2: [
        *(("dropout", {"world_size_invariant": is_so}, "vertical") for is_so in (False, True)),
        ("a weight with a hook and dropout", {}, "auto"),  # the hook makes "auto" choose horizontal
        ("tied", {"seed": 5}, "vertical"),  # `build` seeds the generator of the whole process
    ],
}


@pytest.mark.parametrize("world_size", CASES_OF)
@on_processes()
def test_bits_are_the_same_on_processes(ranks):
    for kind, further, schedule in CASES_OF[ranks.size]:
        _same_bits(ranks, kind, _config() | further, schedule)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_bits_are_those_of_a_loop_of_forward_backward_and_step(ranks, stage):
    engine = zero_core.build(_make("tied"), _config(stage), process_group=ranks)
    train(engine, [x for step in range(STEPS) for x in _batches(step, ranks.rank)])
    vertical = _train(_make("tied"), _config(stage) | VERTICAL, ranks)
    assert_same(vertical[2], engine.full_state_dict(dtype=torch.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_steps", [2, 5])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_parameters_are_gathered_in_two_passes_per_step_however_many_micro_batches(
    ranks, micro_steps
):
    config = _config(gradient_accumulation_steps=micro_steps)
    found = {}
    for schedule in ("horizontal", "vertical"):
        config["accumulation_schedule"] = schedule
        engine = zero_core.build(_make("plain"), config, process_group=ranks)
        for step in range(STEPS):
            engine.train_batch(_batches(step, ranks.rank, micro_steps))
        with torch.device("meta"):
            planned = zero_core.plan(_make("plain"), config, ranks.size, device_type="cpu").traffic
        rows = {(row.collective, row.content): row for row in engine.comm_report()}
        assert {(row.collective, row.content): row for row in planned} == rows
        found[schedule] = rows["all_gather", "parameters"]
        engine.close()
    assert found["horizontal"].num_calls == micro_steps * found["vertical"].num_calls
    assert found["horizontal"].sent_bytes == micro_steps * found["vertical"].sent_bytes


def test_memory_has_the_blocks_inputs_of_all_micro_batches_and_the_logits_of_one():
    inputs, logits, num_alive = [], [], []

    def note_input(module, args):
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    def note_logits(module, args, output):
        logits.append(StorageWeakRef(output.untyped_storage()))
        num_alive.append([sum(not ref.expired() for ref in refs) for refs in (inputs, logits)])

    engine = zero_core.build(_make("plain"), _config() | VERTICAL)
    for block in engine.module.blocks:
        block.register_forward_pre_hook(note_input)
    engine.module.out.register_forward_hook(note_logits)
    engine.train_batch(_batches(0))
    # A micro-batch passes through the last block and the head before the next one does.
    assert num_alive == [[3 * (NUM_BLOCKS - 1) + number, 1] for number in (1, 2, 3)]
    assert all(ref.expired() for ref in (*inputs, *logits))


@pytest.mark.parametrize(
    ("stage", "fails_in"), [(1, "blocks.2"), (3, "blocks.0"), (3, "blocks.2"), (3, "out")]
)
def test_training_goes_on_after_a_forward_that_failed_and_an_evaluation(fails_in, stage):
    def fail(module, args, output):
        if is_failing and output.shape[0] == 3:
            raise ArithmeticError("on purpose")

    config = _config(stage) | VERTICAL
    expected = _train(_make("plain"), config, None)
    engine = zero_core.build(_make("plain"), config)
    engine.module.get_submodule(fails_in).register_forward_hook(fail)
    for step in range(STEPS):
        is_failing = True
        with pytest.raises(ArithmeticError, match="on purpose"):
            engine.train_batch(_batches(step))
        is_failing = False
        with torch.no_grad():
            engine(_batches(9)[0])
        loss = engine.train_batch(_batches(step), lambda x: engine(x)).item()
        assert loss == expected[0][step][0]
    assert engine.global_steps == STEPS
    assert_same(engine.full_state_dict(), expected[2])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("called again", r"unit 1 \(blocks.0\) is called again after unit 4 \(blocks.3\)"),
        ("reversed", r"unit 4 \(blocks.3\) is called before unit 1 \(blocks.0\)"),
        ("left out", r"forward ended without a call of unit 3 \(blocks.2\)"),
        ("boxed", r"unit 1 \(blocks.0\) uses a tensor .* the code before the blocks computed"),
        ("stashed", r"leaves a tensor in the attribute stashed, where another micro-batch would"),
        ("a weight with a hook", r"before the blocks and code behind it use first.weight, on wh"),
        ("reads another", r"uses blocks.3.0.bias of unit 4"),
        ("casts apart", r"code behind the blocks uses a tensor .* code before the blocks computed"),
        ("casts around a pause", r"unit 2 \(blocks.1\) uses a tensor"),
        ("differentiates", "micro-batch 0: torch.autograd.grad needs the graph of the whole"),
        ("in inference mode", r"blocks.0\) is called on another thread, or within torch.inference"),
    ],
)
def test_blocks_that_are_no_sequence_are_refused_by_name(kind, message):
    engine = zero_core.build(_make(kind), _config(2) | VERTICAL)
    with pytest.raises(AccumulationScheduleError, match=message):
        engine.train_batch(_batches(0))


def test_vertical_schedule_without_greenlet_is_refused_and_auto_is_horizontal(monkeypatch, caplog):
    monkeypatch.setattr("zero_core.vertical.schedule.greenlet", None)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    said = r"accumulation_schedule = 'vertical' needs .*: pip install greenlet, or set 'horiz"
    with pytest.raises(MissingPartError, match=said):
        zero_core.build(_make("plain"), _config() | VERTICAL)
    caplog.set_level("INFO", "zero_core")
    simulate(_same_bits, 2, "called again", _config(), "auto")
    (said,) = re.findall("auto chose .*", caplog.text)
    assert said == "auto chose horizontal: greenlet is not installed: pip install greenlet"


def _lacks_greenlet(rank, world_size):
    if rank == 1:
        sys.modules["greenlet"] = None
    with pytest.raises(RankMismatchError, match=r"different configuration: .*vertical"):
        zero_core.build(_make("plain"), _config(accumulation_schedule="auto"))


def test_auto_is_refused_where_one_rank_alone_lacks_greenlet():
    spawn(_lacks_greenlet, 2)


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("cpu"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "one autograd thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda: _force_original_view_tracking(True),
    "function mode": BaseTorchFunctionMode,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "hooks on saved tensors": save_on_cpu,
}


def _visible_state():
    num_modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    depth, _ = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    flags = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), hooks is not None, depth
    kernels = torch.backends.cuda.flash_sdp_enabled(), torch._C._get_overrideable_sdp_enabled()
    modes = torch.is_anomaly_enabled(), _python_dispatch._is_in_torch_dispatch_mode
    backward = torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled()
    return num_modes, flags, kernels, modes, backward, _device.CURRENT_DEVICE, threading.get_ident()


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_step_within_no_grad_fails(schedule):
    engine = zero_core.build(_make("plain"), _config(accumulation_schedule=schedule))
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        engine.train_batch(_batches(0))


@pytest.mark.parametrize("inner", [3, None])
@pytest.mark.parametrize("name", CONTEXTS)
def test_context_holds_where_it_was_entered_on_one_thread(name, inner):
    inner = inner or 3 * (name == "no_grad")  # a whole step within no_grad fails

    def in_one_forward(net, x):
        x = net.first(x)
        with CONTEXTS[name]() if x.shape[0] == inner else nullcontext():
            for block in net.blocks:
                x = x + block(x)
        return net.out(x)

    def train(schedule):
        def note(module, args, output):
            seen.append((len(args[0]), _visible_state()))

        net, seen, before = _Net(in_one_forward, _mlp), [], _visible_state()
        for block in net.blocks:
            block.register_forward_hook(note)
        engine = zero_core.build(net, _config(1, activation_checkpointing=None) | schedule)
        with nullcontext() if inner else CONTEXTS[name]():
            loss = engine.train_batch(_batches(0)).item()
        assert _visible_state() == before
        return loss, sorted(seen), engine.full_state_dict()

    expected, found = train({}), train(VERTICAL)
    assert found[:2] == expected[:2]
    assert_same(found[2], expected[2])


@pytest.mark.parametrize("error", [AttributeError, KeyboardInterrupt])
def test_paused_forwards_are_unwound_and_the_error_has_the_line_of_the_model(error):
    def keeps_on(net, x):
        with torch.autocast("cpu", torch.bfloat16), save_on_cpu():
            for block in net.blocks:
                try:
                    x = block(x) / (net.missing if x.shape[0] == 3 else 1)
                except BaseException:
                    left.append(x.shape[0])
                    if x.shape[0] == 3:
                        raise
                    if x.shape[0] == 2 and error is KeyboardInterrupt:  # while the frames unwind
                        raise error("missing") from None
        return x

    left, before = [], _visible_state()
    engine = zero_core.build(_Net(keeps_on, _mlp), _config() | VERTICAL)
    with pytest.raises(error, match="missing") as caught:
        engine.train_batch(_batches(0))
    line = "net.missing if" if error is AttributeError else "raise error("
    assert any(line in str(entry.statement) for entry in caught.traceback)
    assert set(left) == {2, 3, 4}
    assert _visible_state() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_step_that_was_left_at_any_moment_begins_anew():
    def step(left):
        engine, before = zero_core.build(_make("tied"), _config() | VERTICAL), _visible_state()
        with pytest.raises(KeyboardInterrupt) if left.moment else nullcontext(), left.armed():
            engine.train_batch(_batches(0))
        assert _visible_state() == before
        if engine.place.unfinished:  # interrupted within step(), which other tests cover
            return expected
        if not engine.global_steps:
            engine.train_batch(_batches(0))
        return engine.full_state_dict()

    never = Interruption(0, is_signal=False, packages=("zero_core",))
    expected = step(never)
    for number, moment in enumerate(random.Random(0).sample(range(1, never.num_calls + 1), 24)):
        assert_same(step(Interruption(moment, number % 2 == 1, never.packages)), expected)


def test_model_without_blocks_is_refused():
    with pytest.raises(AccumulationScheduleError, match="Linear has none"):
        zero_core.build(nn.Linear(3, 3), _config() | VERTICAL)


@on_ranks(2)
def test_block_that_changes_a_buffer_of_all_ranks_is_refused(ranks):
    def count(module, args, output):
        module.num_calls += 1

    def step(*, broadcasts):
        model = _make("plain")
        model.blocks[1].register_buffer("num_calls", torch.zeros(()))
        model.blocks[1].register_forward_hook(count)
        config = _config(2, broadcast_buffers=broadcasts) | VERTICAL
        zero_core.build(model, config, process_group=ranks).train_batch(_batches(0, ranks.rank))

    step(broadcasts=False)
    with pytest.raises(AccumulationScheduleError, match=r"blocks.1\) changes its buffer num_calls"):
        step(broadcasts=True)


def test_loop_over_micro_batches_is_refused():
    engine = zero_core.build(_make("plain"), _config() | VERTICAL)
    loss = engine(_batches(0)[0])
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
        engine.train_batch(_batches(0, number=2))
    for batches, why in (
        (_batches(0, number=5), "list has more, of which each call would take"),
        (torch.ones(3, 4), r"one Tensor: give a list, such as tensor.chunk\(3\)"),
        (dict.fromkeys("abc"), "one dict: give a list"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.train_batch(batches)
    engine.train_batch(iter(_batches(0, number=5)))
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    if schedule == "horizontal":
        train(engine, _batches(0)[:1])
        with pytest.raises(RuntimeError, match="runs a whole step"):
            engine.train_batch(_batches(0))


@pytest.mark.parametrize(
    ("kind", "further", "said"),
    [
        ("plain", {}, "auto chose vertical: gathers are saved"),
        # The engine finds the reason within the first forward or after it.
        ("called again", {}, "auto chose horizontal: rank 0: accumulation_schedule = 'vertical'"),
        ("a weight with a hook", {}, "auto chose horizontal: rank 0: accumulation_schedule ="),
        *(
            ("plain", further, "auto chose horizontal: no gathers are saved")
            for further in (
                {"zero_optimization": {"stage": 2}},
                {"activation_checkpointing": None},
                {"gradient_accumulation_steps": 1},
            )
        ),
    ],
)
def test_auto_chooses_a_schedule_with_the_same_bits_and_says_why(kind, further, said, caplog):
    caplog.set_level("INFO", "zero_core")
    simulate(_same_bits, 2, kind, _config() | further, "auto")
    assert re.search(said, caplog.text)
