"""Ctrl-C and exceptions anywhere in a step: training continues, or an error names the remedy."""

import random
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
from support.tiers import MadeTier

import zero_core
from zero_core.testing import Case, batch, check_left_anywhere, on_processes
from zero_core.testing.failing import Interruption
from zero_core.testing.training import assert_same, train_steps

LEFT = r"after step\(\) was left in the middle.*engine\.load_checkpoint\(\)"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_moments", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_left_at_any_moment_goes_on_or_the_engine_says_how(stage, num_moments, tmp_path):
    check_left_anywhere(Case(stage=stage).config(), tmp_path, num_moments)


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (3, 1)])
def test_a_train_batch_that_was_left_begins_its_step_anew(stage, accumulation):
    def interrupt(*args):
        raise KeyboardInterrupt

    found = []
    for is_left in (False, True):
        engine = _build(stage, gradient_accumulation_steps=accumulation)

        def left(inputs, engine=engine):
            loss = engine(**inputs)["loss"]
            if engine.micro_steps % accumulation == accumulation - 1:
                loss.register_hook(interrupt)
            return loss

        for step in range(2):
            batches = [batch(step, micro, 0) for micro in range(accumulation)]
            if is_left:
                with pytest.raises(KeyboardInterrupt):
                    engine.train_batch(batches, left)
            engine.train_batch(batches)
        found.append(engine.full_state_dict())
    assert_same(*found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_moments", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_save_or_load_left_at_any_moment_may_be_repeated(verb, num_moments, tmp_path):
    def train(left):
        engine = _build(3)
        for step in range(2):
            train_steps(engine, step, step + 1)
            engine.save_checkpoint(tmp_path, is_latest=step == 0)
        with pytest.raises(KeyboardInterrupt) if left.moment else nullcontext(), left.armed():
            if verb == "save":
                engine.save_checkpoint(tmp_path, tag="left")
            else:
                engine.load_checkpoint(tmp_path, tag="step-1")
        if engine.place.unfinished:
            with pytest.raises(RuntimeError, match="a load was left in the middle"):
                engine.full_state_dict()
            engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag="again")
        engine = _build(3)
        engine.load_checkpoint(tmp_path, tag="again")
        train_steps(engine, engine.global_steps, 3)
        return engine.full_state_dict()

    never = Interruption(0, is_signal=False, packages=("zero_core",))
    expected = train(never)
    moments = random.Random(1).sample(range(1, never.num_calls + 1), num_moments)
    for number, moment in enumerate(moments):
        left = Interruption(moment, is_signal=number % 2 == 1, packages=("zero_core",))
        assert_same(train(left), expected)


def _build(stage=2, **top):
    return Case(stage=stage, top=top).build()


def _go_backward(engine, step=0):
    engine.backward(engine(**batch(step, 0, 0))["loss"])


def _values_after(num_steps):
    engine = _build()
    train_steps(engine, 0, num_steps)
    return engine.full_state_dict()


def _interrupt_update(engine, num_signals=1):
    def interrupt(*args):
        handle.remove()
        for _ in range(num_signals):
            signal.raise_signal(signal.SIGINT)

    handle = engine.optimizer.register_step_pre_hook(interrupt)


@on_processes(2)
def test_sigint_on_one_of_two_ranks_changes_no_bit(ranks):
    for stage in (1, 3):
        found = []
        for is_interrupted in (False, ranks.rank == 0):
            engine, num_interrupts = _build(stage), 0
            if is_interrupted:
                _interrupt_update(engine)
            while engine.global_steps < 3:
                try:
                    train_steps(engine, engine.global_steps, engine.global_steps + 1)
                except KeyboardInterrupt:
                    num_interrupts += 1
            assert num_interrupts == is_interrupted
            found.append(engine.full_state_dict())
            engine.close()
        assert_same(*found)


@pytest.fixture
def handled():
    found = []

    def handle(signum, frame):
        assert frame is not None
        found.append(signum)

    before = signal.signal(signal.SIGINT, handle)
    yield found
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_deferred", [True, False])
def test_a_handler_of_the_program_is_called_after_the_step_or_stays_the_only_one(
    handled, is_deferred
):
    engine = _build()
    engine.should_defer_sigint = is_deferred
    own, seen = signal.getsignal(signal.SIGINT), []
    engine.optimizer.register_step_post_hook(lambda *args: seen.append(len(handled)))
    _interrupt_update(engine)
    train_steps(engine, 0, 1)
    assert (seen, handled) == ([0 if is_deferred else 1], [signal.SIGINT])
    assert signal.getsignal(signal.SIGINT) is own


def test_a_second_sigint_passes_and_the_engine_asks_for_a_checkpoint(tmp_path):
    engine = _build()
    engine.save_checkpoint(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    _interrupt_update(engine, num_signals=2)
    loss = engine(**batch(0, 0, 0))["loss"]
    engine.backward(loss, retain_graph=True)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert signal.getsignal(signal.SIGINT) is before
    uses = [
        lambda: engine(**batch(0, 0, 0)),
        lambda: engine.backward(loss),
        loss.backward,
        engine.step,
        lambda: engine.save_checkpoint(tmp_path, tag="half"),
        engine.full_state_dict,
        lambda: engine.load_checkpoint(tmp_path, without=("optimizer",)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=LEFT):
            use()
    with pytest.raises(zero_core.CheckpointError):
        engine.load_checkpoint(tmp_path / "none")
    with pytest.raises(RuntimeError, match=LEFT):
        engine.step()
    engine.load_checkpoint(tmp_path)
    train_steps(engine, 0, 1)
    assert_same(engine.full_state_dict(), _values_after(1))


class _Failing(MadeTier):
    fails = ""

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        if self.fails == "step":
            raise MemoryError

    def write_state(self, *args):
        super().write_state(*args)
        if self.fails == "load":
            raise MemoryError


@pytest.mark.parametrize("fails", ["step", "load"])
def test_values_that_an_exception_left_half_written_need_a_load(fails, tmp_path):
    engine = Case(2).build(state_tier=_Failing.made)
    tier = engine.sharded_state.tier
    engine.save_checkpoint(tmp_path)
    _go_backward(engine)
    tier.fails = fails
    with pytest.raises((MemoryError, zero_core.CheckpointError)):
        engine.step() if fails == "step" else engine.load_checkpoint(tmp_path)
    with pytest.raises(RuntimeError, match="was left in the middle"):
        _go_backward(engine)
    tier.fails = ""
    assert engine.resume(tmp_path) == {}
    train_steps(engine, 0, 1)
    assert_same(engine.full_state_dict(), _values_after(1))


def test_a_step_that_is_refused_needs_no_load():
    engine = _build()
    with engine.no_sync():
        _go_backward(engine)
        with pytest.raises(RuntimeError, match=r"leave no_sync\(\)"):
            engine.step()
    engine.zero_grad()
    train_steps(engine, 0, 1)
    assert_same(engine.full_state_dict(), _values_after(1))


def _run(engine, program):
    """Run the calls that the letters of ``program`` stand for. "S" also discards earlier losses."""
    losses = []
    for number, verb in enumerate(program):
        inputs = batch(number, 0, 0)
        match verb:
            case "F":
                losses.append(engine(**inputs)["loss"])
            case "B":
                engine.backward(losses.pop(0))
            case "R":
                engine.backward(losses[0], retain_graph=True)
            case "N":
                with engine.no_sync():
                    engine.backward(engine(**inputs)["loss"])
            case "X":
                engine.backward(engine(**inputs)["loss"] * float("nan"))
            case "E":
                with torch.no_grad():
                    engine(**inputs)
            case "S":
                engine.step()
                losses.clear()
            case "Z":
                engine.zero_grad()
            case "O":
                engine.optimizer.zero_grad()


def _told(caplog):
    return [r.getMessage() for r in caplog.records if "engine.zero_grad()" in r.getMessage()]


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_a_loop_that_began_again_before_step_is_told(stage, accumulation, caplog, monkeypatch):
    engine = _build(stage, gradient_accumulation_steps=accumulation)
    _run(engine, "FBS" * 2 + "FB" + "FB")
    (text,) = _told(caplog)
    assert "the gradient of 1 that no step() has taken" in text
    _run(engine, "SFBS" + "FBFBS")
    assert len(_told(caplog)) == 1
    engine = _build(stage)  # with `sys.last_value` set, as in notebooks, the first step reports too
    _run(engine, "FB")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    _run(engine, "FBS")
    assert len(_told(caplog)) == 2


@pytest.mark.parametrize(("program", "num_steps"), [("ZFBS", 0), ("OFBS", 2)])
def test_a_gradient_that_zero_grad_drops_within_a_step_is_told_once(program, num_steps, caplog):
    engine = _build(gradient_accumulation_steps=2)
    _run(engine, program * 4)
    assert engine.global_steps == num_steps
    assert caplog.text.count("drops the gradients of 1 finished micro-steps") == 1


@pytest.mark.parametrize(
    ("program", "num_told"),
    [
        *(("FBFBS" * 4, 0), ("FFBBS" * 4, 0)),  # two losses a step, or two micro-batches
        *(("FRBS" * 4, 0), ("NNFBS" * 4, 0)),
        ("FBFBFBS" * 3 + "FBS" + "FBFBFBS", 0),  # an epoch's last accumulation is shorter
        *(("FBSFBEESEFBSEE", 0), ("FBS" * 3 + "FBZFBS", 0)),
        *(("FBS" * 3 + "F" + "FBS" * 3, 0), ("FBS" * 3 + "NFBS", 0)),
        ("XSXSFBFBS", 1),  # steps that are skipped count
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_legal_programs_are_told_nothing(program, num_told, accumulation, caplog):
    _run(_build(gradient_accumulation_steps=accumulation), program)
    assert len(_told(caplog)) == num_told
    assert "drops the gradients" not in caplog.text
