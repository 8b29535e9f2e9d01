"""Runs of the SLURM script and the Ray example, and checks of the Kubernetes recipe."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CAPTURED, own_lines

from benchmarks.harness.forked_python import forked_python
from faults.harness import Program
from faults.ranks.slurm_stand_ins import slurm_job
from zero_core.extensions.heartbeat import VARIABLE

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTERS = EXAMPLES / "clusters"
EXAMPLE = EXAMPLES / "fsdp2_quantized.py"


def test_slurm_script_trains_on_two_nodes(tmp_path: Path) -> None:
    program = f'#!/bin/bash\nexec {shlex.quote(forked_python())} -m zero_engine "$@"\n'
    done = subprocess.run(
        [tmp_path / "job.sh", EXAMPLE], cwd=tmp_path, env=slurm_job(tmp_path, program), **CAPTURED
    )
    assert done.returncode == 0, done.stderr
    assert "srun starts 2 tasks" in done.stderr
    (line,) = own_lines(done.stdout)
    assert re.fullmatch(r"loss [\d.]+ -> [\d.]+", line)


# Here a shell script replaces the train program. `faults/ranks/test_restarts.py` has the real one.
@pytest.mark.parametrize(("code", "is_requeued"), [(138, True), (1, True), (2, False), (0, False)])
@pytest.mark.parametrize("is_array", [True, False])
def test_slurm_script_is_requeued_after_its_warning(code, is_requeued, is_array, tmp_path):
    program = f"#!/bin/bash\ntrap 'exit {code}' USR1\necho \"$@\" > $SLURM_NODEID.arguments\n"
    environment = slurm_job(tmp_path, program + "while true; do sleep 0.05; done\n")
    job_id = environment["SLURM_JOB_ID"]
    if is_array:  # the array's last task, whose job id equals the array's id
        environment |= {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": "7"}
    with subprocess.Popen(
        [tmp_path / "job.sh", "train.py", "--seed={task}"],
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            _wait_for(job, [tmp_path / n for n in ("0.arguments", "1.arguments", "srun.pid")])
            job.send_signal(signal.SIGUSR1)
            assert job.wait(60) == code
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    asked = tmp_path / "requeued"
    assert (asked.read_text().split() if asked.exists() else []) == (
        [f"{job_id}_7" if is_array else job_id] if is_requeued else []
    )
    own = "--seed=7" if is_array else "--seed=0"
    assert (tmp_path / "1.arguments").read_text().split()[-2:] == ["train.py", own]


def _wait_for(job: subprocess.Popen[bytes], paths: list[Path]) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert job.poll() is None
        assert time.monotonic() < end, paths
        time.sleep(0.01)


def test_slurm_script_without_a_warning_is_not_requeued(tmp_path: Path) -> None:
    environment = slurm_job(tmp_path, "#!/bin/bash\nexit 1\n")
    job = [tmp_path / "job.sh", "train.py"]
    done = subprocess.run(job, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "requeued").exists()


def _document(name: str) -> dict[str, Any]:
    content = yaml.safe_load((CLUSTERS / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_kubernetes_probes_read_the_heartbeat_and_mistakes_are_final(tmp_path: Path) -> None:
    jobs = _document("kubeflow_runtime.yaml")["spec"]["template"]["spec"]
    (job,) = jobs["replicatedJobs"]
    spec = job["template"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    (ending,) = jobs["failurePolicy"]["rules"]  # without this rule JobSet restarts a failed Job
    assert (rule["action"], ending["action"]) == ("FailJob", "FailJobSet")
    assert ending["onJobFailureReasons"] == ["PodFailurePolicy"]
    (container,) = spec["template"]["spec"]["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"] == "node"
    assert rule["onExitCodes"]["values"] == [2]
    (variable,) = container["env"]
    assert variable["name"] == VARIABLE
    beats = tmp_path / "beats"
    beats.write_text("")
    for age_s, is_alive in ((0, True), (1200, False)):
        os.utime(beats, (time.time() - age_s,) * 2)
        command = container["livenessProbe"]["exec"]["command"]
        words = [word.replace(variable["value"], str(beats)) for word in command]
        assert (subprocess.run(words, check=False).returncode == 0) is is_alive


pytest.importorskip("ray", reason="the optional ray is not installed")

RAY_EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def _workers(program: Program) -> list[int]:
    found = []
    for pid in program.descendants():
        with suppress(OSError):
            if b"ray::RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _weights(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / "step-64"
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def test_run_goes_on_with_the_same_bits_after_a_worker_was_killed(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with Program(str(RAY_EXAMPLE), str(straight)) as program:
        assert program.end() == 0, program.output
    with Program(str(RAY_EXAMPLE), str(killed)) as program:
        saved = killed / "checkpoints" / "latest"
        program.wait_for(lambda: len(_workers(program)) == 2)
        first = _workers(program)
        program.wait_for(saved.exists)
        os.kill(first[-1], signal.SIGKILL)
        assert not (killed / "checkpoints" / "step-64").exists(), "it was killed too late"
        program.wait_for(lambda: len({*_workers(program)} - {*first}) == 2)
        assert program.end() == 0, program.output
    assert len(_weights(straight)) > 0
    assert _weights(killed) == _weights(straight)
