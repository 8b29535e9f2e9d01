"""Ranks that srun or mpirun starts under ``zero-engine run``, and their process group."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import CAPTURED, environment, own_lines, run_forked, run_program

from benchmarks.harness.forked_python import forked_python
from tests.support.ports import free_port
from zero_core import ConfigError
from zero_engine import deepspeed
from zero_engine.launch.ranks import join_ranks
from zero_engine.launch.started_ranks import first_host, rank_variables
from zero_engine.launch.torchrun import local_address_only
from zero_engine.report.run import read_run
from zero_engine.script.hook import hooked
from zero_engine.script.run import OPTION, Source, declares, source_of

SLURM = {
    "SLURM_JOB_ID": "40007",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-09],login",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
# SLURM's pmi2 plugin, the default at some sites, also sets PMI variables, as MPICH does.
PMI2 = {**SLURM, "PMI_FD": "7", "PMI_JOBID": "40007.0", "PMI_RANK": "5", "PMI_SIZE": "8"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}RANK": "3" for name in ("", "LOCAL_")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{name}SIZE": "4" for name in ("", "LOCAL_")}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SCRIPT = """
import os, sys, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed()
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
line = f"{dist.get_rank()} {dist.get_world_size()} {os.environ['LOCAL_RANK']} {total}"
sys.stdout.write(line + chr(10))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("environment", [SLURM, PMI2])
def test_slurms_task_is_a_rank(environment: dict[str, str]) -> None:
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    address = {"MASTER_ADDR": "node07", "MASTER_PORT": "20007"}
    assert rank_variables(environment) == ranks | address


def test_mpiruns_process_is_a_rank_and_a_given_port_wins_over_that_of_slurms_job() -> None:
    assert rank_variables(SLURM, port=29501)["MASTER_PORT"] == "29501"
    assert rank_variables({**SLURM, "MASTER_PORT": "77"}, port=29501)["MASTER_PORT"] == "77"
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert rank_variables(OPEN_MPI, port=1234) == ranks | address
    found = rank_variables({**MPICH, "MASTER_ADDR": "host1", "MASTER_PORT": "77"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("host1", "77")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "4", "1")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (MPICH, r"mpirun started 4 ranks.*set MASTER_ADDR to the addr"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "host1"}, "set LOCAL_RANK"),
        # SLURM's variables are ignored where its tasks are mpirun's proxies.
        ({**PMI2, "PMI_SIZE": "16"}, "set LOCAL_RANK"),
        ({**PMI2, "PMI_RANK": "6"}, "set LOCAL_RANK"),
    ],
)
def test_what_mpirun_does_not_say_is_asked_for(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_variables(variables)


def test_only_gpu_that_a_rank_sees_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for visible, index in ((1, 0), (8, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert join_ranks() == chosen.pop() == torch.device("cuda", index)


@pytest.mark.parametrize(
    "alone",
    [
        {},
        {**SLURM, "RANK": "0"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a batch script
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # the shell of salloc
    ],
)
def test_process_that_is_no_task_has_no_variables(alone: dict[str, str]) -> None:
    assert rank_variables(alone) == {}


def test_first_host_of_slurms_list() -> None:
    hosts = {"node1": "node1", "a,b": "a", "node[07-09,12]": "node07", "node[3,5],x": "node3"}
    hosts |= {"rack[1-2]node[4-5].lan": "rack1node4.lan", "": ""}
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts


def test_processes_of_one_starter_are_the_ranks_of_one_training(tmp_path: Path) -> None:
    # Only SLURM's variables are used here, because other tests cover mpirun's.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    variables = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    variables |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def start(number: int) -> str:
        own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        words = [forked_python(), "-m", "zero_engine", "run", str(script)]
        more = {**environment(), **variables, **own}
        done = subprocess.run(words, env=more, **CAPTURED)
        return "\n".join(own_lines(done.stdout))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(start, range(2))) == ["0 2 0 1.0", "1 2 1 1.0"]


# DeepSpeed-Chat's programs declare arguments in this way.
DECLARES = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int)
args = parser.parse_args()
sys.stdout.write(f"{os.environ['LOCAL_RANK']} {args.local_rank} {args.epochs}\\n")
"""
DOES_NOT = '''
"""It would end at --local_rank."""
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
sys.stdout.write(f"{parser.parse_args().epochs}\\n")  # not --local_rank
'''


def _write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_each_rank_is_given_its_own_number(tmp_path: Path) -> None:
    script = _write(tmp_path, DECLARES)
    done = run_program("run", "--nproc-per-node=2", str(script), "--epochs", "3")
    assert sorted(done.stdout.splitlines()) == ["0 0 3", "1 1 3"]
    assert done.stderr.count("script.py declares --local_rank and is given it") == 1


@pytest.mark.parametrize(
    ("rank", "text", "before", "after", "output", "told"),
    [
        ("5", DECLARES, [], [], "1 1 None\n", ""),
        ("0", DOES_NOT, [], ["--epochs=3"], "3\n", "script.py is not given --local_rank"),
        ("5", DECLARES, ["--no-local-rank"], [], "1 -1 None\n", ""),
        ("5", DECLARES, [], ["--local_rank=7"], "1 7 None\n", ""),
        ("5", DOES_NOT, ["--local-rank"], [], "", "unrecognized arguments: --local_rank"),
    ],
)
def test_process_that_is_a_rank_gives_the_number_that_is_declared_or_asked_for(
    tmp_path, rank, text, before, after, output, told
):
    variables = {"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    script = str(_write(tmp_path, text))
    done = run_forked("run", *before, script, *after, more=variables)
    assert done.stdout == output, done.stderr
    assert told in done.stderr
    assert told or "local_rank" not in done.stderr, "rank 0 alone tells"


def _declares(script: Path) -> bool:
    return declares(Source(script, script.parent), OPTION)


@pytest.mark.parametrize(
    ("script", "package", "file"),
    [
        ("from options import parser", "", "options.py"),
        ("import package.options", "", "package/options.py"),
        ("import package.options", "", "package/__init__.py"),
        ("from package import options", "", "package/options.py"),
        ("from package import parser", "", "package/__init__.py"),
        ("import package", "from .options import parser", "package/options.py"),
        ("import package", "from . import options", "package/options.py"),
        ("import package", "from ..options import parser", "options.py"),
        ("import package", "from ..other import parser", "other/__init__.py"),
    ],
)
def test_option_may_be_declared_by_a_module_that_is_imported(tmp_path, script, package, file):
    path = _write(tmp_path, script)
    if package:
        _write(tmp_path, package, "package/__init__.py")
        _write(tmp_path, DOES_NOT, "package/unused.py")
    _write(tmp_path, DECLARES, "unrelated.py")
    assert not _declares(path)
    _write(tmp_path, DECLARES, file)
    assert _declares(path)


# transformers' HfArgumentParser declares arguments in this way.
FIELDS = """
import dataclasses, os
@dataclasses.dataclass(frozen=True)
class Options:
    local_rank: int = -1
"""


def test_field_of_a_dataclass_is_an_option_of_hugging_faces_parser(tmp_path: Path) -> None:
    script = _write(tmp_path, "from options import Options")
    _write(tmp_path, FIELDS, "options.py")
    assert not _declares(script), "nobody makes an option of it"
    _write(tmp_path, "from options import Options\nhf.HfArgumentParser(Options)")
    assert _declares(script)


def test_of_an_installed_module_its_own_package_alone_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    _write(tmp_path, DECLARES, "unrelated.py")
    _write(tmp_path, "import unrelated, package.options", "package/__main__.py")
    source = source_of("package", is_module=True)
    assert source is not None
    assert not declares(source, OPTION)
    _write(tmp_path, DECLARES, "package/options.py")
    assert declares(source, OPTION)


# The script lists threads at exit, after the hook destroyed the group. Neither a new optimizer,
# for which torch imports its compiler, nor a reference cycle may keep the group alive.
LEAVES_A_CYCLE = """
import atexit, pathlib, torch, torch.distributed as dist

def look():
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        print("thread", path.read_text().strip())

atexit.register(look)
import deepspeed
deepspeed.init_distributed()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
dist.all_reduce(torch.ones(4))
"""
ONE_DIES = """
import os, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed()
dist.barrier()
if dist.get_rank() == 1:
    os._exit(9)
dist.all_reduce(torch.ones(4))
"""


def _run_ranks(script: Path) -> str:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {**hooked(environment()), **local_address_only()}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = "".join(rank.communicate(timeout=600)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], output
    return output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_group_is_left_when_the_process_ends(tmp_path: Path) -> None:
    output = _run_ranks(_write(tmp_path, LEAVES_A_CYCLE))
    assert output.count("thread python") == 2
    assert "runloop" not in output


def test_rank_that_dies_does_not_keep_the_others_from_ending(tmp_path: Path) -> None:
    script, ranks = str(_write(tmp_path, ONE_DIES)), {"PYTHON_EXEC": forked_python()}
    done = run_forked("run", "--nproc-per-node=2", script, more=ranks)
    assert done.returncode in (1, 9), done.stderr


def test_timeout_is_the_environments_in_minutes_and_must_be_a_number(monkeypatch):
    made: list[dict[str, object]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_args, **options: made.append(options))
    # Engines of earlier tests in this process may have created a group.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT = 'soon'"):
        deepspeed.init_distributed()
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "7")
    deepspeed.init_distributed()
    deepspeed.init_distributed(timeout=timedelta(seconds=5))
    monkeypatch.delenv("DEEPSPEED_TIMEOUT")
    deepspeed.init_distributed()
    found = [options.get("timeout") for options in made]
    assert found == [timedelta(minutes=7), timedelta(seconds=5), None]


def test_records_of_an_unchanged_script_are_read_by_a_report(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "records"
    script.write_text(
        'import torch, zero_core; config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}\n'
        "engine = zero_core.build(torch.nn.Linear(2, 2), config)\n"
        "engine.backward(engine(torch.ones(1, 2)).sum()); engine.step()\n"
    )
    run_program("run", f"--record={folder}", str(script))
    assert read_run(folder).ranks[0].steps[-1].step == 1
