"""The recipes of docs/clusters.md: SLURM's script runs, as two nodes that are one machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.forked_python import forked_python

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")

# A node is a process of its own, with the number that SLURM gives it. One that fails ends the job.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # its own options
pids=()
echo "srun starts $SLURM_JOB_NUM_NODES tasks" >&2
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\n127.0.0.1\\n'
"""
EXAMPLE = ROOT / "integration" / "examples" / "fsdp2_quantized.py"


def _sbatch_script() -> str:
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", TEXT, re.M | re.S)
    return str(script)


def _executable(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_slurm_script_trains_on_two_nodes(tmp_path: Path) -> None:
    torchrun = f'#!/bin/bash\nexec {shlex.quote(forked_python())} -m torch.distributed.run "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        _executable(tmp_path / name, text)
    _executable(tmp_path / "job.sh", _sbatch_script())
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),  # whence the port
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [tmp_path / "job.sh", EXAMPLE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "srun starts 2 tasks" in done.stderr
    assert re.fullmatch(r"loss [\d.]+ -> [\d.]+\n", done.stdout)  # of rank 0 alone


def test_torchrun_recipe_has_the_options_of_the_slurm_script() -> None:
    (recipe,) = re.findall(r"^    (torchrun --nnodes=2 .*)$", TEXT, re.M)
    options = [word.partition("=")[0] for word in shlex.split(recipe) if word.startswith("--")]
    script = _sbatch_script()
    for option in options:
        assert f"{option}=" in script, option


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("line", [r"--ntasks-per-node=1$", r"--nodes=\d+$", r"--signal=TERM@\d+$"])
def test_slurm_script_asks_for_what_it_relies_on(line: str) -> None:
    assert re.search(rf"^#SBATCH {line}", _sbatch_script(), re.M)
