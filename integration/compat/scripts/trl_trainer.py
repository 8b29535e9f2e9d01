"""Trains with one of TRL's trainers on local data: ``trl_trainer.py NAME --model FOLDER ...``.

This file does not mention zero-engine. ``--deepspeed FILE`` and ``--use_cpu=True`` go to the
trainer's configuration. With the latter, ranks train with DDP.
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

WORDS = [f"w{number}" for number in range(48)]
SAMPLES, STEPS = 64, 6

Row = dict[str, Any]
ARGUMENTS: Row = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2}
ARGUMENTS |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
ARGUMENTS |= {"bf16": False, "gradient_checkpointing": False, "seed": 7}


def prompts(draw: random.Random) -> Row:
    return {"prompt": " ".join(draw.choices(WORDS, k=draw.randint(3, 8)))}


def completions(draw: random.Random) -> Row:
    return {
        **prompts(draw),
        "completion": " ".join(["", *draw.choices(WORDS, k=draw.randint(2, 9))]),
    }


def labelled(draw: random.Random) -> Row:
    return {**completions(draw), "label": draw.random() < 0.5}


def preferences(draw: random.Random) -> Row:
    chosen, rejected = (completions(draw)["completion"] for _ in range(2))
    return {**prompts(draw), "chosen": chosen, "rejected": rejected}


def triples(draw: random.Random) -> Row:
    return {**preferences(draw), "reference": completions(draw)["completion"]}


def messages(draw: random.Random) -> Row:
    row = completions(draw)
    user = {"role": "user", "content": row["prompt"]}
    return {"messages": [user, {"role": "assistant", "content": row["completion"].strip()}]}


def asked(draw: random.Random) -> Row:
    return {"prompt": [{"role": "user", "content": prompts(draw)["prompt"]}]}


def privileged(draw: random.Random) -> Row:
    return {**prompts(draw), "privileged_context": " ".join(draw.choices(WORDS, k=4))}


def reward(completions: list[Any], **_columns: Any) -> list[float]:
    """Reward completions by their share of characters with an even code."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ord(char) % 2 == 0 for char in text) / (1 + len(text)) for text in texts]


@dataclass(frozen=True)
class Case:
    """A trainer with its data, configuration and further arguments."""

    trainer: str
    data: Callable[[random.Random], Row]
    settings: Row = field(default_factory=dict)
    place: str = ""
    """The trainer's module; by default the case's name below ``trl.experimental``."""
    has_reward: bool = False
    has_teacher: bool = False
    has_reference: bool = False


GROUP: Row = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
TWICE: Row = {**GROUP, "num_iterations": 2}
"""Two iterations, because the first one's loss is 0 up to rounding."""
SAMPLED: Row = {"max_new_tokens": 8, "temperature": 1.0}
SHORT: Row = {"max_completion_length": 8}
SDPO: Row = {"num_generations": 2, **SHORT, "success_reward_threshold": 0.1}
ONLINE: Row = {**SAMPLED, "model_init_kwargs": {"device_map": None}}
CASES = {
    "sft": Case("SFTTrainer", completions, place="trl"),
    "dpo": Case("DPOTrainer", preferences, place="trl"),
    "kto": Case("KTOTrainer", labelled, place="trl"),
    "reward": Case("RewardTrainer", preferences, place="trl"),
    "grpo": Case("GRPOTrainer", prompts, TWICE, "trl", has_reward=True),
    "rloo": Case("RLOOTrainer", prompts, TWICE, "trl", has_reward=True),
    "distillation": Case("DistillationTrainer", asked, SHORT, "trl", has_teacher=True),
    "cpo": Case("CPOTrainer", preferences),
    "orpo": Case("ORPOTrainer", preferences),
    "tpo": Case("TPOTrainer", triples),
    "bema_dpo": Case("DPOTrainer", preferences, place="trl.experimental.bema_for_ref_model"),
    "online_dpo": Case("OnlineDPOTrainer", prompts, ONLINE, has_reward=True, has_reference=True),
    "gkd": Case("GKDTrainer", messages, SAMPLED, has_teacher=True),
    "gold": Case("GOLDTrainer", messages, SHORT, has_teacher=True),
    "iw_opd": Case("IWOPDTrainer", messages, SHORT, has_teacher=True),
    "gmpo": Case("GMPOTrainer", prompts, GROUP, has_reward=True),
    "a2po": Case("A2POTrainer", prompts, SHORT, has_reward=True),
    "sdft": Case("SDFTTrainer", privileged, {"num_generations": 2, **SHORT}),
    "sdpo": Case("SDPOTrainer", privileged, SDPO, has_reward=True),
}


def prepare(name: str, models: Path, arguments: Row) -> tuple[Any, Row]:
    """Return the class of a case's trainer and the arguments that it is made with."""
    case = CASES[name]
    module = importlib.import_module(case.place or f"trl.experimental.{name}")
    config = case.trainer.replace("Trainer", "Config")
    # The BEMA variant uses the configuration class of the plain trainer.
    of_config = importlib.import_module("trl") if name == "bema_dpo" else module
    draw = random.Random(0)
    given: Row = {
        "model": str(models / "policy"),
        "args": getattr(of_config, config)(**arguments, **case.settings),
        "train_dataset": Dataset.from_list([case.data(draw) for _ in range(SAMPLES)]),
        "processing_class": AutoTokenizer.from_pretrained(models / "policy"),
    }
    if case.has_reward:
        given["reward_funcs"] = reward
    if case.has_reference:
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(models / "policy")
    if case.has_teacher:
        given["teacher_model"] = str(models / "teacher")
    return getattr(module, case.trainer), given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--model", type=Path, required=True, help="folder of models")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--deepspeed", help="a configuration of DeepSpeed's")
    parser.add_argument("--use_cpu", type=bool, default=False)
    options = parser.parse_args()
    place = {"deepspeed": options.deepspeed, "use_cpu": options.use_cpu}
    arguments = {**ARGUMENTS, "output_dir": str(options.output_dir), **place}
    kind, given = prepare(options.name, options.model, arguments)
    trainer = kind(**given)
    set_seed(7)  # loading a sharded model draws other random numbers, so the seed is set again
    trainer.train()


if __name__ == "__main__":
    main()
