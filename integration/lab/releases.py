"""Runs `scars.py` with releases of DeepSpeed, on two CPU ranks.

    python integration/lab/releases.py                   each scar in the release it was seen in
    python integration/lab/releases.py --release 0.19.8  all scars in this release

A scar is a training in `scars.py` that a release got silently wrong. Each release is installed
without dependencies into its own folder, and each scar runs in its own processes. Modules that a
release requires but that are missing here are replaced (see `stand_in`). No code of a release is
changed. The exit code is 1 if a scar does not end as in `scars.SEEN`, which
``integration/lab/evidence/scars.md`` repeats.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from scars import NUMBERS, SEEN, SOMETIMES, run_all

HERE = Path(__file__).resolve()

LIMIT_S = 900  # the first program of a release compiles operators for minutes


def install(release: str, folder: Path) -> Path:
    """Return the folder of ``release``, after installing the release there if necessary."""
    target = folder / release
    if not (target / "deepspeed").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        command = [*pip, "--no-build-isolation", "--target", str(target), f"deepspeed=={release}"]
        subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
    return target


def run_release(target: Path, number: int) -> str:
    """Run one scar with the release in ``target``. Return the error, or an empty string."""
    results = target.with_name(f"{target.name}.{number}.json")
    results.unlink(missing_ok=True)
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        # A folder separate from that of the installed DeepSpeed.
        "TORCH_EXTENSIONS_DIR": str(target.with_name(f"{target.name}.extensions")),
        # Without this variable releases below 0.16 ask the program numactl for the number of CPU
        # devices.
        "LOCAL_SIZE": "2",
        # Checkpoints of releases below 0.16 hold objects, which torch.load refuses by default since
        # 2.6.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    log = target.with_name(f"{target.name}.{number}.log")
    with log.open("wb") as output:
        started = subprocess.Popen(
            [*launcher, str(HERE), f"--number={number}", f"--results={results}"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            started.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            started.terminate()  # SIGTERM instead of SIGKILL, so that the launcher ends its ranks
            started.wait()
            return f"not over after {LIMIT_S} s"
    if not results.is_file():
        return f"its processes failed: {log}"
    found: str = json.loads(results.read_text(encoding="utf-8"))
    return found


def stand_in() -> None:
    """Provide names that releases of 2024 import and that are missing here.

    No scar computes anything with them: Intel's extension of torch and its collectives, a function
    and a logger of torch's elastic agent, and a constant of NumPy.
    """
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        sys.modules.setdefault(name, ModuleType(name))
    absent = {
        "torch.distributed.elastic.agent.server.api": {"log": None, "_get_socket_with_port": None},
        "numpy": {"BUFSIZE": 8192},
    }
    for name, values in absent.items():
        module = vars(importlib.import_module(name))
        for key, value in values.items():
            module.setdefault(key, value)


def run_rank(number: int, results: Path) -> None:
    """Run a scar on this rank. Rank 0 writes the error, or an empty string."""
    import torch
    import torch.distributed as dist

    stand_in()
    deepspeed = importlib.import_module("deepspeed")
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.communication_backend_name = lambda: "gloo"
    # DeepSpeed's check requires fp16 instructions, but torch needs none and is only slower.
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    # Prevents a compilation that takes minutes, of collectives that only inference uses.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    found = run_all(deepspeed, [number], rank, 2, str(results.with_suffix("")))
    if rank == 0:
        results.write_text(json.dumps(found[number]), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Run trainings of `scars.py` with releases of DeepSpeed, or with ``--results`` one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="append", help="of DeepSpeed; repeatable")
    parser.add_argument("--number", type=int, action="append", help="of a scar; repeatable")
    parser.add_argument("--folder", type=Path, default=Path(".nox", "deepspeed"))
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results is not None:
        run_rank(options.number[0], options.results)
        return
    runs = [(release, number) for release in options.release or () for number in NUMBERS]
    seen = {number: release for number, (release, _) in SEEN.items()}
    runs = runs or [(release, number) for number, release in {**seen, **SOMETIMES}.items()]
    missing = []
    for release, number in runs:
        if options.number and number not in options.number:
            continue
        found = run_release(install(release, options.folder.resolve()), number)
        print(f"{release}  #{number}  {found[:200] or 'right'}", flush=True)
        seen_in, end = SEEN.get(number, ("", ""))
        if seen_in == release and not found.startswith(end):
            missing.append(f"#{number} in {release}")
    if missing:
        sys.exit(f"not seen: {', '.join(missing)}")


if __name__ == "__main__":
    main()
