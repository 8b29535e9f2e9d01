"""The README's examples run and do what its comments say."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    _, _, rest = README.read_text().partition("```python\n")
    code, _, _ = rest.partition("```")
    names: dict[str, Any] = {}
    exec(code, names)
    numel = names["weights"].numel()
    assert round(names["packed"].numel() / numel, 3) == 1.008
    assert names["full"].equal(names["again"])
    assert (names["full"] - names["weights"]).abs().max() < 0.04


def test_the_examples_of_ddp_fsdp2_and_functions_run_on_two_ranks(tmp_path: Path) -> None:
    found = dict(re.findall(r"```python (\w+)\n(.*?)```", README.read_text(), re.DOTALL))
    script = tmp_path / "example.py"
    code = [found[name] for name in ("ddp", "fsdp2", "functions")]
    check = "assert (total.shape, full.shape) == ((512, 8), (1024, 8))\nprint('reached the end')\n"
    script.write_text("\n".join([*code, check, "dist.destroy_process_group()\n"]))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached the end") == 2
