"""``zero-engine run``: start ranks of somebody else's script, each with the hook."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.utils.api import macros
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

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
from zero_engine.script.hook import INSTEAD, SERVED, SHARDED_DDP, hooked
from zero_engine.script.local_rank import OPTION, declares, source_of

SHELLS = ("bash", "sh", "zsh")
LAUNCHERS = ("accelerate", "torchrun", SERVED, *SHELLS)
"""Programs that start ranks themselves. A script of a shell is one, too."""
LAUNCHER_MODULES = (
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.launch",
)
PROGRAM = (
    *("module", "no_python", "training_script", "training_script_args", "local_rank"),
    *("quiet", "log_level"),
)
"""What the parser reads besides the options of torchrun and of DeepSpeed's launcher."""


def run_program(arguments: Sequence[str]) -> int:
    """Run ``[launcher's options] script.py arguments`` with the hook. Returns the exit code.

    Options are torchrun's and those of DeepSpeed's launcher.

    Does not return, but becomes the program, where no ranks are to be started: in a process that
    is a rank already, or for a launcher, which starts them itself. A process is a rank if it has a
    launcher's variables, or, without options for torchrun, if srun or mpirun started several.

    Raises:
        ConfigError: options for torchrun, where no ranks are started; or see `rank_variables`.
    """
    pass_on_warnings()
    parser = _parser()
    parsed = parser.parse_args(list(arguments))
    os.environ.update(hooked(os.environ))
    _refuse_sharded_ddp(parsed)
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(parsed).items()
        if name not in PROGRAM and value != parser.get_default(name)
    ]
    is_launcher = _is_launcher(parsed)
    if not given and not is_launcher:  # with options, a task of SLURM's starts a node's
        # Adopt the rank that srun or mpirun gave this process, if they started several.
        variables = rank_variables(os.environ)
        os.environ.update(variables)
        if variables.get("MASTER_ADDR") == LOOPBACK:
            _set_defaults(local_address_only())
        if variables.get("RANK") == "0":
            ranks = variables["WORLD_SIZE"]
            print(f"zero-engine run: srun or mpirun started the {ranks} ranks", file=sys.stderr)
    if is_under_launcher() or is_launcher:
        if given:  # nothing is started that they could be passed on to
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
    _give_local_rank(parsed, macros.local_rank)  # torchrun replaces it by each rank's own
    if parsed.nnodes in ("1", "1:1") and has_default["rdzv_endpoint"]:
        # On this machine alone: with a port that is free, not with torchrun's fixed one.
        parsed.standalone = all(has_default.values())
        _set_defaults(local_address_only())
    if parsed.nproc_per_node.isdecimal():
        threads = max(1, available_cores() // max(1, int(parsed.nproc_per_node)))
        _set_defaults({"OMP_NUM_THREADS": str(threads)})
    with process_number_saved(is_asked=parsed.save_pid):
        return run_ranks(parsed)


def _parser() -> ArgumentParser:
    """torchrun's parser, whose default is a rank per accelerator, with DeepSpeed's options."""
    parser: ArgumentParser = get_args_parser()
    parser.prog = "zero-engine run"
    parser.allow_abbrev = False  # else a script's --save could mean --save_pid or --save-pid
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
    return parser


def _check_startable(parsed: Namespace) -> None:
    """Refuse numbers of ranks that cannot be started, and a script that is not there."""
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
    """Put ``--local_rank=local_rank`` before the script's arguments, if it is to have it."""
    arguments = parsed.training_script_args
    if any(argument.partition("=")[0] == OPTION for argument in arguments):
        return
    should_give = parsed.local_rank
    if should_give is None:
        script = source_of(parsed.training_script, is_module=parsed.module)
        is_own = parsed.module and parsed.training_script == "zero_engine"  # has no such option
        if parsed.no_python or script is None or is_own:
            return
        should_give = declares(script, OPTION)
        # Said once: a script whose option stays at -1 may train on all data alone.
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
    """Print ``line`` on rank 0 of the first node, if the log level asks for it."""
    is_first = os.environ.get("RANK", "0") == "0" and parsed.node_rank in (0, None)
    if is_first and parsed.log_level in ("debug", "info"):
        print(f"zero-engine run: {line}", file=sys.stderr)


def _name(parsed: Namespace) -> str:
    return Path(parsed.training_script).name


def _is_launcher(parsed: Namespace) -> bool:
    if parsed.module:
        return parsed.training_script in LAUNCHER_MODULES
    if parsed.no_python:
        return False  # each rank is one
    program = Path(parsed.training_script)
    return program.suffix == ".sh" or (program.name in LAUNCHERS and not program.is_dir())


def _refuse_sharded_ddp(parsed: Namespace) -> None:
    """Raise for the Trainer's ``--sharded_ddp``, unless the script has an option of that name."""
    words = [w for w in parsed.training_script_args if w.partition("=")[0] == SHARDED_DDP]
    if not words:
        return
    if _is_launcher(parsed):  # the script is among its arguments
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
