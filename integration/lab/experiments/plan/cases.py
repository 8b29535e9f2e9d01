"""Configurations to predict and measure: a held-out set, and others for tuning the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from zero_engine.machine import available_cores

OFFLOAD: Mapping[str, Any] = {"offload_optimizer": {"device": "cpu"}}
AGAIN: Mapping[str, Any] = {"activation_checkpointing": {}}
WIDE = ("plain", GptShape(8, 512, heads=8, vocab=2048, context=128), 4)
DEEP = ("plain", GptShape(16, 320, heads=5, vocab=4096, context=256), 2)
HF = ("gpt2", GptShape(6, 640, heads=10, vocab=4096, context=128), 2)
LARGE = ("plain", GptShape(6, 768, heads=12, vocab=1024, context=64), 8)
MIDDLE = ("plain", GptShape(5, 320, heads=5, vocab=1024, context=192), 3)
HF_SMALL = ("gpt2", GptShape(6, 448, heads=7, vocab=2048, context=64), 4)

_Model = tuple[str, GptShape, int]


@dataclass(frozen=True)
class Case:
    """A configuration: a job on one or two nodes."""

    job: Job
    has_link: bool = False

    @property
    def name(self) -> str:
        return self.job.name


def _case(
    about: str,
    model: _Model,
    stage: int,
    dtype: str,
    *,
    ranks: int = 1,
    is_offloaded: bool = False,
    has_link: bool = False,
    top: Mapping[str, Any] | None = None,
) -> Case:
    kind, shape, micro_batch = model
    words = [about, f"stage {stage}", dtype, f"{ranks} {'nodes' if has_link else 'ranks'}"]
    words += ["offload"] * is_offloaded + [str(key) for key in top or {}]
    job = Job(
        *(", ".join(words), "zero", shape, micro_batch),
        steps=0,
        model=kind,
        dtype=dtype,
        stage=stage,
        zero=OFFLOAD if is_offloaded else {},
        top=top or {},
        ranks=ranks,
        threads=max(1, available_cores() // ranks),
    )
    return Case(job, has_link)


def held_out() -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        for is_offloaded in (False, True):
            yield _case("wide", WIDE, 0, dtype, is_offloaded=is_offloaded)
            yield _case("hf", HF, 0, dtype, is_offloaded=is_offloaded)
        for stage in (0, 2, 3):
            yield _case("wide", WIDE, stage, dtype, ranks=2)
        yield _case("hf", HF, 1, dtype, ranks=2, is_offloaded=True)
        yield _case("hf", HF, 3, dtype, ranks=2, is_offloaded=True)
        for stage in (1, 3):
            yield _case("large", LARGE, stage, dtype, ranks=2, has_link=True)
    yield _case("deep", DEEP, 3, "bf16", ranks=2, top=AGAIN)
    yield _case("deep", DEEP, 2, "fp32", ranks=2, top={"gradient_accumulation_steps": 2})


def tuning() -> Iterator[Case]:
    """Yield configurations of other models, for tuning the prediction."""
    yield _case("middle", MIDDLE, 0, "fp32")
    yield _case("hf small", HF_SMALL, 0, "bf16", is_offloaded=True)
    yield _case("middle", MIDDLE, 1, "bf16", ranks=2)
    yield _case("hf small", HF_SMALL, 3, "fp32", ranks=2)
    yield _case("middle", MIDDLE, 2, "fp32", ranks=2, is_offloaded=True)
    yield _case("hf small", HF_SMALL, 3, "bf16", ranks=2, has_link=True)


def searched() -> Iterator[Case]:
    """Yield 6 held-out configurations with few samples, for which plans have several choices."""
    of_name = {case.name: case for case in held_out()}
    for name, micro_batch in (
        ("wide, stage 0, fp32, 1 ranks", 4),
        ("hf, stage 0, bf16, 1 ranks", 2),
        ("wide, stage 0, bf16, 1 ranks, offload", 4),
        ("wide, stage 3, fp32, 2 ranks", 1),
        ("hf, stage 3, bf16, 2 ranks, offload", 1),
        ("large, stage 3, bf16, 2 nodes", 1),
    ):
        case = of_name[name]
        yield replace(case, job=replace(case.job, micro_batch=micro_batch))


SETS = {"held_out": held_out, "tuning": tuning, "search": searched}
