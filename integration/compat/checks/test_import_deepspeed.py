"""Import of checkpoints that DeepSpeed wrote, with DeepSpeed's own conversions as the oracle.

Master weights are compared bit by bit with ``zero_to_fp32`` and moments with ``ds_to_universal``.
The losses of training resumed here are compared with those of training resumed by DeepSpeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_core.checkpoint.files import Reader, read_buffers, read_weights
from zero_core.checkpoint.manifest import read_manifest
from zero_core.testing import seeded, spawn, train
from zero_engine import deepspeed
from zero_engine.deepspeed_import.importing import import_checkpoint

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
TYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"{dtype}-{stage}": (dtype, stage, {}) for dtype in ("fp32", "bf16") for stage in range(4)},
    "bf16-2-offload": ("bf16", 2, OFFLOAD),
    "bf16-3-offload": ("bf16", 3, OFFLOAD),
    "fp32-3-sub-groups": ("fp32", 3, {"sub_group_size": 40}),
}
NUM_STEPS = 3


class Model(nn.Module):
    """Model with tied weights, a frozen layer, buffers, and sizes that no rank count divides."""

    seen: Tensor
    scale: Tensor

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(7, 5)
            self.frozen = nn.Linear(5, 5)
            self.norm = nn.LayerNorm(5)
            self.middle = nn.Linear(5, 5)
            self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.numel()
        y: Tensor = self.head(self.middle(self.norm(self.frozen(self.embed(ids)))))
        return (y * self.scale).float().square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in params if p.ndim > 1]
    return [{"params": decayed}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


def config(case: str) -> dict[str, Any]:
    dtype, stage, zero = CASES[case]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {"stage": stage, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **TYPES[dtype],
    }


def losses(engine: Any, rank: int, first: int) -> list[float]:
    """Take `NUM_STEPS` steps and return this rank's losses."""
    draws = [
        torch.Generator().manual_seed(100 * step + rank) for step in range(first, first + NUM_STEPS)
    ]
    return train(engine, [torch.randint(0, 7, (4, 3), generator=draw) for draw in draws])


def write_by_deepspeed(folder: Path) -> None:
    """Write each case's checkpoint and this rank's losses, with DeepSpeed. Rank 0 converts."""
    import deepspeed as original
    import torch.distributed as dist
    from deepspeed.checkpoint.ds_to_universal import main as to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    original.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()

    def engine_of(case: str) -> Any:
        model = Model()
        settings = config(case)
        return original.initialize(model=model, model_parameters=groups(model), config=settings)[0]

    for case, (_, stage, _) in CASES.items():
        place = folder / case
        engine = engine_of(case)
        losses(engine, rank, 0)
        engine.save_checkpoint(str(place), client_state={"epoch": 7})
        dist.barrier()
        again = engine_of(case)
        again.load_checkpoint(str(place))
        found = losses(again, rank, NUM_STEPS)
        (place / f"losses-{rank}.json").write_text(json.dumps(found))
        if rank == 0 and stage > 0:
            masters = get_fp32_state_dict_from_zero_checkpoint(str(place))
            torch.save({k: v.clone() for k, v in masters.items()}, place / "masters.pt")
            to_universal(
                Namespace(
                    input_folder=str(place / "global_step3"),
                    output_folder=str(place / "universal"),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
        dist.barrier()
        print("wrote", case, flush=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, *command, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    return folder


def universal(place: Path, name: str, state: str) -> Tensor:
    """Return a flat state from DeepSpeed's universal checkpoint."""
    found = torch.load(place / "universal" / "zero" / name / f"{state}.pt", weights_only=False)
    value: Tensor = found["param"] if isinstance(found, dict) else found
    return value.reshape(-1)


@pytest.mark.parametrize("case", [name for name, row in CASES.items() if row[1] > 0])
@pytest.mark.parametrize("form", ["zero", "universal"])
def test_masters_and_moments_are_deepspeeds_conversions(case, form, written, tmp_path):
    place = written / case
    tag = {"zero": "global_step3", "universal": "universal"}[form]
    folder = import_checkpoint(place, tmp_path, tag)
    manifest = read_manifest(folder)
    reader = Reader(folder, manifest)
    masters = torch.load(place / "masters.pt", weights_only=True)
    first = Model().state_dict()
    seen = set()
    for weight in read_weights(tmp_path):
        # DeepSpeed's conversion of stage 1 leaves out frozen parameters.
        expected = masters if weight.names[0] in masters else first
        for name in weight.names:
            assert torch.equal(weight.value, expected[name].to(weight.value.dtype)), name
            seen.add(name)
        if weight.is_trainable:
            for state in ("exp_avg", "exp_avg_sq"):
                parts = reader.parts(state, weight.names[0], 0, weight.value.numel())
                found = reader.read_parts(parts)
                assert torch.equal(found, universal(place, weight.names[0], state)), state
    for name, value in read_buffers(tmp_path).items():
        assert torch.equal(value, masters[name].to(value.dtype)), name
        seen.add(name)
    assert seen == first.keys()
    assert masters.keys() <= seen
    assert {row["step"] for row in manifest.scalars.values()} == {3}


def _goes_on(rank: int, world_size: int, case: str, place: str) -> None:
    """Resume ``case`` at its stage and at stage 1. Compare the losses with DeepSpeed's."""
    expected = json.loads(Path(place, f"losses-{rank}.json").read_text())
    for stage in (CASES[case][1], 1):
        model = Model(seed=4)
        settings = {**config(case), "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups(model), config=settings
        )
        folder = Path(place, "imported")
        _, client_state = engine.load_checkpoint(folder)
        assert client_state == {"epoch": 7}
        assert (engine.global_steps, engine.global_samples) == (3, 24)
        found = losses(engine, rank, NUM_STEPS)
        tolerance = 1e-6 if CASES[case][0] == "fp32" else 1e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_losses_go_on_as_those_of_deepspeed_resumed(case: str, written: Path) -> None:
    place = written / case
    frozen = ["frozen.weight", "frozen.bias"] if CASES[case][1] == 0 else []
    import_checkpoint(place, place / "imported", frozen=frozen)
    spawn(_goes_on, 2, case, str(place))


if __name__ == "__main__":
    write_by_deepspeed(Path(sys.argv[1]))
