"""Replacements of SLURM's programs, for a job of two nodes on one machine."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"

# Each node is a process with its SLURM_NODEID. A node that fails makes the job fail.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # its own options
pids=()
echo "srun starts $SLURM_JOB_NUM_NODES tasks" >&2
trap 'waits=yes; kill -USR1 "${pids[@]}"' USR1
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" & pids+=($!)
done
echo $$ > "${0%/*}/srun.pid"
code=0
for pid in "${pids[@]}"; do
    waits=yes
    while [[ -n $waits ]]; do  # a signal ends the wait, not the node, whose own code comes then
        waits=
        wait "$pid"
        last=$?
        ((last == 127)) || own=$last
    done
    ((own > code)) && code=$own
done
exit $code
"""
# In SLURM the last task of an array has the array's id, so a signal to that id reaches all tasks.
# This scancel therefore accepts the task's own id only.
SCANCEL = """#!/bin/bash
own=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
[[ "$*" == "--signal=USR1 ${own:-$SLURM_JOB_ID}" ]] && kill -USR1 "$(cat "${0%/*}/srun.pid")"
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\n127.0.0.1\\n'
[ "$1" = requeue ] && echo "$2" > "${0%/*}/requeued"
"""


def slurm_job(folder: Path, program: str) -> dict[str, str]:
    """Write the replacements and the job script ``job.sh`` into ``folder``. Return the environment.

    ``program`` is the text of the file that replaces ``zero-engine``.
    """
    programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "zero-engine": program}
    for name, text in {**programs, "job.sh": SCRIPT.read_text(encoding="utf-8")}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),  # the job script derives its port from the id
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
