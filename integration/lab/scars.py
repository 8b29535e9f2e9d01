"""Scars: trainings with silently wrong results in releases of DeepSpeed, by issue number.

Each training runs on two ranks with ``import deepspeed`` and is compared with plain torch in one
process that trains on all ranks' samples. `releases.py` runs the trainings with releases of
DeepSpeed. ``evidence/scars.md`` has the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES = 8, 4
OTHER = 100
"""Added to the step number for the samples of a loss's second part."""
CPU = {"device": "cpu"}
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    width: int = WIDTH
    """Width of each block, which uses the first ``width`` features of a sample."""
    uses: tuple[int, ...] = (0, 1, 2)
    """Indices of the used blocks, in order."""
    reentrant: bool | None = None
    """Kind of activation checkpointing of the blocks; None for none."""
    frozen: tuple[str, ...] = ()
    """Prefixes of the names of frozen parameters."""
    adapter_dtype: torch.dtype | None = None
    """Dtype of adapters added to the blocks, which are then frozen."""
    has_angles: bool = False
    """Whether the input is multiplied by the sine of fp32 angles that bf16 cannot represent."""


class Net(nn.Module):
    """A network of three blocks and a head."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape, self.dtype, width = shape, dtype, shape.width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.adapters = nn.ModuleList()
        if shape.adapter_dtype is not None:
            self.adapters.extend(nn.Linear(width, width, bias=False) for _ in range(3))
            self.adapters.to(shape.adapter_dtype)
            self.blocks.to(BF16)
        self.head = nn.Linear(width, 1)
        if shape.has_angles:
            self.register_buffer("angles", 1000 * torch.linspace(1, 2, width).sqrt())
        for name, param in self.named_parameters():
            is_base = shape.adapter_dtype is not None and not name.startswith("adapters")
            param.requires_grad_(not is_base and not name.startswith(shape.frozen or "-"))
            param.use_muon = param.ndim == 2  # type: ignore[attr-defined]  # DeepSpeed's mark

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.shape.width]
        if self.shape.has_angles:
            x = x * self.angles.float().sin()
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
    """A training, with the settings that triggered a bug of DeepSpeed."""

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
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    learning_rate: float = 0.1
    resumes: bool = False
    """Save after the second step and resume in a new engine with other initial values."""
    autocast: bool = False
    calls_module: bool = False
    """Add to the loss a second call of the model, directly and with other samples."""
    halves: bool = False
    """Let each rank halve its shards of the gradients before the step."""

    @property
    def tolerance(self) -> float:
        """Largest relative error of the sum of updates, and of a gradient's norm."""
        is_coarse = self.dtype != torch.float32 or self.autocast or self.optimizer == MUON
        return 0.06 if is_coarse else 2e-3

    def configuration(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == BF16},
            "fp16": {"enabled": self.dtype == torch.float16, "loss_scale": 128},
            # The threshold is 0 so that stage 3 also shards small parameters.
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                **self.zero,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1000,
            **self.config,
        }


OFFLOAD = {"offload_optimizer": CPU}
NAMED = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
"""An optimizer given by the configuration. With states on the host it is DeepSpeedCPUAdam."""
ADAMW = torch.optim.AdamW
MUON = partial(torch.optim.Muon, weight_decay=0.0)
MUON_NAMED = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}}
MATRICES = Shape(frozen=("head", "blocks.0.bias", "blocks.1.bias", "blocks.2.bias"))
HPZ = {"zero_hpz_partition_size": 2}
TRAININGS = (
    Scar(
        5104,
        "the optimizer took a step when the engine was made",
        1,
        optimizer=ADAMW,
        learning_rate=1e-2,
    ),
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
        6926,
        "hpZ with an offloaded optimizer: the gradient's norm stayed zero",
        3,
        zero={**HPZ, **OFFLOAD},
    ),
    Scar(
        7302,
        "the norm with an offloaded optimizer was that of gradients before they were edited",
        3,
        zero=OFFLOAD,
        halves=True,
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
    Scar(
        7707,
        "hpZ: the second copy of the weights was kept when a checkpoint was loaded",
        3,
        zero=HPZ,
        resumes=True,
        steps=4,
    ),
    Scar(
        7786,
        "a checkpoint in bf16 without ZeRO had no state of the optimizer",
        0,
        BF16,
        optimizer=ADAMW,
        learning_rate=1e-2,
        resumes=True,
        steps=4,
    ),
    Scar(
        7807,
        "Muon orthogonalized matrices whose gradients were reduced in part",
        2,
        shape=MATRICES,
        config={"optimizer": MUON_NAMED},
        optimizer=MUON,
        learning_rate=0.02,
    ),
    Scar(
        7985,
        "the last micro-step in bf16 was not averaged where gradients are summed in fp32",
        1,
        BF16,
        accumulation=2,
        config={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Scar(
        8066,
        "buffers in fp32 were cast to bf16 with the parameters",
        2,
        BF16,
        shape=Shape(has_angles=True),
    ),
    Scar(
        8158,
        "weights fetched by all-reduce at stage 3 were wrong where they are padded",
        3,
        shape=Shape(width=WIDTH - 1),
        zero={"stage3_use_all_reduce_for_fetch_params": True},
    ),
    Scar(
        8382,
        "gradients on a CPU were not reduced without contiguous gradients and reduce-scatter",
        2,
        zero={"contiguous_gradients": False, "reduce_scatter": False},
    ),
    Scar(8393, "fp16 without ZeRO unscaled what was not scaled", 0, torch.float16),
    Scar(
        8441,
        "Muon without ZeRO trained with SGD",
        0,
        shape=MATRICES,
        config={"optimizer": MUON_NAMED},
        optimizer=MUON,
        learning_rate=0.02,
    ),
    Scar(
        8443,
        "Muon at stage 3 orthogonalized each micro-step's gradient",
        3,
        zero={"reduce_scatter": False},
        shape=MATRICES,
        accumulation=3,
        config={"optimizer": MUON_NAMED},
        optimizer=MUON,
        learning_rate=0.02,
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
        "a module that is used twice in a loss got wrong gradients at stage 2",
        2,
        BF16,
        accumulation=2,
        calls_module=True,
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
    seed = 1000 * step + 10 * micro + rank
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(deepspeed: Any, scar: Scar, rank: int, world_size: int, folder: str) -> None:
    """Train with ``deepspeed`` and with plain torch, and compare.

    Raises:
        AssertionError: norms or updates differ.
    """
    norms, values = _train(deepspeed, scar, rank, folder)
    expected_norms, expected, initial = _train_plainly(scar, world_size)
    for found, norm in zip(norms, expected_norms, strict=True):
        # With Muon, DeepSpeed's norm is that of the orthogonalized matrices.
        if found is not None and scar.optimizer != MUON:
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
                if scar.calls_module:
                    loss = loss + engine.module(micro_batch(OTHER + step, micro, rank))
            engine.backward(loss / scar.backwards)
            if scar.halves:
                for param in engine.module.parameters():
                    half = deepspeed.utils.safe_get_local_grad(param) / 2
                    deepspeed.utils.safe_set_local_grad(param, half)
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
    """Train in fp32 in one process. Return norms, final values and initial values."""
    model = Net(scar.shape, torch.float32)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    initial = {name: param.detach().clone() for name, param in trained.items()}
    optimizer = scar.optimizer(trained.values(), lr=scar.learning_rate)
    parts = scar.accumulation * scar.backwards
    norms = []
    for step in range(scar.steps):
        for micro, rank in itertools.product(range(parts), range(world_size)):
            loss = model.float()(micro_batch(step, micro, rank))
            if scar.calls_module:
                loss = loss + model(micro_batch(OTHER + step, micro, rank))
            (loss / (parts * world_size * (1 + scar.halves))).backward()
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


# Scars that need a program of their own.


def check_first_rate(deepspeed: Any, rank: int) -> None:
    """#6569: the first step used the optimizer's rate instead of the schedule's, which is 0."""
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
    """#5883: `safe_get_full_grad` did not return the gradient."""
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


def check_evaluation(deepspeed: Any, rank: int) -> None:
    """#4906: without gradients, hpZ gathered a copy of the weights from before the step."""
    scar = Scar(4906, "", 3, zero=HPZ, learning_rate=1.0)
    engine = _engine(deepspeed, scar)
    engine.backward(engine(micro_batch(0, 0, rank)))
    engine.step()
    with torch.no_grad():
        found = engine(micro_batch(1, 0, rank)).item()
    engine.destroy()
    plain = Net(scar.shape, scar.dtype)
    (sum(plain(micro_batch(0, 0, one)) for one in range(2)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=scar.learning_rate).step()
    expected = plain(micro_batch(1, 0, rank)).item()
    assert abs(found - expected) < 1e-4 * expected, f"loss {found:.4g}, not {expected:.4g}"


def check_reloaded(deepspeed: Any, rank: int) -> None:
    """#7050: after reloading, parameters had the values of other parameters."""
    scar = Scar(7050, "", 3, config={"optimizer": NAMED})
    model = Net(scar.shape, scar.dtype)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2]}]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=scar.configuration()
    )
    engine.offload_states(pin_memory=False)
    engine.reload_states()
    with torch.no_grad():
        found = engine(micro_batch(0, 0, rank)).item()
    engine.destroy()
    expected = Net(scar.shape, scar.dtype)(micro_batch(0, 0, rank)).item()
    assert abs(found - expected) < 1e-4 * expected, f"loss {found:.4g}, not {expected:.4g}"


def check_rates(
    deepspeed: Any,
    kind: str,
    params: dict[str, Any],
    expected: list[float],
    rates: tuple[float, float] = (0.1, 0.2),
) -> None:
    """Compare two groups' learning rates, initially ``rates``, with ``expected``."""
    scar = Scar(0, "", 1)
    model = Net(scar.shape, scar.dtype)
    groups = [
        {"params": list(model.blocks.parameters()), "lr": rates[0]},
        {"params": list(model.head.parameters()), "lr": rates[1]},
    ]
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(groups),
        config={**scar.configuration(), "scheduler": {"type": kind, "params": params}},
    )
    for step in range(3 if expected[0] else 0):
        engine.backward(engine(micro_batch(step, 0, 0)))
        engine.step()
    found = [group["lr"] for group in optimizer.param_groups]
    engine.destroy()
    assert found == expected, f"rates {found}, not {expected}"


def check_optimizers_rates(deepspeed: Any, rank: int) -> None:
    """#7303: a warm-up without a maximum rose to 0.001 instead of the optimizer's rate."""
    check_rates(deepspeed, "WarmupLR", {"warmup_num_steps": 2}, [0.1, 0.1], (0.1, 0.1))


def check_first_rates(deepspeed: Any, rank: int) -> None:
    """#7969: before the first step the cosine schedule set only the first group's rate."""
    cosine = {"total_num_steps": 20, "warmup_num_steps": 10}
    check_rates(deepspeed, "WarmupCosineLR", cosine, [0.0, 0.0])


def check_last_rates(deepspeed: Any, rank: int) -> None:
    """#8171: a warm-up to the optimizer's rates used the first group's rate for all groups."""
    check_rates(deepspeed, "WarmupLR", {"warmup_num_steps": 2}, [0.1, 0.2])


OTHERS: dict[int, tuple[str, Callable[[Any, int], None]]] = {
    4906: ("hpZ: an evaluation took the weights before the last step", check_evaluation),
    5883: ("full gradients read by name were nan", check_full_gradients),
    6569: ("the first step took the optimizer's rate, not the schedule's", check_first_rate),
    7050: ("weights that came back to the device were those of others", check_reloaded),
    7303: ("a warmup without a rate of its own dropped the optimizer's", check_optimizers_rates),
    7969: ("the cosine schedule began at 0 for the first group alone", check_first_rates),
    8171: ("a warmup took the first group's rate for all groups", check_last_rates),
}
NUMBERS = sorted([*(scar.number for scar in TRAININGS), *OTHERS])
SEEN: dict[int, tuple[str, str]] = {
    4906: ("0.13.1", "AssertionError: loss 0.3152, not 1.189"),
    5104: ("0.13.1", "AssertionError: norm 1.219, not 1.148"),
    5150: ("0.13.2", "AssertionError: updates differ by 18"),
    5154: ("0.13.1", "AssertionError: norm 1.264, not 1.358"),
    6569: ("0.15.1", "AssertionError: a step at a rate of 0 changed values by 0.1"),
    7050: ("0.16.0", "AssertionError: loss 0.1158, not 0.2782"),
    7302: ("0.16.5", "AssertionError: norm 1.726, not 0.863"),
    7303: ("0.16.5", "AssertionError: rates [0.001, 0.001], not [0.1, 0.1]"),
    7707: ("0.18.2", "AssertionError: norm 0.4435, not 0.4417"),
    7718: ("0.18.2", "AssertionError: norm 0.3115, not 1.065"),
    7807: ("0.18.6", "AssertionError: updates differ by 0.51"),
    7837: ("0.18.2", "AssertionError: norm "),  # the norm is 220.9 or 1.131e+05, not 1.726
    7967: ("0.18.2", "AssertionError: norm 0.9921, not 1.331"),
    7969: ("0.18.6", "AssertionError: rates [0.0, 0.2], not [0.0, 0.0]"),
    7981: ("0.18.2", "AssertionError: norm 0.4331, not 1.331"),
    7985: ("0.18.6", "AssertionError: norm 0.6721, not 0.7536"),
    8066: ("0.18.6", "AssertionError: norm 1.094, not 1.837"),
    8171: ("0.19.2", "AssertionError: rates [0.1, 0.1], not [0.1, 0.2]"),
    8224: ("0.19.2", "AssertionError: norm 4.315, not 2.833"),
    8382: ("0.19.2", "AssertionError: norm 1.962, not 1.726"),
    8393: ("0.19.2", "AssertionError: norm 1.437, not 0.7176"),
    8441: ("0.19.2", "AssertionError: updates differ by 0.95"),
    8443: ("0.19.2", "AssertionError: updates differ by 1.9"),
}
"""The release of DeepSpeed that shows the bug, and how its program ends. Another error or another
wrong number belongs to another bug."""
SOMETIMES: dict[int, str] = {8113: "0.19.2", 8158: "0.19.2"}
"""The release that shows the bug in some runs only."""


def run_all(
    deepspeed: Any, numbers: list[int], rank: int, world_size: int, folder: str
) -> dict[int, str]:
    """Run the scars with the issue numbers ``numbers``. Return each one's error or ""."""
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
