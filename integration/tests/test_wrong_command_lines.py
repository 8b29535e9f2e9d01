"""A wrong command ends with exit code 2 and an error about the mistake, and writes no file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import run_program
from typer.testing import CliRunner

from benchmarks.harness.forked_python import forked_python
from zero_core.errors import ConfigError
from zero_engine.cli import app
from zero_engine.train.data import read_text
from zero_engine.train.options import Start
from zero_engine.train.settings import fresh_run

FILES = {
    "deep.json": '{"a": ' * 100_000 + "1" + "}" * 100_000,
    "list.json": "[1]",
    "unknown.json": '{"train_batch_size": 8, "zero_optimisation": {}}',
    "none.json": '{"train_batch_size": 8}',
    "auto.json": '{"train_batch_size": "auto"}',
    "type.json": '{"train_batch_size": 8, "optimizer": {"type": "Adamm"}}',
    "model.json": '{"model_type": "no-such-model"}',
    "number.json": '{"model_type": 5}',
    "sizes.json": '{"model_type": "gpt2", "n_layer": "x"}',
}
# Arguments, and a part of the error (None for a parser's error). "@" is the folder of `FILES`.
TRAIN = [
    *((f"--{name} 0", f"--{name} 0: must be at least 1") for name in ("steps", "layers", "width")),
    *((f"--{name} -1", f"--{name} -1: must be") for name in ("heads", "eval-every", "save-every")),
    *((f"--{name} -9", f"--{name} -9: must be") for name in ("log-every", "eval-windows", "seed")),
    ("--context 1", "--context 1: must be at least 2"),
    ("--vocab 3", "--vocab 3: must be at least 257"),
    ("--seed 99999999999999999999", "--seed 99999999999999999999: must be at most"),
    ("--width 100 --heads 3", "must be a multiple of --heads 3"),
    ("--ranks 100000", "--ranks 100000"),
    ("--data @/nothing.txt", "found nothing there"),
    ("--data @/none.json", "has at most 23 tokens: too short for one window of 128"),
    ("--output /proc/x", "--output /proc/x: cannot be written"),
    ("--data @", "found a folder"),
    ("--output @/list.json", "there is a file of the name"),
    ("--output memory://run", "memory://run is a URL, and a run needs a folder of this machine"),
    ("--output @", "holds no run"),
    ("--output @ --overwrite", "holds no run"),
    ("--resume", "no checkpoint to continue from"),
    ("--no-save --keep-last 2", "--no-save and --keep-last exclude each other"),
    ("--sample-tokens 128", "--sample-tokens 128: must be below --context 128"),
    ("--checkpoints nothing-like-it://x", "--checkpoints nothing-like-it://x cannot be opened"),
    ("--config @/nothing.json", "nothing.json"),
    ("--config /dev/zero", "not a regular file"),
    ("--config @/deep.json", "nested more than 32 deep"),
    ("--config @/bytes.json", "utf-8"),
    ("--config @/unknown.json", "did you mean 'zero_optimization'"),
    ("--config @/none.json", "names no optimizer"),
    ("--config @/auto.json", "train_batch_size"),
    ("--config @/type.json", "optimizer.type = 'Adamm'"),
    ("--steps many", None),
    ("--no-such-option", None),
    ("--ranks 0", None),
    ("--resume --overwrite", None),
]
PLAN = [
    *((f"--{name} 0", f"--{name} 0: must be from 1") for name in ("layers", "width", "heads")),
    ("--layers 1000000000", "--layers 1000000000: must be from 1"),
    ("--vocab 0", "--vocab 0: must be from 1"),
    ("--tokens -5", "--seq-length -5: must be from 1"),
    ("--width 100 --heads 7", "must be a multiple of --heads 7"),
    ("--ranks 0", "--world-size 0: must be from 1"),
    ("--layers 1 --ranks 7 --ranks-per-node 3", "must divide world_size = 7"),
    ("--layers 1 --ranks-per-node 0", "ranks_per_node = 0"),
    *((f"--device-memory {n}", "expected a size") for n in ("-5GB", "GB", "0", "3XB")),
    ("--device h100", "give --seq-length"),
    ("--device h1000", "known are A10"),
    ("--device-memory 24", "--device-memory 24: 24 bytes? Give a unit, as in 24GB"),
    ("7b", "cannot read MODEL '7b': no file 7b. Give a local config.json"),
    ("--size big", "--size big: expected parameters, such as 350m or 7b"),
    ("--size 7b @", "--size 7b and MODEL '@' exclude each other"),
    ("--device h100 --rates x --seq-length 8", "exclude each other"),
    ("--no-rates --rates x", "--rates and --no-rates exclude each other"),
    ("--batch-size 0", "--batch-size 0: must be at least 1"),
    (f"--host-memory {'9' * 400}GB", "expected a size"),
    ("--layers 1 --cpu --device-memory 5GB", "device_memory"),
    ("--layers 1 --png @/x.nope", "the plan cannot be written"),
    ("--layers 1 --json-file @", "the plan cannot be written"),
    ("--model @/nothing", "cannot read MODEL"),
    ("--model /dev/zero", "not a regular file"),
    ("--model @/deep.json", "nested more than"),
    ("--model @/list.json", "expected a JSON object"),
    ("--model @/bytes.json", "cannot read MODEL"),
    ("--model @/none.json", "expected a Hugging Face config.json"),
    ("--model @/number.json", "expected a Hugging Face config.json"),
    ("--model @/model.json", "no-such-model"),
    ("--model @/sizes.json", "n_layer"),
    ("--config @/none.json", "no optimizer"),
]
RUN = [
    ("--nproc-per-node 0 @/script.py", "--nproc-per-node 0: must be at least 1"),
    ("--nproc-per-node two @/script.py", "--nproc-per-node or --nnodes"),
    ("--nnodes 0 @/script.py", "--nnodes 0"),
    ("--nnodes 3:1 @/script.py", "--nnodes 3:1"),
    ("@/nothing.py", "there is no script"),
    ("-m", "the following arguments are required: training_script"),
    ("--num_gpu 3 x.py", "did you mean --num_gpus?"),
    ("--deepspeed_config x.py", "--deepspeed_config; the script's own options follow its name"),
]
CHECKPOINTS = [
    *((verb, "@/none", "@/none") for verb in ("verify", "inspect")),
    *((verb, "@", "holds no checkpoint") for verb in ("verify", "inspect")),
    *((verb, "@/list.json", "list.json") for verb in ("verify", "inspect")),
    *((verb, "@ --tag ../x", "plain folder name") for verb in ("verify", "inspect")),
    *((verb, "@ --tag other", "@/other is not a checkpoint") for verb in ("verify", "inspect")),
    *((verb, "", None) for verb in ("verify", "inspect", "export", "prune", "import")),
    ("export", "@ @/out", "holds no checkpoint"),
    ("export", "@", None),
    ("export", "@ @/out --dtype int3", "--dtype int3: expected one of float32"),
    ("prune", "@/none --keep-last 1", "@/none cannot be read"),
    ("prune", "@", None),
    ("prune", "@ --keep-last 0", None),
    ("prune", "@ --keep-last 1 --keep-every 0", None),
    ("import", "@/none @/out", "@/none"),
    ("import", "@ @/list.json --tag x", "@"),
]
OTHERS = [
    ("trane", "", None),
    ("doctor", "--yaml", None),
    ("config", "more", None),
    ("config", "--example no-such", None),
    ("report", "", None),
    ("report", "@/none", "@/none: there is no such folder"),
    ("report", "@", "the folder has no records"),
]
LINES = [
    *(("train", *row) for row in TRAIN),
    *(("plan", *row) for row in PLAN),
    *(("run", *row) for row in RUN),
    *CHECKPOINTS,
    *OTHERS,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong") / "files"
    made.mkdir()
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "bytes.json").write_bytes(b'{"a": "\xff"}')
    (made / "script.py").write_text("")
    return made


@pytest.mark.parametrize(("verb", "arguments", "expected"), LINES)
def test_a_mistake_is_one_line_and_a_code(verb, arguments, expected, folder, monkeypatch):
    assert not dist.is_initialized()
    monkeypatch.chdir(folder.parent)
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")}
    done = CliRunner().invoke(app, [verb, *arguments.replace("@", str(folder)).split()])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")} == before
    if expected is not None:
        assert expected.replace("@", str(folder)) in done.stderr
        said = [line for line in done.stderr.splitlines() if not line.startswith("zero-engine tr")]
        assert len(said) == 1, done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize(
    "verb", ["plan --ranks 0", "verify @", "prune @ --keep-last 1", "report @"]
)
def test_a_mistake_is_json_where_a_report_would_be(verb: str, folder: Path) -> None:
    words = verb.replace("@", str(folder / "none")).split()
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 2
    assert set(json.loads(done.stdout)) == {"error", "is_corrupt"}
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("content", "match"),
    [(b" \n", "the file is empty"), ("abc é".encode("latin-1"), r"not UTF-8 text \(byte 4")],
)
def test_data_that_cannot_be_read_is_refused(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        read_text(str(path))


def test_mistake_found_on_the_ranks_is_said_once(tmp_path: Path) -> None:
    path, output = tmp_path / "short.txt", tmp_path / "run"
    path.write_text("a few words " * 25)
    command = ("train", f"--data={path}", f"--output={output}")
    done = run_program(*command, expected_code=2, more={"PYTHON_EXEC": forked_python()})
    assert "too short for one window of 128" in done.stderr
    lines = done.stderr.splitlines()
    assert "starting 2 ranks on the CPU" in lines[1]
    assert len(lines) == 3, done.stderr
    fresh_run({"output": str(output)}, Start.NEW)  # the failed command created no run
