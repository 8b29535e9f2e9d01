"""How each command of the documentation is run by tests: as it stands, smaller, or elsewhere.

A command is a line of a bash block, without its comment. One that no table names is run as it is
printed, by slow/test_doc_runs.py. test_doc_commands.py fails where a table names a command that no
page has any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from doc_blocks import Block

_TINY = "--layers=2 --width=32 --heads=2 --context=32 --vocab=300 --ranks=2"
_GPT = "--num-attention-heads 32 --batch-size 4"
_T5 = "--model_name_or_path t5 --output_dir tuned --max_steps 2 --n_train 8 --n_val 2 --use_cpu"
_TIMES = "--size 1x64 --context 16 --micro-batch 1 --turns 2 --output=results"

SMALLER = {
    "zero-engine --install-completion": "bash",  # a test need not have been started by a shell
    "zero-engine train": f"{_TINY} --steps=30",
    "zero-engine train --data my.txt --config zero.json --steps 500 --output runs/mine": (
        f"{_TINY} --steps=30"
    ),
    "zero-engine train --size 2.2b --steps 3 --ranks 1 --output runs/large": (
        "--size=1m --context=32 --vocab=300"
    ),
    "zero-engine run --num_gpus 1 pretrain_gpt2.py --num-layers 50 --hidden-size 4096"
    " --deepspeed_config ds_zero_offload.config": _GPT,
    "zero-engine run --nproc-per-node 2 finetune_trainer.py --fp16 --deepspeed zero.json": _T5,
    "python packages/zero-comm/benchmarks/quantizer_speed.py --repetitions 3": "--numel 65536",
    "nox -s bench -- checkpoint --threads 2 --rounds 2 --steps 5": (
        "--layers 1 --width 64 --context 16 --rounds 1 --steps 3 --folder=. --output=results"
    ),
    "python integration/benchmarks/run.py patches --turns 60": _TIMES,
    "OMP_NUM_THREADS=1 nox -s bench -- copies --size 4x192 --steps 1 --turns 150": _TIMES,
    "OMP_NUM_THREADS=1 nox -s bench -- copies --size 4x192 --steps 1 --turns 150 --offload": _TIMES,
}
"""What follows a command whose run as printed would take minutes."""

_CPU = "tests/slow/bench/test_on_cpu.py::"
_GPU = "tests/slow/bench/test_accelerator_programs.py::"
_LESSON = "tests/slow/test_tutorials.py::"
_LESSON += "test_command_of_a_tutorial_trains_and_prints_what_the_page_shows"
_CONVERGES = "test_held_out_loss_stays_near_the_unquantized_one"
_LINK = "tests/slow/bench/test_comm.py::test_bench_counts_on_the_link_what_the_plan_says"
_NODES = "tests/slow/test_cluster_recipes.py::test_slurm_script_trains_on_two_nodes"

ELSEWHERE = {
    "nox -s bench -- cpu_adam": (
        f"{_CPU}test_host_adam_bench_measures_the_installed_and_names_the_others"
    ),
    "nox -s bench -- cpu_adam_convergence": (
        f"{_CPU}test_convergence_bench_sets_narrow_states_beside_wide_ones"
    ),
    "nox -s bench -- engine": f"{_CPU}test_engine_bench_writes_figures_that_agree",
    "nox -s bench -- offload": (
        f"{_CPU}test_offload_bench_sets_states_in_files_beside_the_bare_model"
    ),
    "nox -s bench -- memory": f"{_CPU}test_memory_bench_compares_peaks_with_formula_and_plan",
    "python integration/benchmarks/run.py seq2seq": (
        "tests/slow/bench/test_seq2seq.py::test_contenders_train_alike_within_the_cap"
    ),
    "nox -s bench -- comm_convergence": f"tests/slow/test_comm_convergence.py::{_CONVERGES}",
    "nox -s bench -- comm_convergence --resume": (
        "tests/slow/bench/test_comm_convergence_bench.py::test_runs_that_are_there_are_not_repeated"
    ),
    "nox -s bench -- schedule --auto-draws 100": (
        "tests/slow/bench/test_schedule.py::test_schedule_bench_writes_rows_and_lanes"
    ),
    "nox -s bench -- practicality": (
        "tests/slow/bench/test_practicality.py::test_bench_writes_practicality_of_all_schedules"
    ),
    "nox -s bench -- late": (
        "tests/slow/bench/test_late.py::test_every_case_has_the_bits_of_the_cpu"
    ),
    "nox -s bench -- comm": _LINK,
    "python integration/benchmarks/run.py comm --lr 1e-5 --ranks-per-node 2": _LINK,
    "nox -s bench -- comm --rate 200 --ranks-per-node 2 --only bare --only fsdp2"
    " --only zero-3-all": _LINK,
    "python integration/benchmarks/run.py gpu --dry-run --out DIR": (
        f"{_GPU}test_dry_run_writes_a_picture_and_prints_short_tables_last"
    ),
    "python integration/benchmarks/run.py offload_cuda --dry-run": (
        f"{_GPU}test_bytes_over_the_bus_follow_the_ratio"
    ),
    "python integration/benchmarks/run.py comm_cuda --dry-run": (
        "tests/slow/bench/test_comm_cuda.py::"
        "test_dry_run_says_which_backend_ran_and_writes_table_and_picture"
    ),
    "torchrun --nproc-per-node 2 integration/examples/tutorials/twin_flow.py": _LESSON,
    "torchrun --nproc-per-node 1 integration/examples/tutorials/offload.py": _LESSON,
    "torchrun --nproc-per-node 2 integration/examples/tutorials/zero.py": _LESSON,
    "torchrun --nproc-per-node 4 integration/examples/tutorials/zeropp.py": _LESSON,
    "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=job1 --rdzv-backend=c10d"
    " --rdzv-endpoint=node1:29500 train.py": _NODES,
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id job1 --rdzv-backend c10d"
    " --rdzv-endpoint node1:29500 train.py": _NODES,
}
"""The test that runs a command's program, smaller."""

_OF_NOX = "a session of nox, hours long, that CI or a person runs whole; its name is checked"
_ROOT = "minutes, as root, in network namespaces; its options are checked"
_GPU_ALONE = "needs a GPU, or refuses by name without one; --dry-run, which runs, is beside it"
_MACHINES = "needs the machines that it names; its options are checked"

NOT_RUN = {
    "python -m pip install nox && python -m nox -s train": (
        "compiles and installs; `nox -s wheels` trains in a new environment"
    ),
    "python -m pip install nox && python -m nox -s tests": "the tests themselves",
    "nox -s compat": _OF_NOX,
    "nox -s faults": _OF_NOX,
    "nox -s faults -- -k checkpoint": _OF_NOX,
    "nox -s \"matrix(torch-2.15.0-cuda-13.2, python='3.13')\"": _OF_NOX,
    "nox -s minimum": _OF_NOX,
    "nox -s soak -- --minutes 20": _OF_NOX,
    "nox -s wheels": _OF_NOX,
    "pytest": "the package's own tests, which `nox -s tests` runs",
    "python integration/benchmarks/run.py plan --set held_out --steps 6 --rounds 2": _ROOT,
    "python integration/benchmarks/run.py plan --set search --steps 5 --rounds 2": _ROOT,
    "python integration/benchmarks/run.py diagnose": _ROOT,
    "python integration/benchmarks/run.py gpu --minutes 9 --out integration/benchmarks/results": (
        _GPU_ALONE
    ),
    "python integration/benchmarks/run.py gpu --only single --only correct": _GPU_ALONE,
    "python integration/benchmarks/run.py differences": "trains sixteen runs for half an hour",
    "python integration/benchmarks/run.py offload_cuda": _GPU_ALONE,
    "python integration/benchmarks/run.py comm_cuda": _GPU_ALONE,
    "torchrun --nproc-per-node gpu train.py": "needs a GPU; the line after it runs",
    "zero-engine plan models/mine --world-size 8 --seq-length 1024 --batch-size 64"
    " --fit fit.json": (
        "takes the rates that the user's machine has kept, which tests hide; integration/README.md"
        " plans with those of a file, which runs"
    ),
    "zero-engine run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d"
    " --rdzv-endpoint host1:29400 train.py": _MACHINES,
    "zero-engine run accelerate launch --config_file accelerate.yaml --num_machines 2"
    " --num_processes 16 --machine_rank 0 --main_process_ip node1 --main_process_port 29500"
    " --deepspeed_multinode_launcher standard train.py": _MACHINES,
}
"""Why no test runs a command."""


def commands(block: Block) -> Iterator[str]:
    """Yield a block's commands as one line each, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command = " ".join(re.sub(r"(^|\s)# .*$", "", line).split())
        if command:
            yield command


def is_install(command: str) -> bool:
    """Return whether it installs packages: slow/test_doc_installs.py has these."""
    return re.match(r"(python -m )?pip install (?!nox)", command) is not None


def is_run(command: str) -> bool:
    """Return whether slow/test_doc_runs.py runs it."""
    return not is_install(command) and command not in ELSEWHERE and command not in NOT_RUN


def as_run(command: str) -> str:
    """Return what a shell gets: ``nox -s bench`` without nox, and smaller."""
    what, mark, target = command.partition(" > ")
    what = what.replace("nox -s bench -- ", "python integration/benchmarks/run.py ")
    return f"{what} {SMALLER.get(command, '')}{mark}{target}"
