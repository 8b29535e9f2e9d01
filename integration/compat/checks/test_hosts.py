"""TRL and Axolotl train with the engine, without the import hook.

TRL logs what plain TRL logs, on one process and with DDP on two. vLLM does not install on a CPU, so
TRL's class that sends weights to vLLM runs without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import set_seed
from trl.generation.vllm_generation import VLLMGeneration

from compat.material import save_models
from compat.scripts.trl_trainer import ARGUMENTS, CASES, prepare
from tests.support.lm_models import make_lm, token_rows
from zero_core.testing import preload, run_alone, spawn
from zero_engine.hf import zero_trainer

preload("trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama")

# With a limit of 0 each forward of a generation gathers, so ranks must run equally many forwards.
ZERO = ({"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "stage3_max_live_parameters": 0})
ROWS: dict[str, dict[str, Any]] = {
    **{name: {} for name in CASES if name != "gold"},  # which needs tokens of bytes
    **{f"{name}, adapters": {} for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo", "cpo")},
    "sdft, moving teacher": {"teacher_model_kind": "ema"},
    "sft, recomputed": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "dpo, moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "dpo, precomputed": {"precompute_ref_log_probs": True},
}
UNLIKE = ("time", "per_second", "grad_norm", "frac", "flos")  # differ between equal runs


def _trained(row: str, models: Path, zero: Any = None) -> Any:
    name, further = row.partition(",")[0], {}
    if "adapters" in row:
        task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
        further["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", task_type=task)
    arguments = {**ARGUMENTS, "use_cpu": True, "output_dir": str(models / "run"), **ROWS[row]}
    kind, given = prepare(name, models, arguments)
    set_seed(7)  # adapters are created with random weights
    if zero is not None:
        kind, further["zero"] = zero_trainer(kind), {"zero_optimization": zero}
    trainer = kind(**given, **further)
    if zero is not None and name == "grpo":
        trainer.vllm_generation = VLLMGeneration.__new__(VLLMGeneration)
        trainer.vllm_generation.model = trainer.model
    set_seed(7)
    trainer.train()
    return trainer


def _numbers(trainer: Any) -> list[float]:
    rows = trainer.state.log_history
    return [row[k] for row in rows for k in sorted(row) if not any(part in k for part in UNLIKE)]


def _trains_as_plain(rank: int, world_size: int, models: Path, row: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), HF_HUB_OFFLINE="1")
    expected = _numbers(_trained(row, models))
    for zero in ZERO:
        trainer = _trained(row, models, zero)
        assert _numbers(trainer) == pytest.approx(expected, rel=1e-3, abs=2e-5), zero
        sent = trainer.vllm_generation._iter_named_params() if "grpo" in row else ()
        sent = {name: value.clone() for name, value in sent}
        whole = trainer.engine.unwrap()
        values = (whole.merge_and_unload() if "adapters" in row else whole).state_dict()
        for name, value in sent.items():
            torch.testing.assert_close(value, values[name], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_trl_trains_as_without_the_engine(row: str, ranks: int, tmp_path: Path) -> None:
    if (row, ranks) == ("dpo, precomputed", 2):
        pytest.skip("TRL caches the values for data in memory in one process's folder")
    save_models(tmp_path)
    spawn(_trains_as_plain, ranks, tmp_path, row, ranks_per_node=ranks)


def _trains_in_axolotl(folder: Path) -> None:
    from axolotl.core import trainers, training_args
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    (plugins := PluginManager.get_instance()).register("zero_engine.axolotl.ZeroPlugin")
    data = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in token_rows(64)])
    found = []
    for zero in (None, "stage3"):
        kind = plugins.get_trainer_cls(DictDefault(zero=zero)) or trainers.AxolotlTrainer
        settings = {**ARGUMENTS, "use_cpu": True, "output_dir": str(folder), "adam_epsilon": 1e-4}
        args = training_args.AxolotlTrainingArguments(**settings)
        trainer = kind(model=make_lm("gpt2"), args=args, train_dataset=data, dataset_tags=["d"])
        trainer.train()
        found.append(dict(trainer.model.state_dict()))
    torch.testing.assert_close(*found, rtol=0.0, atol=1e-5)


def test_axolotls_plugin_trains_and_leaves_the_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("axolotl", reason="it pins other releases of transformers and TRL")
    run_alone(_trains_in_axolotl, tmp_path)
