"""Stand-ins for SLURM's programs: a job of two nodes, which are one machine."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"

# A node is a process of its own, with the number that SLURM gives it. One that fails ends the job.
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
# The last task of an array has the array's own id: a signal to that is one to all tasks.
SCANCEL = """#!/bin/bash
own=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
[[ "$*" == "--signal=USR1 ${own:-$SLURM_JOB_ID}" ]] && kill -USR1 "$(cat "${0%/*}/srun.pid")"
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\n127.0.0.1\\n'
[ "$1" = requeue ] && echo "$2" > "${0%/*}/requeued"
"""


def slurm_job(folder: Path, program: str) -> dict[str, str]:
    """Put stand-ins into ``folder``, and the script as ``job.sh``. Returns the job's environment.

    ``program`` is the text of the one that stands in for ``zero-engine``.
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
        "SLURM_JOB_ID": str(os.getpid()),  # whence the port
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
