"""``zero-engine run``: start ranks of an unchanged script, each with the hook.

Options of DeepSpeed's launcher are translated to torchrun's:

    --num_gpus, --num_nodes, --include, --exclude, --hostfile    ranks and devices of this machine
    --no_ssh, --node_rank, --master_addr, --master_port          this machine's part of several
    --enable_each_rank_log, --quiet, --log_level                 logs
    --launcher, --ssh_port, --venv_script, --save_pid, ...       no effect

    worker-0 slots=4         a line of a host file: a host and its number of slots, one per rank
    worker-0@worker-1:0,2    a filter: all slots of worker-0, and the slots 0 and 2 of worker-1

Names may have dashes or underscores. `--module`, `--no_python` and `--no_local_rank` are options of
torchrun's or of this command.

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
import re
import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from zero_engine.script.hook import RECORD, SERVED, hooked

OPTION = "--local_rank"
SHARDED_DDP = "--sharded_ddp"
"""FairScale's option of the Trainer, which transformers has dropped."""
PARSER_OF_FIELDS = "HfArgumentParser"
SHELLS = ("bash", "sh", "zsh")
LAUNCHERS = ("accelerate", "torchrun", SERVED, *SHELLS)
"""Programs that start ranks themselves, and shells, whose scripts may do so."""
LAUNCHER_MODULES = (
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torch.distributed.run", "torch.distributed.launch"),
)
PROGRAM = (
    *("module", "no_python", "training_script", "training_script_args", "local_rank"),
    *("quiet", "log_level", "record"),
)
"""Parsed names that may be given although this process starts no ranks."""
Hosts = Mapping[str, tuple[int, ...]]
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
HOST_FILE = "/job/hostfile"
"""Default host file of DeepSpeed's launcher. Without ``--hostfile``, used only if it exists."""
LOCAL_HOST = "localhost"
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
IDLE = ("launcher", "launcher_args", "no_ssh_check", "save_pid", "ssh_port", "venv_script")
CHOOSING = ("include", "exclude", "num_gpus", "num_nodes")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
TOLD_APART = {"node_rank": 0, "master_addr": "127.0.0.1"}
"""torchrun's defaults of options whose absence must be detectable."""


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
    hint = "; the script's own options follow its name." if "unrecognized" in message else "."
    hint = f"; did you mean --{near[0]}?" if near else hint
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
    words = parsed.training_script_args
    if all(word.partition("=")[0] != SHARDED_DDP for word in words):
        return
    is_launcher = _is_launcher(parsed)  # its arguments contain the script
    file = next((w for w in words if w.endswith(".py")), "") if is_launcher else ""
    script = source_of(file or parsed.training_script, is_module=parsed.module and not file)
    if script is None or not declares(script, SHARDED_DDP):
        raise ConfigError(
            f"{SHARDED_DDP} was FairScale's, and transformers has dropped it: give --deepspeed "
            'zero.json instead, with "auto" for "train_micro_batch_size_per_gpu" and {"enabled": '
            '"auto"} for "fp16" and "bf16", and "zero_optimization": {"stage": 2} (1 for simple, 2 '
            'for zero_dp_2, 3 for zero_dp_3; for offload "offload_optimizer": {"device": "cpu"})'
        )


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


def add_options(parser: ArgumentParser) -> None:
    def add(*names: str, **how: object) -> None:
        flags = dict.fromkeys(f for n in names for f in (n, n[:2] + n[2:].replace("_", "-")))
        dest = next(name[2:] for name in names if name.startswith("--"))
        parser.add_argument(*flags, dest=dest, **how)  # type: ignore[arg-type]

    add("--record", metavar="FOLDER", help="record each step there, for 'zero-engine report'")
    add("-H", "--hostfile", metavar="FILE", help="lines 'HOST slots=NUMBER'")
    add("-i", "--include", metavar="FILTER", default="", help="slots to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", metavar="FILTER", default="", help="slots to leave out")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts of the host file")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks of each machine")
    add("--no_ssh", action="store_true", help="start the ranks of --node_rank alone, here")
    add(
        "--enable_each_rank_log", metavar="FOLDER", default="None", help="write ranks' output there"
    )
    add("--save_pid", action="store_true", help="no effect: no process number is kept")
    add("-q", "--quiet", action="store_true", help="print errors only")
    add("--log_level", choices=LOG_LEVELS, default="info", help="least level that is printed")
    add("--launcher", default="pdsh", help="no effect: ranks are started on this machine alone")
    for name in ("--launcher_args", "--ssh_port", "--venv_script"):
        add(name, help="no effect: no ssh is used")
    add("--no_ssh_check", action="store_true", help="no effect: no ssh is used")
    add("--force_multi", action="store_true", help="refused: ranks are started on this machine")
    add("--autotuning", choices=("tune", "run"), help="refused: see 'zero-engine plan'")
    add("--bind_cores_to_rank", action="store_true", help="refused: see --numa-binding")
    add("--bind_core_list", help="refused: see --numa-binding")
    for name in TOLD_APART:
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})


def with_host_file(arguments: Sequence[str]) -> list[str]:
    # If `arguments` have a --hostfile, argparse keeps the later value.
    return [*(["--hostfile", HOST_FILE] if Path(HOST_FILE).is_file() else []), *arguments]


def carry_out(parsed: Namespace, parser: ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Replace DeepSpeed's options in ``parsed`` by torchrun's, in place.

    If slots other than the first are chosen, sets the variable of visible devices, too. Returns
    lines to print, about options that have no effect. Raises ConfigError for unsupported options.
    """
    if parsed.autotuning:
        raise ConfigError(
            f"--autotuning {parsed.autotuning} is not served: `zero-engine plan` says which "
            "configurations fit and what each costs"
        )
    if parsed.bind_cores_to_rank or parsed.bind_core_list:
        raise ConfigError(
            "--bind_cores_to_rank and --bind_core_list are not served: give --numa-binding=node to "
            "bind ranks to the cores beside their GPU, or start the ranks by numactl"
        )
    if parsed.force_multi:
        raise ConfigError(
            "--force_multi is not served: ranks are started on this machine alone; give the "
            "command on the host that is to run it"
        )
    hosts = _chosen_hosts(parsed, parser)
    if len(hosts) > 1 and not parsed.no_ssh:
        raise ConfigError(_commands_of_nodes(hosts, arguments))
    if len(hosts) > 1:
        # This machine becomes the host with index --node_rank.
        names = ", ".join(hosts)
        if parsed.node_rank is None or not 0 <= parsed.node_rank < len(hosts):
            raise ConfigError(
                f"--no_ssh with {len(hosts)} hosts needs --node_rank, this machine's position in "
                f"{names}: expected 0 to {len(hosts) - 1}, found {parsed.node_rank}"
            )
        parsed.nnodes = str(len(hosts))
        parsed.master_addr = parsed.master_addr or next(iter(hosts))
    for name, value in TOLD_APART.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    if hosts:
        slots = list(hosts.values())[parsed.node_rank if len(hosts) > 1 else 0]
        parsed.nproc_per_node = str(len(slots))
        _show_devices(slots)
    if parsed.enable_each_rank_log != "None":
        parsed.log_dir, parsed.redirects = parsed.enable_each_rank_log, "3"
    if parsed.quiet:
        parsed.log_level = "error"
    idle = [n for n in IDLE if getattr(parsed, n) not in (None, parser.get_default(n))]
    return [f"--{name} has no effect in zero-engine run" for name in idle]


def _chosen_hosts(parsed: Namespace, parser: ArgumentParser) -> Hosts:
    is_asked = [name for name in CHOOSING if getattr(parsed, name) != parser.get_default(name)]
    if parsed.hostfile is None and not is_asked:
        return {}
    has_file = parsed.hostfile is not None or Path(HOST_FILE).is_file()
    for name in ("num_gpus", "num_nodes"):
        value = getattr(parsed, name)
        if name in is_asked and value < 1:
            raise ConfigError(f"--{name}: expected a whole number >= 1, found {value}")
        if name in is_asked and (parsed.include or parsed.exclude):
            raise ConfigError(f"--{name} and --include or --exclude exclude each other")
    default = parser.get_default("nproc_per_node")
    if parsed.nproc_per_node != default or parsed.nnodes not in ("1", "1:1"):
        option = "--nproc-per-node" if parsed.nproc_per_node != default else "--nnodes"
        raise ConfigError(
            f"{option} is torchrun's, --{(is_asked or ['hostfile'])[0]} is DeepSpeed's, and both "
            "say how many ranks there are: give options of one of the two"
        )
    hosts = _host_file(parsed) or {LOCAL_HOST: _slots_here(parsed)}
    hosts = filtered(hosts, include=parsed.include, exclude=parsed.exclude)
    if parsed.num_nodes > len(hosts):
        raise ConfigError(
            f"--num_nodes {parsed.num_nodes}: the host file names {len(hosts)}"
            if has_file
            else f"--num_nodes {parsed.num_nodes} needs a host file (--hostfile); without one: "
            f"zero-engine run --nnodes={parsed.num_nodes} --nproc-per-node=N --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT, on each node"
        )
    if "num_nodes" in is_asked:
        hosts = dict(list(hosts.items())[: parsed.num_nodes])
    if "num_gpus" in is_asked:
        hosts = {host: tuple(range(parsed.num_gpus)) for host in hosts}
    return hosts


def _host_file(parsed: Namespace) -> Hosts:
    path = Path(parsed.hostfile or HOST_FILE)
    if path == Path(os.devnull) or (parsed.hostfile is None and not path.is_file()):
        return {}
    if not path.exists():
        raise ConfigError(
            f"--hostfile {path}: there is no such file. Without one, give each machine its part: "
            "zero-engine run --nnodes=N --nproc-per-node=M --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT; with accelerate launch: "
            "--deepspeed_multinode_launcher=standard, or --deepspeed_hostfile=FILE"
        )
    return read_host_file(path)


def _slots_here(parsed: Namespace) -> tuple[int, ...]:
    devices = torch.accelerator.device_count()
    if devices:
        return tuple(range(devices))
    named = parse_filter(parsed.include, "--include") if parsed.include else {}
    highest = max(named.get(LOCAL_HOST) or [0])
    return tuple(range(max(highest + 1, int(os.environ.get("PET_NPROC_PER_NODE", "1")))))


def _commands_of_nodes(hosts: Hosts, arguments: Sequence[str]) -> str:
    first = next(iter(hosts))
    lines = [
        f"  on {host}: zero-engine run --no_ssh --node_rank={rank} --master_addr={first} "
        f"{shlex.join(arguments)}"
        for rank, host in enumerate(hosts)
    ]
    return "\n".join(
        [
            f"{len(hosts)} hosts were chosen, and 'zero-engine run' starts ranks on its own "
            "machine, not by ssh. Start it by srun or mpirun, or give each host its command, with "
            "the host file there:",
            *lines,
            "With accelerate launch: --deepspeed_multinode_launcher standard",
        ]
    )


def _show_devices(slots: Sequence[int]) -> None:
    """Hide devices other than ``slots`` from ranks. Slots index this process's visible devices."""
    count = torch.accelerator.device_count()
    if not count:
        return  # without accelerators a slot is just a rank
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    variable = VISIBLE_DEVICES.get(accelerator.type)
    shown = os.environ.get(variable, "") if variable else ""
    if max(slots) >= count:
        among = f" ({variable}={shown})" if shown else ""
        raise ConfigError(
            f"slot {max(slots)} was asked for, and {count} devices are visible here{among}: "
            f"they have the numbers 0 to {count - 1}"
        )
    if list(slots) == list(range(len(slots))):
        return  # ranks take the first devices by default
    if variable is None:
        raise ConfigError(
            f"slots cannot be chosen among devices of type {accelerator.type!r}: choose by its "
            "own variable, and leave --include and --exclude out"
        )
    devices = shown.split(",") if shown else [str(number) for number in range(count)]
    os.environ[variable] = ",".join(devices[slot] for slot in slots)


def read_host_file(path: Path) -> Hosts:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the host file {path}: {error}") from None
    hosts: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: expected 'HOST slots=NUMBER', found {line!r}"
            )
        host, slots = found[1], int(found[2])
        if not slots:
            raise ConfigError(f"{path}, line {number}: {host} has no slot: leave the line out")
        if host in hosts:
            raise ConfigError(f"{path}, line {number}: {host} is there twice: keep one of them")
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise ConfigError(f"{path} names no host: expected lines 'HOST slots=NUMBER'")
    return hosts


def parse_filter(text: str, option: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(number.strip().isdecimal() for number in numbers):
            raise ConfigError(
                f"{option} {text!r}: expected HOST[:SLOT,...][@HOST...], as in "
                f"'worker-0@worker-1:0,2', found {part!r}"
            )
        found.setdefault(host, []).extend(map(int, numbers))
    return found


def filtered(hosts: Hosts, *, include: str, exclude: str) -> Hosts:
    if include and exclude:
        raise ConfigError("--include and --exclude exclude each other: give one of them")
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option) if include or exclude else {}
    for host, asked in named.items():
        if host not in hosts:
            raise ConfigError(f"{option}: there is no host {host!r} among {', '.join(hosts)}")
        missing = sorted(set(asked) - {*hosts[host]})
        if missing:
            raise ConfigError(
                f"{option}: {host} has no slot {missing[0]}: it has {len(hosts[host])}, from 0 on"
            )
    if not named:
        return hosts
    left: dict[str, tuple[int, ...]] = {}
    for host, every in hosts.items():
        chosen = {*(named[host] or every)} if host in named else set()
        slots = tuple(slot for slot in every if (slot in chosen) == bool(include))
        if slots:
            left[host] = slots
    if not left:
        raise ConfigError(f"{option} {include or exclude!r} leaves no slot of {', '.join(hosts)}")
    return left
