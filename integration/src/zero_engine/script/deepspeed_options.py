"""Options of DeepSpeed's launcher, translated to torchrun's.

    --num_gpus, --num_nodes, --include, --exclude, --hostfile    ranks and devices of this machine
    --no_ssh, --node_rank, --master_addr, --master_port          this machine's part of several
    --enable_each_rank_log, --save_pid, --quiet, --log_level     logs
    --launcher, --ssh_port, --venv_script, ...                   no effect: ssh is not used

    worker-0 slots=4         a line of a host file: a host and its number of slots, one per rank
    worker-0@worker-1:0,2    a filter: all slots of worker-0, and the slots 0 and 2 of worker-1

Names may have dashes or underscores. `--module`, `--no_python` and `--no_local_rank` are options of
torchrun's or of `zero_engine.script.run`.
"""

from __future__ import annotations

import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from zero_core.errors import ConfigError

Hosts = Mapping[str, tuple[int, ...]]
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
HOST_FILE = "/job/hostfile"
"""Default host file of DeepSpeed's launcher. Without ``--hostfile``, used only if it exists."""
LOCAL_HOST = "localhost"
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
SSH_OPTIONS = ("launcher", "launcher_args", "no_ssh_check", "ssh_port", "venv_script")
CHOOSING = ("include", "exclude", "num_gpus", "num_nodes")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
TOLD_APART = {"node_rank": 0, "master_addr": "127.0.0.1"}
"""torchrun's defaults of options whose absence must be detectable."""
_BY_SCHEDULER = {
    "slurm": "srun --ntasks-per-node=SLOTS zero-engine run {program}",
    **dict.fromkeys(
        ("openmpi", "mpich", "impi", "mvapich"), "mpirun -n RANKS zero-engine run {program}"
    ),
}
"""Commands that start the ranks of several machines, by name of DeepSpeed's launcher."""


def add_options(parser: ArgumentParser) -> None:
    def add(*names: str, **how: object) -> None:
        flags = [flag for n in names for flag in dict.fromkeys((n, "--" + n[2:].replace("_", "-")))]
        dest = names[0].lstrip("-")
        short = SHORT.get(dest, ())
        parser.add_argument(*short, *flags, dest=dest, **how)  # type: ignore[arg-type]

    add("--record", metavar="FOLDER", help="record each step there, for 'zero-engine report'")
    add("--hostfile", metavar="FILE", help="lines 'HOST slots=NUMBER'")
    add("--include", metavar="FILTER", default="", help="slots to use: worker-0@worker-1:0,2")
    add("--exclude", metavar="FILTER", default="", help="slots to leave out")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts of the host file")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks of each machine")
    add("--no_ssh", action="store_true", help="start the ranks of --node_rank alone, here")
    add(
        "--enable_each_rank_log", metavar="FOLDER", default="None", help="write ranks' output there"
    )
    add("--save_pid", action="store_true", help="write this process's number to /tmp/PID.deepspeed")
    add("--quiet", action="store_true", help="print errors only")
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


SHORT = {"hostfile": ("-H",), "include": ("-i",), "exclude": ("-e",), "quiet": ("-q",)}


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
        raise ConfigError(_commands_of_nodes(parsed, hosts, arguments))
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
    idle = [n for n in SSH_OPTIONS if getattr(parsed, n) not in (None, parser.get_default(n))]
    return [f"--{name} has no effect: ranks are started on this machine alone" for name in idle]


@contextmanager
def process_number_saved(*, is_asked: bool) -> Iterator[None]:
    """If ``is_asked``, keep ``/tmp/PID.deepspeed`` in this context, as ``--save_pid`` requests."""
    path = Path("/tmp", f"{os.getpid()}.deepspeed")
    if is_asked:
        try:
            path.unlink(missing_ok=True)  # a killed process may have had the same id
            # "x" does not follow another user's link.
            with path.open("x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except OSError as error:
            raise ConfigError(
                f"--save_pid: {path} cannot be made ({error}): remove it, or leave the option out"
            ) from error
    try:
        yield
    finally:
        if is_asked:
            path.unlink(missing_ok=True)


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


def _commands_of_nodes(parsed: Namespace, hosts: Hosts, arguments: Sequence[str]) -> str:
    flags = {
        "--module": parsed.module,
        "--no-python": parsed.no_python,
        "--no-local-rank": parsed.local_rank is False,
    }
    options = [flag for flag, is_given in flags.items() if is_given]
    program = shlex.join([*options, parsed.training_script, *parsed.training_script_args])
    first = next(iter(hosts))
    lines = [
        f"  on {host}: zero-engine run --no_ssh --node_rank={rank} --master_addr={first} "
        f"{shlex.join(arguments)}"
        for rank, host in enumerate(hosts)
    ]
    command = _BY_SCHEDULER.get(parsed.launcher.lower())
    if command is not None:
        lines.append(f"or, as {parsed.launcher} does: {command.format(program=program)}")
    lines.append("With accelerate launch: --deepspeed_multinode_launcher standard")
    return "\n".join(
        [
            f"{len(hosts)} hosts were chosen, and 'zero-engine run' starts ranks on its own "
            "machine, not by ssh. Give each host its command, with the host file there:",
            *lines,
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
