"""``zero-engine run``: start ranks of an unchanged script, each with the hook.

[Note: local ranks]
DeepSpeed's launcher puts ``--local_rank=N`` before the arguments of every script. A script that
does not declare the option fails on it. Here only scripts that declare the option get the argument:
the script, or a module of its folder that it imports, has the string ``"--local_rank"``, or has a
dataclass with the field ``local_rank`` and uses `HfArgumentParser`, which makes options of fields.
Scripts of Hugging Face's Trainer do not declare it: they read their rank from the environment.
Folders that a script adds to sys.path are not searched. For ``-m`` with an installed module, only
the module's package is searched.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch.distributed.elastic.utils.api import macros
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from zero_core.errors import ConfigError
from zero_engine.launch.ranks import is_under_launcher
from zero_engine.launch.started_ranks import LOOPBACK, rank_variables
from zero_engine.launch.torchrun import local_address_only, pass_on_warnings, run_ranks
from zero_engine.machine import available_cores
from zero_engine.script.deepspeed_options import (
    add_options,
    carry_out,
    process_number_saved,
    with_host_file,
)
from zero_engine.script.hook import INSTEAD, RECORD, SERVED, SHARDED_DDP, hooked

OPTION = "--local_rank"
PARSER_OF_FIELDS = "HfArgumentParser"
SHELLS = ("bash", "sh", "zsh")
LAUNCHERS = ("accelerate", "torchrun", SERVED, *SHELLS)
"""Programs that start ranks themselves, and shells, whose scripts may do so."""
LAUNCHER_MODULES = (
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.launch",
)
PROGRAM = (
    *("module", "no_python", "training_script", "training_script_args", "local_rank"),
    *("quiet", "log_level", "record"),
)
"""Parsed names that may be given although this process starts no ranks."""


def run_program(arguments: Sequence[str]) -> int:
    """Run ``[launcher's options] script.py arguments`` with the hook. Returns the exit code.

    Options are torchrun's and those of DeepSpeed's launcher. The program replaces this process if
    this process is a rank already, or if the program is a launcher. A process is a rank if it has a
    launcher's variables, or if srun or mpirun started several processes and no option is given.

    Raises:
        ConfigError: options are given although no ranks are started, or `rank_variables` fails.
    """
    pass_on_warnings()
    parser = _parser()
    parsed = parser.parse_args(list(arguments))
    if parsed.record is not None:
        os.environ[RECORD] = str(Path(parsed.record).absolute())
    os.environ.update(hooked(os.environ))
    _refuse_sharded_ddp(parsed)
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(parsed).items()
        if name not in PROGRAM and value != parser.get_default(name)
    ]
    is_launcher = _is_launcher(parsed)
    if not given and not is_launcher:  # with options, a SLURM task starts the ranks of its node
        # Adopt the rank of srun or mpirun.
        variables = rank_variables(os.environ)
        os.environ.update(variables)
        if variables.get("MASTER_ADDR") == LOOPBACK:
            _set_defaults(local_address_only())
        if variables.get("RANK") == "0":
            ranks = variables["WORLD_SIZE"]
            print(f"zero-engine run: srun or mpirun started the {ranks} ranks", file=sys.stderr)
    if is_under_launcher() or is_launcher:
        if given:  # no torchrun is started that could use the options
            raise ConfigError(
                f"{given[0]} was given, but 'zero-engine run' starts no ranks here: this process "
                f"is a rank already, or {parsed.training_script} starts them; give the option there"
            )
        if is_launcher and _name(parsed) == SERVED:
            return run_program(with_host_file(parsed.training_script_args))
        if not is_launcher:
            _give_local_rank(parsed, os.environ.get("LOCAL_RANK", "0"))
        _become(parsed)
    own = ("rdzv_endpoint", "master_addr", "master_port")
    has_default = {name: getattr(parsed, name) == parser.get_default(name) for name in own}
    for line in carry_out(parsed, parser, arguments):
        _say(parsed, line)
    _check_startable(parsed)
    _give_local_rank(parsed, macros.local_rank)  # torchrun replaces the macro by the local rank
    if parsed.nnodes in ("1", "1:1") and has_default["rdzv_endpoint"]:
        # A single machine uses a free port in place of torchrun's fixed one.
        parsed.standalone = all(has_default.values())
        _set_defaults(local_address_only())
    if parsed.nproc_per_node.isdecimal():
        threads = max(1, available_cores() // max(1, int(parsed.nproc_per_node)))
        _set_defaults({"OMP_NUM_THREADS": str(threads)})
    with process_number_saved(is_asked=parsed.save_pid):
        return run_ranks(parsed)


def _parser() -> ArgumentParser:
    parser: ArgumentParser = get_args_parser()
    parser.prog = "zero-engine run"
    parser.allow_abbrev = False  # otherwise --save could mean --save_pid
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=str(max(1, torch.accelerator.device_count())))
    parser.set_defaults(local_rank=None)
    for names, is_given, text in (
        (("--local-rank",), True, "give the script --local_rank=N, as DeepSpeed's launcher does"),
        (("--no-local-rank", "--no_local_rank"), False, "never do"),
    ):
        parser.add_argument(
            *names,
            dest="local_rank",
            action="store_const",
            const=is_given,
            help=f"{text}; default: where the script declares that option",
        )
    add_options(parser)
    vars(parser)["error"] = partial(_refuse, vars(parser.parse_args(["x"])))
    return parser


def _refuse(known: Iterable[str], message: str) -> NoReturn:
    unknown = [word for word in message.split() if word.startswith("--")]
    near = [n for word in unknown for n in get_close_matches(word[2:].replace("-", "_"), known, 1)]
    hint = f"; did you mean --{near[0]}?" if near else ""
    raise ConfigError(f"{message}{hint} See zero-engine run --help")


def _check_startable(parsed: Namespace) -> None:
    try:
        num_ranks = determine_local_world_size(parsed.nproc_per_node)
        least, most = parse_min_max_nnodes(parsed.nnodes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--nproc-per-node or --nnodes: {error}") from None
    if num_ranks < 1:
        raise ConfigError(f"--nproc-per-node {parsed.nproc_per_node}: must be at least 1")
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {parsed.nnodes}: expected N or MIN:MAX, from 1 on")
    is_file = not (parsed.module or parsed.no_python)
    if is_file and not Path(parsed.training_script).exists():
        raise ConfigError(f"there is no script {parsed.training_script!r}")


def _give_local_rank(parsed: Namespace, local_rank: str) -> None:
    """Pass ``--local_rank`` to the script if it declares that option. See [Note: local ranks]."""
    arguments = parsed.training_script_args
    if any(argument.partition("=")[0] == OPTION for argument in arguments):
        return
    should_give = parsed.local_rank
    if should_give is None:
        script = source_of(parsed.training_script, is_module=parsed.module)
        # The program zero_engine has no option --local_rank.
        is_own = parsed.module and parsed.training_script == "zero_engine"
        if parsed.no_python or script is None or is_own:
            return
        should_give = declares(script, OPTION)
        # Print the decision: a script whose option stays -1 may train on all data on each rank.
        told = (
            f"declares {OPTION} and is given it; to leave it out: zero-engine run --no-local-rank"
            if should_give
            else f"is not given {OPTION}, as neither it nor a module of its folder declares the "
            "option; to give it: zero-engine run --local-rank"
        )
        _say(parsed, f"{_name(parsed)} {told}")
    if should_give:
        parsed.training_script_args = [f"{OPTION}={local_rank}", *arguments]


def _say(parsed: Namespace, line: str) -> None:
    is_first = os.environ.get("RANK", "0") == "0" and parsed.node_rank in (0, None)
    if is_first and parsed.log_level in ("debug", "info"):
        print(f"zero-engine run: {line}", file=sys.stderr)


def _name(parsed: Namespace) -> str:
    return Path(parsed.training_script).name


def _is_launcher(parsed: Namespace) -> bool:
    if parsed.module:
        return parsed.training_script in LAUNCHER_MODULES
    if parsed.no_python:
        return False  # with --no-python each rank runs the program
    program = Path(parsed.training_script)
    return program.suffix == ".sh" or (program.name in LAUNCHERS and not program.is_dir())


def _refuse_sharded_ddp(parsed: Namespace) -> None:
    """Raise for the Trainer's ``--sharded_ddp``, unless the script declares that option."""
    words = [w for w in parsed.training_script_args if w.partition("=")[0] == SHARDED_DDP]
    if not words:
        return
    if _is_launcher(parsed):  # a launcher's arguments contain the script
        files = [word for word in parsed.training_script_args if word.endswith(".py")]
        script = source_of(files[0], is_module=False) if files else None
    else:
        script = source_of(parsed.training_script, is_module=parsed.module)
    if script is None or not declares(script, SHARDED_DDP):
        raise ConfigError(f"{SHARDED_DDP} {INSTEAD}")


def _become(parsed: Namespace) -> None:
    program = parsed.training_script
    if parsed.module:
        command = [sys.executable, "-m", program]
    elif parsed.no_python:
        command = [program]
    elif program.endswith(".sh"):
        command = ["bash", program]
    elif Path(program).name in LAUNCHERS and not Path(program).is_file():
        beside = Path(sys.executable).parent / program
        found = str(beside) if beside.is_file() else shutil.which(program)
        if found is None:
            raise ConfigError(
                f"there is no program {program!r} in this environment; is it installed?"
            )
        command = [found] if program in SHELLS else [sys.executable, found]
    else:
        command = [sys.executable, program]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], [*command, *parsed.training_script_args])


def _set_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


class Source(NamedTuple):
    """Location of a program's code."""

    file: Path
    folder: Path
    """Folder that Python searches first for the program's imports."""
    package: str | None = None
    """Package in ``folder`` that the program belongs to. None: all of ``folder`` is the
    program's."""


def source_of(program: str, *, is_module: bool) -> Source | None:
    if not is_module:
        path = Path(program)
        return Source(path, path.parent) if path.is_file() else None
    inner = Path(*program.split("."))
    files = (inner.with_suffix(".py"), inner / "__main__.py")
    installed = [folder for entry in sys.path if (folder := Path(entry).absolute()) != Path.cwd()]
    places = [Source(Path.cwd() / file, Path.cwd()) for file in files]
    places += [Source(f / file, f, inner.parts[0]) for f in installed for file in files]
    return next((place for place in places if place.file.is_file()), None)


def declares(source: Source, option: str) -> bool:
    """Return whether the program or a module of its folder that it imports declares ``option``."""
    field = option.lstrip("-")
    seen: set[Path] = set()
    left = [source.file]
    has_field = has_parser_of_fields = False
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # Python reports the error when it runs the file
        nodes = list(ast.walk(tree))
        has_field |= any(_is_field(node, field) for node in nodes)
        has_parser_of_fields |= any(
            (isinstance(node, ast.Attribute) and node.attr == PARSER_OF_FIELDS)
            or (isinstance(node, ast.Name) and node.id == PARSER_OF_FIELDS)
            for node in nodes
        )
        is_named = any(isinstance(node, ast.Constant) and node.value == option for node in nodes)
        if is_named or (has_field and has_parser_of_fields):
            return True
        for node in nodes:
            left += _imported(node, path, source)
    return False


def _is_field(node: ast.AST, field: str) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    decorators = [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
    return any(name.endswith("dataclass") for name in decorators) and any(
        isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == field for one in node.body
    )


def _imported(node: ast.AST, importer: Path, source: Source) -> Iterator[Path]:
    folder = source.folder
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = [node.module] if node.module else []
        names = [".".join([*module, alias.name]) for alias in node.names]
    else:
        return
    if isinstance(node, ast.ImportFrom) and node.level:
        # A relative import also runs the __init__.py of the importer's package.
        folder = next(iter(importer.absolute().parents[node.level - 1 :]), folder)
        yield folder / "__init__.py"
    elif source.package is not None:
        names = [name for name in names if name.partition(".")[0] == source.package]
    for dotted in names:
        place = folder
        for name in dotted.split("."):  # the module may be a file or a package
            yield place / f"{name}.py"
            place = place / name
            yield place / "__init__.py"
