"""Command lines and configurations of four documents, as they are printed there.

ZeRO-Offload's tutorial, Offload++'s README, ZeRO++'s tutorial, and Hugging Face's post on DeepSpeed
and FairScale. Of Megatron's and transformers' scripts only the arguments are there, of their models
the names. Each command goes to a shell in which ``deepspeed`` is ``zero-engine run``. The script
that it starts prints what it was given, with which the training runs on forked ranks.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import environment

from benchmarks.harness.forked_python import forked_python
from tests.support.lm_models import save_models
from tests.support.script_server import run_script

SCRIPTS = Path(__file__).parents[1] / "scripts"

ZERO_OFFLOAD_COMMAND = """
deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py \\
--model-parallel-size 1 \\
--num-layers 50 \\
--hidden-size 4096 \\
--num-attention-heads 32 \\
--batch-size 10 \\
--deepspeed_config ds_zero_offload.config \\
--checkpoint-activations
"""
ZERO_OFFLOAD = """
{
"zero_optimization": {
"stage": 2,
"offload_optimizer": {
"device": "cpu",
}
"contiguous_gradients": true,
"overlap_comm": true
}
}
"""
ZEROPP_COMMAND = """
deepspeed pretrain_zeropp_gpt.py \\
--tensor-model-parallel-size 1 \\
--pipeline-model-parallel-size 1 \\
--num-layers 40 \\
--hidden-size 6144 \\
--seq-length 512 \\
--num-attention-heads 32 \\
--batch-size 1 \\
--zero-stage 3 \\
--deepspeed_config ds_zeropp_config.json \\
--deepspeed-activation-checkpointing \\
--fp16 \\
--checkpoint-activations
"""
ZEROPP = """
{
"zero_optimization": {
"stage": 3,
"reduce_bucket_size": 10000000,
"reduce_scatter": true,
"zero_quantized_weights": true,
"zero_hpz_partition_size": 16,
"zero_quantized_gradients": true,
"contiguous_gradients": true,
"overlap_comm": true
}
}
"""
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
ONE_GPU = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": True,
    },
    "zero_allow_untested_optimizer": True,
    "optimizer": {
        "type": "Adam",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}
PRINTS = """
import json, os, sys
sys.stdout.write(json.dumps([os.environ["WORLD_SIZE"], *sys.argv[1:]]) + chr(10))
"""


def _arguments(command: str, script: str, folder: Path, **variables: str) -> tuple[int, list[str]]:
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
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
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


def test_zero_offloads_tutorial_trains_as_printed(tmp_path: Path) -> None:
    (tmp_path / "ds_zero_offload.config").write_text(_with_batch(ZERO_OFFLOAD), encoding="utf-8")
    num_ranks, arguments = _arguments(ZERO_OFFLOAD_COMMAND, "pretrain_gpt2.py", tmp_path)
    assert num_ranks == 1
    assert arguments[:2] == ["--model-parallel-size", "1"]
    found = _train("megatron_gpt.py", tmp_path, num_ranks, arguments)
    assert (found["stage"], found["world_size"]) == (2, 1)
    assert found["losses"][-1] < found["losses"][0]


def test_zeropps_tutorial_trains_as_printed_on_a_node(tmp_path: Path) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    text = _with_batch(ZEROPP, **fp16)
    (tmp_path / "ds_zeropp_config.json").write_text(text, encoding="utf-8")
    node = {"PET_NPROC_PER_NODE": "16"}  # for 16 accelerators
    num_ranks, arguments = _arguments(ZEROPP_COMMAND, "pretrain_zeropp_gpt.py", tmp_path, **node)
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


def test_hugging_faces_post_trains_t5_3b_on_one_device_as_printed(t5: Path) -> None:
    num_ranks, arguments = _arguments(ONE_GPU_COMMAND, "finetune_trainer.py", t5)
    assert num_ranks == 1
    assert arguments[arguments.index("--per_device_train_batch_size") + 1] == "20"
    found = _train("finetune_trainer.py", t5, num_ranks, arguments)
    assert (found["task"], found["world_size"]) == ("translation_en_to_ro", 1)
    assert len(found["losses"]) == 9
    assert found["losses"][-1] < found["losses"][0]


def test_posts_baseline_takes_deepspeed_in_the_place_of_ddp(t5: Path) -> None:
    command = BASELINE_COMMAND.replace("[...]", "--deepspeed ds_config_1gpu.json")
    num_ranks, arguments = _arguments(command, "finetune_trainer.py", t5)
    assert num_ranks == 2
    assert "t5-large" in arguments
