"""The README's examples run and have the results that their comments state."""

import os
import re
from pathlib import Path
from typing import Any

from support.real_ranks import start_ranks
from torch.distributed import TCPStore

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


def run_example(rank: int, world_size: int, port: int, folder: str, code: str) -> None:
    """Execute ``code`` with the variables that torchrun sets for each rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    names: dict[str, Any] = {}
    exec(code, names)
    Path(folder, str(rank)).write_text(f"{[*names['total'].shape]} {[*names['full'].shape]}")
    names["dist"].destroy_process_group()


def test_the_examples_of_ddp_fsdp2_and_functions_run_on_two_ranks(tmp_path: Path) -> None:
    found = dict(re.findall(r"```python (\w+)\n(.*?)```", README.read_text(), re.DOTALL))
    code = "\n".join(found[name] for name in ("ddp", "fsdp2", "functions"))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start_ranks(run_example, (2, store.port, str(tmp_path), code), 2)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["[512, 8] [1024, 8]"] * 2
