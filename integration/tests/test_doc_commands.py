"""Commands and configurations of the READMEs and of docs/: programs, options and keys exist.

Python blocks run in test_readme.py, those of a package's README in its own tests, and bash blocks
in slow/test_doc_runs.py and slow/test_doc_installs.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_blocks import PAGES, ROOT, Block, find_blocks
from doc_runs import ELSEWHERE, NOT_RUN, SMALLER, commands, is_run
from torch.distributed.run import get_args_parser

from benchmarks.__main__ import EXPERIMENTS, command
from zero_core.config import load_config
from zero_engine.cli import app
from zero_engine.deepspeed.config import read
from zero_engine.script.deepspeed_options import add_options

CHECKED = ("python", "bash", "json")
PLAIN = ("text",)
"""Pictures made of letters, and what programs print."""
SESSIONS = {
    node.name
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(one).startswith("nox.session") for one in node.decorator_list)
}
LAUNCHERS = ("accelerate", "bash", "deepspeed")
OTHERS = ("pytest", "source")
"""Programs whose options are not checked."""
INLINE = re.compile(r"`((?:zero-engine|nox|torchrun) [^`]+)`")


def _zero_engine(words: Sequence[str]) -> None:
    group: Any = typer.main.get_command(app)
    name, *arguments = words
    if name.startswith("-"):
        assert name in {"--help", *(option for param in group.params for option in param.opts)}
        return
    assert name in group.commands, f"zero-engine has no command {name}"
    if name == "run":
        _run(arguments)
    else:
        group.commands[name].make_context(name, arguments)


def _run(words: Sequence[str]) -> None:
    if words[0] not in LAUNCHERS:
        _torchrun(words, add_options)


def _torchrun(
    words: Sequence[str], add: Callable[[argparse.ArgumentParser], None] | None = None
) -> None:
    parser = get_args_parser()
    parser.allow_abbrev = False
    if add is not None:
        add(parser)
    parsed = parser.parse_args(list(words))
    if not parsed.module:
        _file(parsed.training_script)


def _nox(words: Sequence[str]) -> None:
    own, _, given = _split(words, "--")
    names = [word.partition("(")[0] for word in own if not word.startswith("-")]
    assert names
    assert set(names) <= SESSIONS, f"nox has no session {set(names) - SESSIONS}"
    if names == ["bench"]:
        _bench(given)
    if names == ["train"] and given:
        _zero_engine(["train", *given])


def _bench(words: Sequence[str]) -> None:
    name, *arguments = words
    assert name in EXPERIMENTS, f"there is no benchmark {name}"
    if arguments:  # else it need not be imported
        typer.main.get_command(command(name)).make_context(name, arguments)


def _python(words: Sequence[str]) -> None:
    if words[:2] == ["-m", "zero_engine"]:
        _zero_engine(words[2:])
    elif words[0] == "-m":
        if words[1] in PROGRAMS:
            PROGRAMS[words[1]](words[2:])
    elif words[0] == "integration/benchmarks/run.py":
        _bench(words[1:])
    else:
        _file(words[0])


def _pip(words: Sequence[str]) -> None:
    assert words[0] == "install"
    for word in words[1:]:
        path = word.partition("[")[0]
        if "/" in path and "*" not in path and path != "./":
            assert (ROOT / path).is_dir(), f"there is no folder {path}"


def _file(name: str) -> None:
    """Accept a script of the reader's, by its bare name; others are in this repository."""
    assert "/" not in name or (ROOT / name).is_file(), f"there is no file {name}"


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "zero-engine": _zero_engine,
    "torchrun": _torchrun,
    "nox": _nox,
    "python": _python,
    "pip": _pip,
}


def _split(words: Sequence[str], at: str) -> tuple[list[str], str, list[str]]:
    place = list(words).index(at) if at in words else len(words)
    return list(words[:place]), at, list(words[place + 1 :])


def _commands(text: str) -> Iterator[list[str]]:
    """Split lines of a shell into commands, without variables that are set and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;>|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&;>|"):
                if words and not re.match(r"^\w+=", words[0]):
                    yield words
                if word == ">":
                    break
                words = []
            elif words or not re.match(r"^\w+=", word):
                words.append(word)


def _check(words: Sequence[str]) -> None:
    program, *arguments = words
    if program in OTHERS:
        return
    assert program in PROGRAMS, f"{program} is not known here"
    try:
        PROGRAMS[program](arguments)
    except SystemExit as end:  # of an argument parser
        raise AssertionError(f"{shlex.join(words)}: {end}") from None


def _of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for block in find_blocks(*languages)]


def test_every_block_has_a_language_that_is_checked() -> None:
    others = {b.name: b.language for b in find_blocks() if b.language not in (*CHECKED, *PLAIN)}
    assert not others


def test_every_page_has_a_place_in_the_site() -> None:
    """`nox -s docs` fails without; this says so earlier."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert {page for page in pages if not re.match(r"decisions/\d", page)} <= named


def test_quick_start_is_short() -> None:
    start = next(block for block in find_blocks("python") if block.page.stem == "index")
    assert len(start.text.splitlines()) < 20


def test_examples_make_their_inputs_on_the_engines_device() -> None:
    """The engine moves the model to the accelerator and no inputs, which no CPU shows."""
    made = re.compile(r"engine\(torch\.\w+\(.*")
    inputs = [one for block in find_blocks("python") for one in made.findall(block.text)]
    assert len(inputs) > 5
    assert [one for one in inputs if "device=engine.device" not in one] == []


def _is_script(block: Block) -> bool:
    return block.text.startswith("#!")


@pytest.mark.parametrize("block", _of("bash"))
def test_commands_exist_with_their_options(block: Block) -> None:
    if _is_script(block):
        pytest.skip("a script of its own: test_cluster_recipes.py runs it")
    for words in _commands(block.text):
        _check(words)


def test_exceptions_of_running_are_commands_of_a_page() -> None:
    """A reason for a command that no page has any more is stale."""
    found = {one for b in find_blocks("bash") if not _is_script(b) for one in commands(b)}
    named = [*SMALLER, *ELSEWHERE, *NOT_RUN]
    assert set(named) <= found
    assert len(named) == len(set(named)), "a command is named twice"
    assert all(is_run(one) for one in SMALLER)


@pytest.mark.parametrize("test", sorted({*ELSEWHERE.values()}))
def test_command_that_runs_elsewhere_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / "integration" / file).read_text(encoding="utf-8")
    assert f"def {name}(" in text


@pytest.mark.parametrize("block", _of("json"))
def test_a_configuration_is_accepted(block: Block) -> None:
    # transformers replaces "auto" by the values of its arguments.
    given = {key: value for key, value in json.loads(block.text).items() if value != "auto"}
    settings = read({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **given})
    load_config(settings.core, world_size=8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_commands_within_a_line_exist(page: Path) -> None:
    for found in INLINE.finditer(page.read_text(encoding="utf-8")):
        program, *words = shlex.split(found[1].replace("\n", " "))
        if program == "nox":
            names = [w for w in words[: words.index("--") if "--" in words else None] if w != "-s"]
            assert {name.partition("(")[0] for name in names} <= SESSIONS, found[1]
        elif program == "zero-engine":
            group: Any = typer.main.get_command(app)
            command = group.commands.get(words[0], group)
            assert command is not group or words[0].startswith(("-", "COMMAND")), found[1]
            if words[0] not in ("run", "COMMAND"):
                options = {"--help", *(option for p in command.params for option in p.opts)}
                given = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert given <= options, found[1]
