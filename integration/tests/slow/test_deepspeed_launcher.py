"""Programs under ``zero-engine run``: their ranks and their imported deepspeed.

``compat/checks/test_config_and_launcher.py`` compares the reading of host files with DeepSpeed's.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import environment, run_forked
from torch.distributed.run import get_args_parser

from tests.support.ports import free_port
from zero_core.errors import ConfigError
from zero_engine.deepspeed.served import reason_to_refuse
from zero_engine.script.hook import install, mend_loading
from zero_engine.script.run import add_options, carry_out, read_host_file, run_program

SEES = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
sys.stdout.write(json.dumps([{n: os.environ.get(n) for n in names}, sys.argv[1:]]) + chr(10))
"""
HOSTS = "# two machines\nworker-0 slots=2\n\nworker-1 slots=4 # faster\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(HOSTS, encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(SEES, encoding="utf-8")
    return path


def _ranks(done: subprocess.CompletedProcess[str]) -> list[tuple[dict[str, Any], list[str]]]:
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda one: int(one[0]["RANK"]))


@pytest.mark.parametrize(
    "options",
    [
        "--num_nodes 1 --num_gpus 2 --master_port PORT",
        "--include localhost:1,0 --hostfile=/dev/null --ssh-port=22",
        "-e worker-1:1,2@worker-0 -H hosts --no_local_rank --save_pid",
    ],
)
def test_options_start_the_ranks_that_deepspeed_would(script, options, monkeypatch):
    monkeypatch.chdir(script.parent)
    port = str(free_port())
    done = run_forked(
        "run", *options.replace("PORT", port).split(), script.name, "--epochs", "3", "--num_gpus=7"
    )
    ranks = _ranks(done)
    assert [rank["RANK"] for rank, _ in ranks] == ["0", "1"]
    assert {rank["WORLD_SIZE"] for rank, _ in ranks} == {"2"}
    assert all(arguments == ["--epochs", "3", "--num_gpus=7"] for _, arguments in ranks)
    assert (ranks[0][0]["MASTER_PORT"] == port) == ("PORT" in options)
    assert ("--ssh_port has no effect" in done.stderr) == ("--ssh-port=22" in options)


def test_nodes_without_ssh_are_parts_of_one_job(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    shared = ("--no_ssh", "--master_addr=127.0.0.1", "--master-port", str(free_port()), "--quiet")
    chosen = ("--hostfile", "hosts", "--include=worker-0:1@worker-1:0,3")

    def run_node(rank: int) -> subprocess.CompletedProcess[str]:
        return run_forked("run", *shared, f"--node_rank={rank}", *chosen, script.name)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run_node, range(2))
    assert [rank["RANK"] for rank, _ in _ranks(first)] == ["0"]
    assert [rank["RANK"] for rank, _ in _ranks(second)] == ["1", "2"]
    assert first.stderr == ""


def test_shell_script_finds_the_program_deepspeed(script: Path, tmp_path: Path) -> None:
    shell_script = tmp_path / "train.sh"
    logs = tmp_path / "logs"
    shell_script.write_text(
        f"deepspeed --num_gpus=2 --enable_each_rank_log={logs} {script} --save a\nexit 7\n",
        encoding="utf-8",
    )
    done = run_forked("run", str(shell_script))
    assert done.returncode == 7, done.stderr
    found = sorted(path.read_text(encoding="utf-8") for path in logs.rglob("stdout.log"))
    # --save is an argument of the script, not an abbreviation of --save_pid.
    assert [json.loads(text)[1] for text in found] == [["--save", "a"]] * 2


@pytest.mark.usefixtures("own_environment")
def test_fairscales_option_of_the_trainer_is_answered_with_the_way_over(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from transformers import HfArgumentParser", encoding="utf-8")
    for word in ("--sharded_ddp", "--sharded_ddp=simple"):
        assert '"zero_optimization": {"stage": 2}' in _refusal(str(script), "--fp16", word)
    script.write_text("ARGUMENTS = ['--sharded_ddp']", encoding="utf-8")
    assert run_forked("run", "-q", str(script), "--sharded_ddp").returncode == 0


def _refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as refused:
        run_program(arguments)
    return str(refused.value)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PATH", "ZERO_ENGINE_PYTHON", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.mark.usefixtures("own_environment")
def test_several_hosts_are_told_each_ones_command(script: Path) -> None:
    options = ["-H", str(script.parent / "hosts")]
    told = _refusal(*options, str(script), "--name", "a b").splitlines()
    for rank, host in enumerate(("worker-0", "worker-1")):
        start = f"  on {host}: zero-engine run --no_ssh --node_rank={rank} --master_addr=worker-0 "
        (line,) = (line for line in told if line.startswith(start))
        assert line.endswith(f"{script} --name 'a b'")


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("options", "is_alone", "num_ranks"),
    [
        ([], True, "1"),
        (["--nproc-per-node=4"], True, "4"),
        (["--num_gpus=2"], True, "2"),
        (["--master_port=29511"], False, "1"),
        (["--master_addr=127.0.0.1"], False, "1"),
    ],
)
def test_run_on_one_machine_takes_a_free_port_and_no_host_file_of_deepspeeds(
    script, options, is_alone, num_ranks, monkeypatch
):
    started: list[Namespace] = []
    monkeypatch.setattr("zero_engine.script.run.run_ranks", started.append)
    host_file = script.parent / "job"
    host_file.write_text("localhost slots=3\n", encoding="utf-8")
    monkeypatch.setattr("zero_engine.script.run.HOST_FILE", str(host_file))
    run_program([*options, str(script)])
    run_program(["deepspeed", str(script)])
    one, by_deepspeed = started
    assert one.standalone == is_alone
    assert one.nproc_per_node == num_ranks
    assert by_deepspeed.nproc_per_node == "3"


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--autotuning run", "zero-engine plan"),
        ("--bind_cores_to_rank", "--numa-binding=node"),
        ("--bind_core_list=0-3", "--numa-binding=node"),
        ("--force_multi", "this machine alone"),
        ("--num_gpus=0", "expected a whole number >= 1, found 0"),
        ("--num_gpus=1 --include=localhost", "exclude each other"),
        ("--include=localhost --exclude=localhost", "exclude each other"),
        ("--include=elsewhere", "there is no host 'elsewhere' among localhost"),
        ("--include=localhost:a", "expected HOST"),
        ("--exclude=localhost", "leaves no slot"),
        ("--num_nodes=2", "--nnodes=2"),
        ("--nproc-per-node=2 --num_gpus=2", "--nproc-per-node is torchrun's"),
        ("--nnodes=2 --num_gpus=2", "--nnodes is torchrun's"),
        ("--hostfile=nowhere", "--hostfile nowhere: there is no such file"),
        ("-H hosts --num_nodes=3", "the host file names 2"),
        ("-H hosts --no_ssh", "needs --node_rank, this machine's position in worker-0, worker-1"),
        ("-H hosts --no_ssh --node_rank=2", "expected 0 to 1"),
        ("-H hosts -i worker-0:2", "worker-0 has no slot 2: it has 2"),
    ],
)
def test_option_that_cannot_be_served_says_what_to_do(script, options, message, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert message in _refusal(*options.split(), script.name)


def test_broken_host_file_is_refused_by_line(tmp_path: Path) -> None:
    for lines, message in {
        "": "names no host",
        "a slots=2\nb": "line 2: expected 'HOST slots=NUMBER', found 'b'",
        "a slots=1\na slots=2": "line 2: a is there twice",
        "a slots=1\nb slots=0": "line 2: b has no slot",
    }.items():
        (tmp_path / "hosts").write_text(lines, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_host_file(tmp_path / "hosts")


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        ("", ["--include=localhost:1,3"], "1,3"),
        ("", ["--exclude=localhost:0"], "1,2,3"),
        ("4,5,6,7", ["--include=localhost:1,3"], "5,7"),
        ("4,5,6,7", ["--num_gpus=2"], "4,5,6,7"),
    ],
)
def test_chosen_slots_are_the_devices_that_ranks_see(visible, options, expected, monkeypatch):
    # The machine may lack four devices. The code under test needs only their number.
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parser = get_args_parser()
    add_options(parser)
    parsed = parser.parse_args([*options, "train.py"])
    carry_out(parsed, parser, options)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    num_ranks = 2 if "--num_gpus=2" in options else expected.count(",") + 1
    assert parsed.nproc_per_node == str(num_ranks)
    assert "4 devices are visible here" in _refusal("--num_gpus=5", "train.py")


SEES_DEEPSPEED = Path(__file__).parents[1] / "scripts" / "sees_deepspeed.py"
SITECUSTOMIZE = "import os\nos.environ['HIDDEN_SITECUSTOMIZE'] = 'was run'\n"


@pytest.fixture
def seen(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), environment().get("PYTHONPATH", "")])
    found: dict[str, Any] = json.loads(
        subprocess.run(
            [sys.executable, "-m", "zero_engine", "run", str(SEES_DEEPSPEED), "--help", "-m", "x"],
            env={**environment(), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        ).stdout
    )
    return found


def test_script_and_its_children_find_deepspeed_as_one_module(seen: dict[str, Any]) -> None:
    expected = {
        "is found": True,
        "version": "0.19.8",
        "__version__": "0.19.8",
        "packages": True,
        "finding it imports torch": False,
        "one module": True,
        "arguments": ["--help", "-m", "x"],
        "child": "zero_engine.deepspeed",
        "hidden sitecustomize": "was run",
        "instance": False,  # isinstance(3, PipelineModule), a class that the stand-in lacks
    }
    assert {name: seen[name] for name in expected} == expected
    assert seen["nonsense"].startswith("ModuleNotFoundError: ")
    for use, name in {
        "call": "pipe.LayerSpec",
        "subclass": "pipe.PipelineModule",
        "attribute": "moe.layer.MoE",
        "top level": "init_inference",
    }.items():
        assert seen[use].startswith("NotServedError: ")
        assert name in seen[use]
        assert reason_to_refuse(name) in seen[use]


def test_a_library_whose_release_is_not_known_is_imported_as_it_is(tmp_path, monkeypatch, caplog):
    place = tmp_path / "pytorch_lightning" / "strategies"
    place.mkdir(parents=True)
    for folder in (place.parent, place):
        (folder / "__init__.py").touch()
    (place / "deepspeed.py").write_text("value = 7", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    name = "pytorch_lightning.strategies.deepspeed"
    install()
    assert importlib.import_module(name).value == 7
    assert [record.getMessage().split(" ", 1)[0] for record in caplog.records] == [name]
    for imported in [n for n in sys.modules if n.partition(".")[0] == "pytorch_lightning"]:
        del sys.modules[imported]


def test_a_release_whose_loading_takes_other_arguments_is_not_mended() -> None:
    def load(load_config: object, model: object) -> None:
        pass

    module = ModuleType("transformers.core_model_loading")
    vars(module)["convert_and_load_state_dict_in_model"] = load
    with pytest.raises(ImportError, match=r"takes \['load_config', 'model'\], expected"):
        mend_loading(module)
    assert vars(module)["convert_and_load_state_dict_in_model"] is load


def test_script_runs_in_place_where_the_process_is_a_rank_already(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, importlib.metadata as m\nprint(os.getpid(), m.version('deepspeed'))"
    )
    started = subprocess.Popen(
        [sys.executable, "-m", "zero_engine", "run", str(script)],
        env={**environment(), "RANK": "0", "WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate(timeout=600)
    assert output.split() == [str(started.pid), "0.19.8"]


def test_torchrun_options_are_refused_for_a_program_that_starts_ranks(monkeypatch):
    for name in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with pytest.raises(ValueError, match=r"--nproc-per-node was given.*accelerate"):
        run_program(["--nproc-per-node=2", "accelerate", "launch", "train.py"])
