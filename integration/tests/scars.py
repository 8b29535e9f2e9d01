"""Trainings in which releases of DeepSpeed were wrong without an error, by number of the issue.

Each is a program for two ranks over ``import deepspeed`` as DeepSpeed has it, and compares with
plain torch in one process, which takes all ranks' samples. ``test_scars.py`` runs them with this
engine, ``integration/compat/releases.py`` with releases of DeepSpeed; see ``docs/scars.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES = 8, 4
CPU = {"device": "cpu"}
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """What is special about a network."""

    uses: tuple[int, ...] = (0, 1, 2)
    """Blocks in the order of use."""
    reentrant: bool | None = None
    """How blocks are checkpointed. None: not at all."""
    frozen: tuple[str, ...] = ()
    """Prefixes of names of parameters that are not trained."""
    adapter_dtype: torch.dtype | None = None
    """Dtype of adapters beside the blocks, which are frozen then."""


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape, self.dtype = shape, dtype
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.adapters = nn.ModuleList()
        if shape.adapter_dtype is not None:
            self.adapters.extend(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.adapters.to(shape.adapter_dtype)
            self.blocks.to(BF16)
        self.head = nn.Linear(WIDTH, 1)
        for name, param in self.named_parameters():
            is_base = shape.adapter_dtype is not None and not name.startswith("adapters")
            param.requires_grad_(not is_base and not name.startswith(shape.frozen or "-"))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        for index in self.shape.uses:
            if self.shape.reentrant is None:
                x = self._block(index, x)
            else:
                x = checkpoint(self._block, index, x, use_reentrant=self.shape.reentrant)
        return self.head(x).float().square().mean()

    def _block(self, index: int, x: Tensor) -> Tensor:
        y = self.blocks[index](x)
        if self.adapters:
            adapter = self.adapters[index]
            y = y + adapter(x.to(adapter.weight.dtype)).to(y.dtype)
        return torch.tanh(y)


@dataclass(frozen=True)
class Scar:
    """A training, and how far it may be from plain torch's."""

    number: int
    title: str
    stage: int
    dtype: torch.dtype = torch.float32
    shape: Shape = Shape()
    accumulation: int = 1
    backwards: int = 1
    """Calls of backward per step, where ``gradient_accumulation_steps`` is 1."""
    steps: int = 3
    clipping: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    learning_rate: float = 0.1
    resumes: bool = False
    """Save after the second step, and go on in a new engine of other values."""
    autocast: bool = False

    @property
    def tolerance(self) -> float:
        """Most relative error of the sum of updates, and of a gradient's norm."""
        return 2e-3 if self.dtype == torch.float32 and not self.autocast else 0.06

    def configuration(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1000,
            **self.config,
        }


OFFLOAD = {"offload_optimizer": CPU}
NAMED = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
"""The optimizer by the configuration: DeepSpeedCPUAdam where its state is on the host."""
ADAMW = torch.optim.AdamW
TRAININGS = (
    Scar(5150, "clipping by the configuration, without ZeRO, did not scale", 0, clipping=0.05),
    Scar(5154, "gradients in bf16 without ZeRO were not averaged", 0, BF16, accumulation=2),
    Scar(
        5241,
        "the norm with an offloaded optimizer was wrong where parameters are not used",
        2,
        shape=Shape(uses=(0, 2)),
        zero=OFFLOAD,
    ),
    Scar(
        5294,
        "overlapped reductions at stage 2 gave other gradients",
        2,
        zero={"overlap_comm": True, "reduce_bucket_size": 64},
    ),
    Scar(
        6351,
        "the size of a bucket had an influence on convergence",
        2,
        accumulation=2,
        zero={"overlap_comm": False, "reduce_bucket_size": 16},
    ),
    Scar(
        6485,
        "accumulation in another dtype than the model's was stepped without a cast",
        1,
        BF16,
        accumulation=2,
        config={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Scar(
        6550,
        "accumulation with an offloaded optimizer copied where it had to add",
        2,
        accumulation=4,
        zero=OFFLOAD,
    ),
    Scar(
        7718,
        "norms at stage 2 were three times too low",
        2,
        BF16,
        shape=Shape(reentrant=True),
        accumulation=4,
        clipping=1.0,
    ),
    Scar(
        7819,
        "sub-groups of one step had different bias corrections",
        3,
        zero={**OFFLOAD, "sub_group_size": 40},
        config={"optimizer": NAMED},
        optimizer=ADAMW,
        learning_rate=1e-2,
        steps=4,
    ),
    Scar(7837, "bf16 without ZeRO unscaled what was not scaled, and kept gradients", 0, BF16),
    Scar(
        7967,
        "all micro-steps but the first were dropped with an offloaded optimizer",
        2,
        accumulation=3,
        zero=OFFLOAD,
    ),
    Scar(
        7981,
        "all backwards but the last were dropped with an offloaded optimizer",
        2,
        backwards=3,
        zero=OFFLOAD,
    ),
    Scar(
        8072,
        "adapters in fp32 beside a base in bf16 broke at stage 3",
        3,
        BF16,
        shape=Shape(adapter_dtype=torch.float32),
    ),
    Scar(
        8113,
        "mixed dtypes broke gathers under autocast",
        3,
        shape=Shape(adapter_dtype=torch.float32),
        autocast=True,
    ),
    Scar(
        8148,
        "checkpointed blocks with frozen parameters broke at stage 3",
        3,
        shape=Shape(reentrant=False, frozen=("blocks.0", "blocks.1.weight")),
    ),
    Scar(
        8224,
        "a module that is used twice lost gradients at stage 2 in bf16",
        2,
        BF16,
        shape=Shape(uses=(0, 1, 0, 2, 0)),
    ),
    Scar(
        6691,
        "a run that went on from a checkpoint began as if from scratch",
        3,
        optimizer=ADAMW,
        learning_rate=1e-2,
        steps=4,
        resumes=True,
    ),
    Scar(
        5289,
        "a universal checkpoint lost Adam's number of steps",
        2,
        zero=OFFLOAD,
        optimizer=ADAMW,
        learning_rate=1e-2,
        steps=4,
        resumes=True,
    ),
)


def micro_batch(step: int, micro: int, rank: int) -> Tensor:
    """Return the samples of one backward."""
    seed = 1000 * step + 10 * micro + rank
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(deepspeed: Any, scar: Scar, rank: int, world_size: int, folder: str) -> None:
    """Train with ``deepspeed`` and with plain torch, and compare.

    Raises:
        AssertionError: they differ.
    """
    norms, values = _train(deepspeed, scar, rank, folder)
    expected_norms, expected, initial = _train_plainly(scar, world_size)
    for found, norm in zip(norms, expected_norms, strict=True):
        if found is not None:
            assert abs(found - norm) <= scar.tolerance * norm, f"norm {found:.4g}, not {norm:.4g}"
    gap = _distance(values, expected) / _distance(expected, initial)
    assert gap <= scar.tolerance, f"updates differ by {gap:.2g}"


def _train(
    deepspeed: Any, scar: Scar, rank: int, folder: str
) -> tuple[list[float | None], dict[str, Tensor]]:
    engine = _engine(deepspeed, scar)
    norms: list[float | None] = []
    for step in range(scar.steps):
        if scar.resumes and step == 2:
            engine.save_checkpoint(f"{folder}/{scar.number}")
            engine.destroy()
            engine = _engine(deepspeed, scar, seed=1)
            engine.load_checkpoint(f"{folder}/{scar.number}")
        for micro in range(scar.accumulation * scar.backwards):
            if scar.backwards > 1:
                is_last = micro == scar.backwards - 1
                engine.set_gradient_accumulation_boundary(is_last)
            with _autocast(scar):
                loss = engine(micro_batch(step, micro, rank))
            engine.backward(loss / scar.backwards)
            if scar.backwards == 1 or is_last:
                engine.step()
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    values = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            master = deepspeed.utils.safe_get_full_fp32_param(param)
            values[name] = (param if master is None else master).detach().float().cpu().clone()
    engine.destroy()
    return norms, values


def _engine(deepspeed: Any, scar: Scar, seed: int = 0) -> Any:
    model = Net(scar.shape, scar.dtype, seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    is_named = "optimizer" in scar.config
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=None if is_named else scar.optimizer(trained, lr=scar.learning_rate),
        config=scar.configuration(),
    )
    return engine


def _train_plainly(
    scar: Scar, world_size: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return norms, values and initial values of the same training in fp32 on one process."""
    model = Net(scar.shape, torch.float32)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    initial = {name: param.detach().clone() for name, param in trained.items()}
    optimizer = scar.optimizer(trained.values(), lr=scar.learning_rate)
    parts = scar.accumulation * scar.backwards
    norms = []
    for step in range(scar.steps):
        for micro, rank in itertools.product(range(parts), range(world_size)):
            (model.float()(micro_batch(step, micro, rank)) / (parts * world_size)).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in _used(trained)]).item())
        if scar.clipping:
            nn.utils.clip_grad_norm_(trained.values(), scar.clipping)
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: param.detach() for name, param in trained.items()}, initial


def _used(trained: dict[str, nn.Parameter]) -> Iterator[nn.Parameter]:
    return (param for param in trained.values() if param.grad is not None)


def _autocast(scar: Scar) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", BF16) if scar.autocast else nullcontext()


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return torch.stack([(one[name] - other[name]).norm() for name in one]).norm().item()


# ------------------------------------------------------------------- of another form


def check_first_rate(deepspeed: Any, rank: int) -> None:
    """#6569: the first step took the optimizer's rate, not the schedule's, which is 0 there."""
    scar = Scar(6569, "", 1)
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 10}
    config = {
        **scar.configuration(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    model = Net(scar.shape, scar.dtype)
    before = [param.detach().clone() for param in model.parameters()]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    engine.backward(engine(micro_batch(0, 0, rank)))
    engine.step()
    after = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    moved = max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))
    assert moved == 0, f"a step at a rate of 0 changed values by {moved:.2g}"


def check_full_gradients(deepspeed: Any, rank: int) -> None:
    """#5883: what `safe_get_full_grad` returned was not the gradient."""
    for stage in (1, 2, 3):
        scar = Scar(5883, "", stage)
        model = Net(scar.shape, scar.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=scar.configuration()
        )
        engine.backward(engine(micro_batch(0, 0, rank)))
        found = {
            name: deepspeed.utils.safe_get_full_grad(param)
            for name, param in engine.module.named_parameters()
        }
        engine.step()
        engine.destroy()
        plain = Net(scar.shape, scar.dtype)
        for one in range(2):
            (plain(micro_batch(0, 0, one)) / 2).backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, msg=lambda text, n=name: n + text)


OTHERS: dict[int, tuple[str, Callable[[Any, int], None]]] = {
    5883: ("full gradients read by name were nan", check_full_gradients),
    6569: ("the first step took the optimizer's rate, not the schedule's", check_first_rate),
}
NUMBERS = sorted([*(scar.number for scar in TRAININGS), *OTHERS])
SEEN: dict[int, tuple[str, str]] = {
    6569: ("0.15.1", "AssertionError: a step at a rate of 0 changed values by 0.1"),
    7718: ("0.18.2", "AssertionError: norm 0.3115, not 1.065"),
    7837: ("0.18.2", "AssertionError: norm 1.131e+05, not 1.726"),
    7967: ("0.18.2", "AssertionError: norm 0.9921, not 1.331"),
    7981: ("0.18.2", "AssertionError: norm 0.4331, not 1.331"),
    8113: ("0.19.2", "RuntimeError: ProcessGroupGloo::allgather: invalid tensor type at index 0"),
}
"""The release of DeepSpeed in which a number was seen, and how its program ends there: another
error, or another wrong number, is another bug's."""


def run_all(
    deepspeed: Any, numbers: list[int], rank: int, world_size: int, folder: str
) -> dict[int, str]:
    """Run the scars ``numbers``. Returns what went wrong with each, "" where nothing did."""
    trainings = {scar.number: scar for scar in TRAININGS}
    found = {}
    for number in numbers:
        try:
            if number in OTHERS:
                OTHERS[number][1](deepspeed, rank)
            else:
                check(deepspeed, trainings[number], rank, world_size, folder)
            found[number] = ""
        except Exception as error:
            found[number] = f"{type(error).__name__}: {error}"
    return found
