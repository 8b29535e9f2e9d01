"""Every documented command runs, with the options of `SMALLER`, unless it matches `NOT_RUN`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import CAPTURED, TINY, environment
from test_import_deepspeed import deepspeed_classes, write_stage_2
from transformers import GPT2Config

from benchmarks.harness.forked_python import forked_python
from tests.support.doc_blocks import MODULES, PAGES, ROOT, Block, find_blocks
from tests.support.lm_models import save_models

SCRIPTS = Path(__file__).parents[1] / "scripts"
READERS = {
    "train.py": "readers_train.py",
    "my/package/train.py": "readers_train.py",
    "pretrain_gpt2.py": "readers_train.py",
    "finetune_trainer.py": "run_lm.py",
    "run_lm.py": "run_lm.py",
}
"""Scripts that a page's reader has, and the scripts that replace them here."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
CONFIGS = ("ds_config.json", "ds_zero_offload.config")
TUTORIALS = {
    "zero": "zero.py",
    "zero-offload": "offload.py",
    "twin-flow": "twin_flow.py",
    "zeropp": "zeropp.py",
}
"""Pages that show a script's output, with that script."""
TINY_RUN = " ".join((*TINY, "--steps=30"))
SMALLER = {
    "zero-engine --install-completion": "bash",
    "zero-engine doctor --measure": "--ranks=1",
    "zero-engine train": TINY_RUN,
    "zero-engine train --data my.txt --config zero.json --steps 500 --output runs/mine": TINY_RUN,
    "zero-engine train --data my.txt --output runs/mine": TINY_RUN,
    "python integration/examples/large_model/large_model.py --size 2.2e9 --steps 3": "--size 1e6",
    "zero-engine run --nproc-per-node 2 finetune_trainer.py --fp16 --deepspeed zero.json": (
        "--model_name_or_path t5 --output_dir tuned --do_train --max_steps 2 --use_cpu"
    ),
    "python packages/zero-comm/benchmarks/quantizer_speed.py --repetitions 3": "--numel 65536",
}
"""Options added to commands that would take minutes as printed."""
NOT_RUN = re.compile(
    r"(python -m )?(pip|nox|pytest)\b"
    r"|python integration/benchmarks/"
    r"|(torchrun|zero-engine run) --nnodes|zero-engine run accelerate launch .*--num_machines"
    r"|torchrun --nproc-per-node gpu"
    r"|zero-engine plan .* --fit fit.json$"
)
"""Commands that need other machines, a device or a network, or that other tests run."""
BYTES = re.compile(r"^(.*?) {2,}[\d.]+ -> [\d.]+ +(\d+) +(\d+) +(\d+) +(\d+)$", re.M)
"""A line that `lesson.show` prints. The losses are not captured: they differ between machines."""


def _commands(block: Block) -> Iterator[str]:
    for line in block.text.replace("\\\n", " ").splitlines():
        command = " ".join(re.sub(r"(^|\s)# .*$", "", line).split())
        if command and not NOT_RUN.match(command.removeprefix("OMP_NUM_THREADS=1 ")):
            yield command


def _as_run(command: str) -> str:
    """Return the command, with smaller settings where its run would take minutes."""
    what, mark, target = command.partition(" > ")
    lesson = "--steps=4 --plot=picture.png" if "examples/tutorials/" in what else ""
    return f"{what} {SMALLER.get(command, lesson)}{mark}{target}"


BLOCKS = {page: [b for b in find_blocks() if b.page == page] for page in PAGES}
TO_RUN = {
    page: found
    for page, blocks in BLOCKS.items()
    if (
        found := [
            command
            for block in blocks
            if block.language == "bash" and not block.text.startswith("#!")
            for command in _commands(block)
        ]
    )
}


def _block(stem: str, language: str) -> str:
    return next(b.text for b in find_blocks(language) if b.page.stem == stem)


def _interpreter() -> str:
    """Return the interpreter for programs and their ranks: a forked one if DeepSpeed is installed.

    Otherwise transformers, which forked interpreters imported earlier, would not find the stand-in.
    """
    return forked_python() if find_spec("deepspeed") else sys.executable


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    for name in ("integration", "packages"):
        (folder / name).symlink_to(ROOT / name)
    for name, script in READERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPTS / script, folder / name)
    for name in CONFIGS:
        (folder / name).write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "zero.json").write_text(_block("moving", "json"), encoding="utf-8")
    shutil.copy(ROOT / "integration/examples/accelerate.yaml", folder / "deepspeed.yaml")
    shutil.copy(Path(json.__file__).with_name("decoder.py"), folder / "my.txt")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024, "vocab_size": 64}
    GPT2Config(**sizes).save_pretrained(folder / "models" / "mine")
    shutil.copy(folder / "models" / "mine" / "config.json", folder)
    save_models(folder)
    with deepspeed_classes() as classes:
        for name in ("deepspeed_ckpts", "deepspeed_checkpoints"):
            write_stage_2(folder / name / "global_step4", classes, 2)
    programs = folder / ".nox" / "train" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", *MODULES):
        module = f"-m {MODULES[name]} " if name in MODULES else ""
        program = programs / name
        # `import` starts a process with interpreter options, which a forked interpreter lacks.
        choice = f'python="{_interpreter()}"; [ "$1" = import ] && python="{sys.executable}"'
        program.write_text(f'#!/bin/sh\n{choice}\nexec "$python" {module}"$@"\n', encoding="utf-8")
        program.chmod(0o755)
    (programs / "activate").write_text("true\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_commands_of_a_page_run(page, material, finished_run, tmp_path):
    folder = shutil.copytree(material, tmp_path / "reader", symlinks=True)
    text = "\n".join(TO_RUN[page])
    if "report runs/mine" in text and "train " not in text:
        shutil.copytree(finished_run[0].root, folder / "runs" / "mine")
    if page.stem in ("index", "clusters", "SKILL") or page == ROOT / "README.md":
        start = page.stem if page.stem in ("SKILL", "README") else "index"
        (folder / "train.py").write_text(_block(start, "python"), encoding="utf-8")
    path = f"{folder / '.nox/train/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(folder), "SHELL": "/bin/bash", "GLOO_SOCKET_IFNAME": "lo"}
    printed = {}
    for command in TO_RUN[page]:
        done = subprocess.run(
            ["bash", "-e", "-c", _as_run(command)],
            cwd=folder,
            env={**environment(), **own, "PYTHON_EXEC": _interpreter()},
            stdin=subprocess.DEVNULL,
            **CAPTURED,
        )
        assert done.returncode == 0, f"{_as_run(command)}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{_as_run(command)}\n{done.stderr}"
        printed |= _sizes(done.stdout)
    if page.stem in TUTORIALS:
        expected = _sizes(_block(page.stem, "text"))
        assert printed.keys() == expected.keys() != set()
        # Small messages contain the step number, so their sizes vary slightly.
        assert all(printed[name] == pytest.approx(expected[name], rel=0.02) for name in printed)
        assert (folder / "picture.png").stat().st_size > 5000


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Run the cells, each of which asserts what it shows."""
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    book = nbformat.read(ROOT / "integration" / "examples" / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    nbclient.NotebookClient(book, resources={"metadata": {"path": tmp_path}}).execute()


def _sizes(text: str) -> dict[str, list[int]]:
    return {name: [int(size) for size in sizes] for name, *sizes in BYTES.findall(text)}
