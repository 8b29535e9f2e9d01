"""Runs ``tests/scars.py`` with releases of DeepSpeed, on two ranks on the CPU.

    python integration/compat/releases.py                   releases in which a scar was seen
    python integration/compat/releases.py --release 0.19.8  this one

Each release is installed without its dependencies into a folder of its own. Ends with code 1 if a
scar is not seen in the release that `SEEN` names, which ``docs/scars.md`` repeats.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
TESTS = HERE.parents[1] / "tests"
LIMIT_S = 900
SEEN: dict[str, tuple[int, ...]] = {
    "0.15.1": (6569, 7981),
    "0.18.2": (5154, 6351, 6485, 6550, 7718, 7837, 7981, 8113),
    "0.19.2": (8113,),
}
"""Scars by release of DeepSpeed."""


def install(release: str, folder: Path) -> Path:
    """Return the folder with ``release``, into which it is installed where it is not there yet."""
    target = folder / release
    if not (target / "deepspeed").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        command = [*pip, "--no-build-isolation", "--target", str(target), f"deepspeed=={release}"]
        subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
    return target


def run_release(target: Path) -> dict[int, str]:
    """Return what went wrong with each scar in the release in ``target``."""
    results = target.with_name(f"{target.name}.jsonl")
    results.unlink(missing_ok=True)
    paths = [str(target), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        # Not where the installed DeepSpeed has its own.
        "TORCH_EXTENSIONS_DIR": str(target.with_name(f"{target.name}.extensions")),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    log = target.with_name(f"{target.name}.log")
    with log.open("wb") as output:
        try:
            subprocess.run(
                [*launcher, str(HERE), "--results", str(results)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{target.name}: ended after {LIMIT_S} s", file=sys.stderr)
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return dict(json.loads(line) for line in lines)


def run_rank(results: Path) -> None:
    """Run all scars on this rank. Rank 0 writes a line for each as it ends."""
    import torch.distributed as dist
    from scars import NUMBERS, run_all

    deepspeed = importlib.import_module("deepspeed")
    # Compiled for minutes otherwise, for collectives of inference.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    for number in NUMBERS:
        found = run_all(deepspeed, [number], rank, 2, str(results.parent))
        if rank == 0:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, found[number]]) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Run releases, or, as a rank, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="append", help="of DeepSpeed; repeatable")
    parser.add_argument("--folder", type=Path, default=Path(".nox", "deepspeed"))
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results is not None:
        run_rank(options.results)
        return
    missing = []
    for release in options.release or SEEN:
        found = run_release(install(release, options.folder.resolve()))
        for number, problem in found.items():
            print(f"{release}  #{number}  {problem or 'right'}", flush=True)
        missing += [f"#{n} in {release}" for n in SEEN.get(release, ()) if not found.get(n)]
    if missing:
        sys.exit(f"not seen: {', '.join(missing)}")


if __name__ == "__main__":
    main()
