"""Scripts of documents, unchanged, under ``zero-engine run``.

A script of Hugging Face's Trainer: the oracle is the same script as one process with plain torch
and all ranks' samples in its batch.

Command lines and configurations as they are printed in ZeRO-Offload's tutorial, Offload++'s README,
ZeRO++'s tutorial, and Hugging Face's post on DeepSpeed and FairScale. Of Megatron's and
transformers' scripts only the arguments are there, of their models the names. Each command goes to
a shell in which ``deepspeed`` is ``zero-engine run``. The script that it starts prints what it was
given, with which the training runs on forked ranks.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import CAPTURED, environment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.harness.forked_python import forked_python
from tests.support.lm_models import save_models
from tests.support.script_server import run_script
from zero_core.testing import run_alone

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_lm.py"
# 44 samples are 11 micro-batches of 4: the last accumulation of an epoch has two, not three. The
# best model is that of the middle, the one with the greater loss, so that reloading it shows.
COMMON = (
    *("--do_train", "--num_train_epochs=2", "--train_samples=44", "--max_grad_norm=0.5"),
    *("--gradient_accumulation_steps=3", "--learning_rate=5e-3", "--warmup_steps=2"),
    "--weight_decay=0.01",
    *("--logging_steps=1", "--eval_strategy=steps", "--eval_steps=4", "--save_strategy=steps"),
    *("--save_steps=4", "--load_best_model_at_end", "--metric_for_best_model=eval_loss"),
    *("--greater_is_better=true", "--report_to=none", "--disable_tqdm=true"),
    # transformers' T5 leaves num_items_in_batch aside, for which the Trainer makes up by the number
    # of ranks: with any engine, and with plain DDP, its loss would be that many times too large.
    "--average_tokens_across_devices=false",
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "t5": ("--predict_with_generate",),
    "lora": ("--predict_with_generate", "--lora"),
}
MODELS = {"gpt2": "gpt2", "t5": "t5", "lora": "t5"}
AUTO: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
    **{name: {"enabled": "auto"} for name in ("fp16", "bf16")},
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
HOST = {"device": "cpu"}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
STAGE_3 |= dict.fromkeys(SIZES, "auto")


class Run(NamedTuple):
    """A run under the engine: its kind, its configuration, and its number of ranks."""

    kind: str
    config: dict[str, Any]
    ranks: int = 2


RUNS = {
    # Loaded within zero.Init.
    "stage 3, all on the host": Run(
        "gpt2",
        {
            "zero_optimization": {**STAGE_3, "offload_optimizer": HOST, "offload_param": HOST},
            "optimizer": ADAMW,
        },
    ),
    # From the middle of the run before.
    "resumed": Run("gpt2", {"zero_optimization": {"stage": 2}, "optimizer": ADAMW}, ranks=1),
    # By the Trainer's own optimizer.
    "encoder-decoder": Run(
        "t5", {"zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": HOST}}
    ),
    "adapters": Run("lora", {"zero_optimization": STAGE_3, "optimizer": ADAMW}),
}


def _run_in_turn(lists: list[list[str]]) -> None:
    """Run the script once per list of arguments."""
    for arguments in lists:
        sys.argv = [str(SCRIPT), *arguments]
        runpy.run_path(str(SCRIPT), run_name="__main__")


def _arguments(root: Path, name: str, kind: str, ranks: int = 1) -> list[str]:
    places = (f"--model_name_or_path={root / MODELS[kind]}", f"--output_dir={root / name}")
    return [*COMMON, *OPTIONS[kind], *places, f"--per_device_train_batch_size={4 // ranks}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder for each run, and one for each kind of run without engine."""
    root = tmp_path_factory.mktemp("runs")
    save_models(root)
    run_alone(_run_in_turn, [[*_arguments(root, f"plain {k}", k), "--use_cpu"] for k in OPTIONS])
    for name, run in RUNS.items():
        file = root / f"{name}.json"
        file.write_text(json.dumps({**AUTO, **run.config}), encoding="utf-8")
        if name == "resumed":
            source, half = root / "stage 3, all on the host", "checkpoint-4"
            shutil.copytree(source / half, root / name / half)
        arguments = _arguments(root, name, run.kind, run.ranks)
        run_script(SCRIPT, *arguments, f"--deepspeed={file}", ranks=run.ranks)
    return root


def _logged(folder: Path, name: str) -> dict[int, float]:
    """Return what the Trainer logged under ``name``, by step."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return {entry["step"]: entry[name] for entry in state["log_history"] if name in entry}


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_run_trains_evaluates_and_saves_as_plain_torch(root: Path, name: str) -> None:
    run, folder, plain = RUNS[name], root / name, root / f"plain {RUNS[name].kind}"
    for key in ("loss", "grad_norm", "eval_loss"):
        found, reference = _logged(folder, key), _logged(plain, key)
        assert found == pytest.approx(reference, rel=2e-3), key
    assert sorted(_logged(folder, "loss")) == list(range(1, 9))
    found, expected = _result(folder), _result(plain)
    assert found["world_size"] == run.ranks
    # The best model is reloaded.
    assert found["eval_loss"] == pytest.approx(_logged(folder, "eval_loss")[4], rel=1e-4)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-3)
    if run.config["zero_optimization"]["stage"] == 3:  # else tied weights are stored twice
        file = "adapter_model.safetensors" if run.kind == "lora" else "model.safetensors"
        weights, expected_weights = load_file(folder / file), load_file(plain / file)
        torch.testing.assert_close(weights, expected_weights, rtol=0.0, atol=2e-4)
    if run.kind != "gpt2":
        # Seq2SeqTrainer keeps what fills the last batch of all ranks up.
        tokens = torch.tensor(found["generated"][: len(expected["generated"])])
        # Weights differ in their last bits, so a token may fall on the other side of a tie.
        assert (tokens == torch.tensor(expected["generated"])).float().mean() > 0.9


def test_saved_model_generates_what_the_ranks_did(root: Path) -> None:
    folder = root / "stage 3, all on the host"
    generated = torch.tensor(_result(folder)["generated"])
    prompt = generated[:, :-6]
    again = AutoModelForCausalLM.from_pretrained(folder).generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **{f"{bound}_new_tokens": 6 for bound in ("min", "max")},
        do_sample=False,
    )
    assert torch.equal(again, generated)


SCRIPTS = Path(__file__).parents[1] / "scripts"

# Of their line breaks those are kept that a parser needs: some blocks have no comma behind them.
ZERO_OFFLOAD_COMMAND = (
    "deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py --model-parallel-size 1 --num-layers 50 "
    "--hidden-size 4096 --num-attention-heads 32 --batch-size 10 "
    "--deepspeed_config ds_zero_offload.config --checkpoint-activations"
)
ZERO_OFFLOAD = """{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",
}
"contiguous_gradients": true, "overlap_comm": true
}
}"""
ZEROPP_COMMAND = (
    "deepspeed pretrain_zeropp_gpt.py --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --num-layers 40 --hidden-size 6144 --seq-length 512 "
    "--num-attention-heads 32 --batch-size 1 --zero-stage 3 "
    "--deepspeed_config ds_zeropp_config.json --deepspeed-activation-checkpointing --fp16 "
    "--checkpoint-activations"
)
ZEROPP = """{"zero_optimization": {"stage": 3, "reduce_bucket_size": 10000000,
"reduce_scatter": true, "zero_quantized_weights": true, "zero_hpz_partition_size": 16,
"zero_quantized_gradients": true, "contiguous_gradients": true, "overlap_comm": true
}
}"""
ONE_GPU_COMMAND = """
export BS=20
CUDA_VISIBLE_DEVICES=0 deepspeed --num_gpus=1 ./finetune_trainer.py \\
--model_name_or_path t5-3b --n_train 60 --n_val 10 \\
--per_device_eval_batch_size $BS --per_device_train_batch_size $BS \\
--task translation_en_to_ro --fp16 --deepspeed ds_config_1gpu.json [...]
"""
BASELINE_COMMAND = """
export BS=16
python -m torch.distributed.launch --nproc_per_node=2 ./finetune_trainer.py \\
--model_name_or_path t5-large --n_train 2000 --n_val 500 \\
--per_device_eval_batch_size $BS --per_device_train_batch_size $BS \\
--task translation_en_to_ro [...]
"""
LEFT_OUT = (
    "--do_train --output_dir output --learning_rate 3e-3 --logging_steps 1 --report_to none "
    "--disable_tqdm true"
)
"""In the place of ``[...]``."""
# The post names the file. These are the keys of that time, with "auto" where transformers demands
# the value of its own argument.
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
BATCH_SIZES = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
FLAGS = ("allgather_partitions", "reduce_scatter", "overlap_comm", "contiguous_gradients")
BUCKETS = {"allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8}
ADAM = ("lr", "betas", "eps", "weight_decay")
ONE_GPU = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "zero_optimization": {"stage": 2, **BUCKETS, **dict.fromkeys((*FLAGS, "cpu_offload"), True)},
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "Adam", "params": dict.fromkeys(ADAM, "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")},
    **dict.fromkeys(BATCH_SIZES, "auto"),
}
PRINTS = """
import json, os, sys
sys.stdout.write(json.dumps([os.environ["WORLD_SIZE"], *sys.argv[1:]]) + chr(10))
"""


def _printed(command: str, script: str, folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Run ``command`` in a shell below ``zero-engine run``, where Python's processes are forked.

    Return how many ranks ``script`` had, and its arguments.
    """
    (folder / script).write_text(PRINTS, encoding="utf-8")
    python = forked_python()
    folders = [str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    line = f"cd {shlex.quote(str(folder))}; {command.replace('[...]', LEFT_OUT)}"
    done = subprocess.run(
        [python, "-m", "zero_engine", "run", "bash", "-c", line],
        env={**environment(), "PATH": os.pathsep.join(folders), **variables},
        **CAPTURED,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    num_ranks, *arguments = lines[0]
    assert len(lines) == int(num_ranks)
    return int(num_ranks), arguments


def _train(script: str, folder: Path, num_ranks: int, arguments: list[str]) -> dict[str, Any]:
    run_script(SCRIPTS / script, *arguments, ranks=num_ranks, folder=folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def _with_batch(printed: str, **more: Any) -> str:
    """Return the configuration with the batch size, which DeepSpeed needs and none of them has."""
    keys = {"train_micro_batch_size_per_gpu": 2, **more}
    return printed.replace("{", "{" + json.dumps(keys)[1:-1] + ",", 1)


def test_tutorials_of_zero_offload_and_zeropp_train_as_printed(tmp_path: Path) -> None:
    (tmp_path / "ds_zero_offload.config").write_text(_with_batch(ZERO_OFFLOAD), encoding="utf-8")
    num_ranks, arguments = _printed(ZERO_OFFLOAD_COMMAND, "pretrain_gpt2.py", tmp_path)
    assert num_ranks == 1
    assert arguments[:2] == ["--model-parallel-size", "1"]
    found = _train("megatron_gpt.py", tmp_path, num_ranks, arguments)
    assert (found["stage"], found["world_size"]) == (2, 1)
    assert found["losses"][-1] < found["losses"][0]
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    text = _with_batch(ZEROPP, **fp16)
    (tmp_path / "ds_zeropp_config.json").write_text(text, encoding="utf-8")
    node = {"PET_NPROC_PER_NODE": "16"}  # for 16 accelerators
    num_ranks, arguments = _printed(ZEROPP_COMMAND, "pretrain_zeropp_gpt.py", tmp_path, **node)
    assert num_ranks == 16
    found = _train("megatron_gpt.py", tmp_path, num_ranks, arguments)
    assert (found["stage"], found["world_size"]) == (3, 16)
    assert found["losses"][-1] < found["losses"][0]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which t5-3b and t5-large are the same tiny model."""
    folder = tmp_path_factory.mktemp("post")
    save_models(folder)
    for name in ("t5-3b", "t5-large"):
        (folder / name).symlink_to("t5")
    (folder / "ds_config_1gpu.json").write_text(json.dumps(ONE_GPU), encoding="utf-8")
    return folder


def test_hugging_faces_post_trains_as_printed_and_deepspeed_takes_the_place_of_ddp(t5):
    num_ranks, arguments = _printed(ONE_GPU_COMMAND, "finetune_trainer.py", t5)
    assert num_ranks == 1
    assert arguments[arguments.index("--per_device_train_batch_size") + 1] == "20"
    found = _train("finetune_trainer.py", t5, num_ranks, arguments)
    assert (found["task"], found["world_size"]) == ("translation_en_to_ro", 1)
    assert len(found["losses"]) == 9
    assert found["losses"][-1] < found["losses"][0]
    command = BASELINE_COMMAND.replace("[...]", "--deepspeed ds_config_1gpu.json")
    num_ranks, arguments = _printed(command, "finetune_trainer.py", t5)
    assert num_ranks == 2
    assert "t5-large" in arguments
