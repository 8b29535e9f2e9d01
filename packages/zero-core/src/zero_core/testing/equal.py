"""Equality tests: adding a configuration variant must not change any bit of a training.

`Row` is one test case, and `check` runs it. `cover` chooses rows that contain every pair of values
that occurs in a valid row. A `Scenario` trains `Hard` on this rank's batches with a given engine,
and returns losses and other numbers to compare.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero_core
from zero_core.comm.groups import Ranks
from zero_core.engine import Engine
from zero_core.testing.models import batch, make_model
from zero_core.testing.oracle import Case, Trace
from zero_core.testing.ranks import run_on_processes
from zero_core.testing.simulated import simulate

Scenario = Callable[[Engine, Path], list[float]]
FOLDER = "FOLDER"
"""Placeholder in a configuration. `run_side` replaces it by the run's folder."""
_OTHER_WEIGHTS = "model.safetensors"


def _backward(engine: Engine, step: int, micro: int = 0, factor: float | None = None) -> float:
    """Run forward and backward of the loss times ``factor``. Return the unscaled loss."""
    loss = engine(**batch(step, micro, engine.rank))["loss"]
    engine.backward(loss if factor is None else loss * factor)
    found: float = loss.item()
    return found


def micro_step(engine: Engine, step: int, micro: int = 0, factor: float | None = None) -> float:
    loss = _backward(engine, step, micro, factor)
    engine.step()
    return loss


@torch.no_grad()
def evaluate(engine: Engine, step: int) -> float:
    engine.eval()
    loss: float = engine(**batch(step, 7, engine.rank))["loss"].item()
    engine.train()
    return loss


def _trains(engine: Engine, folder: Path) -> list[float]:
    # Forward branches and parameters without gradients differ between ranks.
    return [micro_step(engine, step) for step in range(7)]


def _accumulates(engine: Engine, folder: Path) -> list[float]:
    losses = []
    for step in range(3):
        for micro in range(3):
            with engine.no_sync() if step == 1 and micro < 2 else nullcontext():
                losses.append(_backward(engine, step, micro))
            engine.step()
    return losses


def _evaluates_in_between(engine: Engine, folder: Path) -> list[float]:
    # Evaluate before the first step, after each backward, after each `step` call, and at the end.
    losses = [evaluate(engine, 0), evaluate(engine, 1)]
    for step in range(3):
        for micro in range(2):
            losses += [_backward(engine, step, micro), evaluate(engine, step)]
            engine.step()
            losses.append(evaluate(engine, step))
    with torch.inference_mode():
        losses.append(engine(**batch(5, 0, engine.rank))["loss"].item())
    return [*losses, micro_step(engine, 6), micro_step(engine, 6, 1), evaluate(engine, 6)]


def _is_edited(engine: Engine, folder: Path) -> list[float]:
    # Edit trained and frozen parameters, through the module and through `engine.states`.
    losses = [micro_step(engine, 0), evaluate(engine, 0)]
    last = engine.world_size - 1
    with engine.gathered(modifier_rank=last) as model, torch.no_grad():
        if engine.rank == last:
            model.get_parameter("embed.weight")[3:20] *= 1.5
            model.get_parameter("blocks.1.up.bias").fill_(0.25)
            model.get_parameter("frozen.0.down.weight").add_(0.125)
    losses += [evaluate(engine, 1), micro_step(engine, 1), evaluate(engine, 1)]
    for name in ("blocks.0.up.weight", "frozen.0.side.weight"):
        engine.states.set_full(name, engine.states.get_full(name) * 0.5)
        losses.append(evaluate(engine, 2))
    return [*losses, micro_step(engine, 2), micro_step(engine, 3)]


def _loads(engine: Engine, folder: Path) -> list[float]:
    # Loading restores old weights under a new version number.
    losses = [micro_step(engine, 0)]
    engine.save_checkpoint(folder)
    losses += [micro_step(engine, 1), micro_step(engine, 2), evaluate(engine, 2)]
    engine.load_checkpoint(folder)
    return [*losses, evaluate(engine, 2), micro_step(engine, 1), micro_step(engine, 2)]


def _starts_from_a_file(engine: Engine, folder: Path) -> list[float]:
    losses = [evaluate(engine, 0)]  # fills caches that the loaded weights must replace
    own = folder / str(engine.rank)
    own.mkdir(exist_ok=True)
    width = engine.module.get_parameter("embed.weight").shape[1]
    weights = {n: 0.5 * p.detach() for n, p in make_model(width).named_parameters()}
    save_file(weights, own / _OTHER_WEIGHTS)
    zero_core.load_pretrained(engine, own / _OTHER_WEIGHTS)
    return [*losses, evaluate(engine, 0), micro_step(engine, 0), micro_step(engine, 1)]


def _breaks_off(engine: Engine, folder: Path) -> list[float]:
    # Raise in a forward, in an evaluation, and in a backward between two blocks, when one block may
    # already be reduced or updated.
    def refuse(module: nn.Module, inputs: object) -> None:
        raise ZeroDivisionError

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    def break_behind(module: nn.Module, inputs: object, out: Tensor) -> None:
        out.register_hook(fail)  # type: ignore[no-untyped-call]

    losses = [micro_step(engine, 0)]
    hook = engine.module.get_submodule("blocks.2").register_forward_pre_hook(refuse)
    for is_enabled in (True, False):
        with suppress(ZeroDivisionError), torch.set_grad_enabled(is_enabled):
            engine(**batch(1, 1, engine.rank))
            raise AssertionError("forward went on")
    hook.remove()
    hook = engine.module.get_submodule("blocks.1").register_forward_hook(break_behind)
    # With ``use_side``, all ranks have started the same reductions before the error.
    loss = engine(**{**batch(1, 0, engine.rank), "use_side": True})["loss"]
    hook.remove()
    with suppress(ZeroDivisionError):
        engine.backward(loss)
        raise AssertionError("backward went on")
    losses.append(loss.item())
    return [*losses, micro_step(engine, 1), micro_step(engine, 2), evaluate(engine, 2)]


def _freezes_and_unfreezes(engine: Engine, folder: Path) -> list[float]:
    # Freeze a whole block, then parts of another block and of the root, then nothing.
    frozen = (("blocks.1.",), ("blocks.2.up.", "gain"), ())
    losses = []
    for step in range(6):
        for name, param in engine.module.named_parameters():
            if not name.startswith("frozen."):
                param.requires_grad_(not name.startswith(frozen[step // 2]))
        losses.append(micro_step(engine, step))
    return losses


def _idles(engine: Engine, folder: Path) -> list[float]:
    # One rank at a time has no data, and ranks evaluate different numbers of times.
    losses = [micro_step(engine, 0), evaluate(engine, 0)]
    for step in range(1, 5):
        if engine.world_size > 1 and step % engine.world_size == engine.rank:
            engine.idle_step()
        else:
            losses.append(micro_step(engine, step))
    for turn in range(engine.world_size):
        if turn <= engine.rank:
            losses.append(evaluate(engine, turn))
        else:
            engine.idle_forward()
    return losses


def _skips_a_step(engine: Engine, folder: Path) -> list[float]:
    # One rank has non-finite gradients. The step is skipped only if overflow is checked.
    losses = [micro_step(engine, 0)]
    micro_step(engine, 1, factor=torch.inf if engine.rank == engine.world_size - 1 else None)
    assert bool(engine.skipped_steps) == engine.config.check_grad_overflow
    return [*losses, *(micro_step(engine, step) for step in (1, 2)), evaluate(engine, 2)]


def _has_edited_gradients(engine: Engine, folder: Path) -> list[float]:
    # Between backward and step, edit or clip gradients, read a state, change the rate, or save.
    losses = []
    for step in range(8):
        losses.append(_backward(engine, step))
        for name in ("blocks.1.up.weight", "embed.weight", "gain") if step < 4 else ():
            grad = engine.states.get_full(name, "grad")
            engine.states.set_full(name, grad * (step - 0.5), "grad")
        if step in (1, 3, 4):
            losses.append(engine.clip_grad_norm_(0.25))
        elif step == 5:
            kind = engine.sharded_state.every_tiers_state_names()[-1]
            losses.append(engine.states.get_full("blocks.0.up.weight", kind).double().sum().item())
        elif step == 6:
            engine.optimizer.param_groups[0]["lr"] *= 3.0
        elif step == 7:
            engine.save_checkpoint(folder)
        engine.step()
    losses.append(evaluate(engine, 0))
    engine.load_checkpoint(folder)
    return [*losses, evaluate(engine, 0)]


def _edits_param_grads(engine: Engine, folder: Path) -> list[float]:
    losses = []
    for step in range(3):
        losses.append(_backward(engine, step))
        grad = engine.module.get_parameter("blocks.1.up.weight").grad
        assert grad is not None
        grad.mul_(0.25)
        engine.step()
    return losses


def _is_copied(engine: Engine, folder: Path) -> list[float]:
    losses = [micro_step(engine, 0), micro_step(engine, 1)]
    with engine.gathered() as model:
        copied = copy.deepcopy(model)
    for step in (2, 3):
        losses += [copied(**batch(step, 0, engine.rank))["loss"].item(), micro_step(engine, step)]
    return losses


def _repeats_backward(engine: Engine, folder: Path) -> list[float]:
    # Two backwards per step. The first one of step 2 has a NaN loss on the last rank.
    losses = []
    for step in range(4):
        for micro in range(2):
            is_spoilt = (step, micro, engine.rank) == (2, 0, engine.world_size - 1)
            losses.append(_backward(engine, step, micro, torch.nan if is_spoilt else 0.5))
        engine.step()
    return losses


def _goes_long(engine: Engine, folder: Path) -> list[float]:
    # Every tenth step has losses times 256, and step 75 has a NaN loss on the last rank.
    losses = []
    for step in range(100):
        for micro in range(2):
            is_spoilt = (step, micro, engine.rank) == (75, 1, engine.world_size - 1)
            factor = torch.nan if is_spoilt else 1.0 if step % 10 else 256.0
            losses.append(micro_step(engine, step, micro, factor))
        norm = engine.get_global_grad_norm() or 0.0
        # Round the norm to fp32, because an offload ratio changes its last fp64 digits.
        losses.append(torch.tensor(norm).item())
        if step == 25:
            losses += _is_edited(engine, folder)
        if step == 40:
            engine.save_checkpoint(folder)
        if step == 50:
            engine.load_checkpoint(folder)
    return losses


SCENARIOS: Mapping[str, tuple[Scenario, Mapping[str, Any]]] = {
    "trains": (_trains, {}),
    "recomputes": (_trains, {"activation_checkpointing": {}}),
    "clips": (_trains, {"gradient_clipping": 0.5}),
    "accumulates": (_accumulates, {"gradient_accumulation_steps": 3}),
    "evaluates": (_evaluates_in_between, {"gradient_accumulation_steps": 2}),
    "is edited": (_is_edited, {}),
    "loads": (_loads, {}),
    "starts from a file": (_starts_from_a_file, {}),
    "breaks off": (_breaks_off, {}),
    "freezes and unfreezes": (_freezes_and_unfreezes, {}),
    "idles": (_idles, {}),
    "skips a step": (_skips_a_step, {}),
    "has edited gradients": (_has_edited_gradients, {}),
    "is copied": (_is_copied, {}),
    "repeats backward": (_repeats_backward, {}),
}
BY_NAME: Mapping[str, tuple[Scenario, Mapping[str, Any]]] = {
    "edits param.grad": (_edits_param_grads, {}),
    "goes long": (_goes_long, {"gradient_accumulation_steps": 2, "gradient_clipping": 40.0}),
}
"""Scenarios that `cover` does not choose by default: for stage 0 only, and of 100 steps."""


@dataclass(frozen=True)
class Variant:
    """Configuration keys that must not change any bit compared with a base configuration."""

    zero: Mapping[str, Any] = field(default_factory=dict)  # added to ``zero_optimization``
    base: Mapping[str, Any] = field(default_factory=dict)  # ``zero_optimization`` of both runs
    top: Mapping[str, Any] = field(default_factory=dict)  # added at the top level
    base_top: Mapping[str, Any] = field(default_factory=dict)  # top-level keys of base and variant
    further: Mapping[str, Any] = field(default_factory=dict)  # added to arguments of ``build()``
    stages: Sequence[int] = (0, 1, 2, 3)  # supported ZeRO stages
    # supported (number of ranks, ranks per node)
    ranks: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (3, 1), (4, 2))
    width: int = 33  # width of the model, large enough for quantized gradients
    family: str = ""  # with ``by_family``, variants of a family share rows


@dataclass(frozen=True)
class Row:
    """One equality test: a variant in a scenario."""

    scenario: str  # key of `SCENARIOS` or `BY_NAME`
    variant: str  # name of the variant
    stage: int
    dtype: str  # "fp32", "bf16" or "fp16"
    ranks: int  # number of ranks
    per_node: int  # ranks per node

    def __str__(self) -> str:
        where = f"{self.ranks} ranks" + (f", {self.per_node} a node" * (self.per_node > 1))
        return f"{self.variant}: {self.scenario}, stage {self.stage}, {self.dtype}, {where}"


def cover(
    variants: Mapping[str, Variant],
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    strength: int = 2,
    by_family: bool = False,
) -> list[Row]:
    """Return rows that contain every combination of ``strength`` values in any valid row.

    Prefers rows that add many combinations, then rows with about two ranks. ``by_family``: a
    combination is covered by any variant of a family, and each variant is covered at all its
    stages.
    """
    rows = [
        Row(scenario, name, stage, dtype, *sizes)
        for name, variant in variants.items()
        for scenario, stage, dtype, sizes in itertools.product(
            scenarios, variant.stages, dtypes, variant.ranks
        )
    ]
    families = {n: v.family or n for n, v in variants.items()} if by_family else {}
    sets = []
    for row in rows:
        family = families.get(row.variant, row.variant)
        values = (row.scenario, family, row.stage, row.dtype, (row.ranks, row.per_node))
        own: set[tuple[Any, ...]] = set(itertools.combinations(enumerate(values), strength))
        sets.append(own | ({(row.variant, row.stage)} if by_family else set()))
    having: dict[tuple[Any, ...], list[int]] = {}
    for number, own in enumerate(sets):
        for one in own:
            having.setdefault(one, []).append(number)
    draw, missing, chosen = random.Random(0), set(having), []
    for one in sorted(having, key=str):
        if one in missing:
            drawn = draw.sample(having[one], min(40, len(having[one])))
            best = max(drawn, key=lambda n: (len(missing & sets[n]), -abs(2 - rows[n].ranks)))
            missing -= sets[best]
            chosen.append(rows[best])
    return sorted(chosen, key=str)


def check(row: Row, variant: Variant, folder: Path, *, is_simulated: bool = True) -> None:
    """Compare a row's variant with its base, on threads (``is_simulated``) or on processes."""
    run: Callable[..., object] = simulate if is_simulated else run_on_processes
    run(_compare, row.ranks, row, variant, folder, ranks_per_node=row.per_node)


def _compare(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> None:
    plain = run_side(ranks, row, base_of(variant), folder / "plain")
    found = run_side(ranks, row, variant, folder / "variant")
    compare(ranks, row, found, plain)


def base_of(variant: Variant) -> Variant:
    return Variant(base=variant.base, base_top=variant.base_top, width=variant.width)


def compare(ranks: Ranks, row: Row, found: Trace, plain: Trace) -> None:
    """Raise if two runs of a row differ on this rank in a bit of a loss, a weight or a state."""
    for number, (one, other) in enumerate(zip(found.losses, plain.losses, strict=True)):
        assert repr(one) == repr(other), (
            f"{row}: loss {number} of rank {ranks.rank} is {one}, not {other}"
        )
    assert found.num_skipped == plain.num_skipped, row
    assert found.values.keys() == plain.values.keys(), row
    for name, value in plain.values.items():
        where = f"{row}: {name} on rank {ranks.rank}"
        bits = [each.contiguous().view(torch.uint8) for each in (found.values[name], value)]
        assert torch.equal(*bits), f"{where} is {found.values[name]}, not {value}"


def run_side(ranks: Ranks, row: Row, variant: Variant, folder: Path) -> Trace:
    """Run a row's scenario with ``variant`` on this rank. The returned tensors are on the CPU."""
    scenario, more = {**SCENARIOS, **BY_NAME}[row.scenario]
    folder.mkdir(exist_ok=True)
    zero = {**variant.base, **variant.zero}
    top = {**more, **variant.base_top, **variant.top}
    if row.dtype == "fp16":  # with this scale, some steps overflow
        top["fp16"] = {"enabled": True, "hysteresis": 1, "initial_scale_power": 14}
    config = Case(row.stage, row.dtype, zero=zero, top=top).config()
    config = json.loads(json.dumps(config).replace(FOLDER, str(folder)))
    engine = zero_core.build(
        make_model(variant.width), config, process_group=ranks, **variant.further
    )
    losses = scenario(engine, folder)
    values = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered() as model:  # compare the rounded parameters, not only masters
        values |= {f"gathered {n}": p.detach().clone() for n, p in model.named_parameters()}
    trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    # Unless the variant changes the stage, both runs have equal shards, compared rank by rank.
    state_of = engine.states.get_full if "stage" in zero else engine.states.get_local
    own = engine.sharded_state.tier.state_names()
    names = engine.sharded_state.every_tiers_state_names() if "stage" in zero else own
    for what, name in itertools.product(names, trained):
        values[f"{what} of {name}"] = state_of(name, what)
    skipped = engine.skipped_steps
    engine.close()
    return Trace(losses, {name: value.cpu() for name, value in values.items()}, skipped)
