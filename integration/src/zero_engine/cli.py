"""Commands of ``zero-engine``: train, run, plan, report, verify, import, doctor and others.

The exit code is 0, one of `zero_engine.terminal`, or that of a program that the command starts.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import zero_engine
from zero_core.errors import ZeroError
from zero_engine.checkpoints import (
    Answer,
    Json,
    Text,
    convert,
    export,
    inspect,
    option,
    prune,
    verify,
)
from zero_engine.launch.started_ranks import end_with_launcher
from zero_engine.presets import EXAMPLES, default_config_text
from zero_engine.progress import quiet, working
from zero_engine.terminal import refuse, require
from zero_engine.train.options import RunSettings, Start, first_line, flag_of

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text needs no import of rich, which takes 0.2 s
    pretty_exceptions_enable=False,  # rich's tracebacks are hard to paste into a bug report
)

_Number = int | None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(zero_engine.__version__)
        raise typer.Exit


@app.callback()
def options(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train with ZeRO: sharded, offloaded, quantized."""


class _ResumeCommand(TyperCommand):
    """Command whose option ``--resume`` takes the value "auto" or no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            if word == "auto" and words[-1:] == ["--resume=yes"]:
                words[-1] = "--resume=auto"
            else:
                words.append("--resume=yes" if word == "--resume" else word)
        return super().parse_args(ctx, words)


def _with_run_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `RunSettings`, passed to ``command`` in ``**options``."""
    own = signature(command, eval_str=True)
    others = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings = []
    for name, field in RunSettings.model_fields.items():
        flag, kind = flag_of(name), field.annotation
        flags = [f"{flag}/--no-{name}"] if kind is bool else [flag]
        text = str(field.description)
        if field.default is not None and kind is not bool and "Default:" not in text:
            text += f" Default: {field.default}."
        option = typer.Option(*flags, help=text, show_default=False)
        hint = Annotated[kind | None, option]  # type: ignore[valid-type]
        settings.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    vars(command)["__signature__"] = own.replace(parameters=[*settings, *others])
    return command


@app.command(cls=_ResumeCommand)
@_with_run_settings
def train(
    *,
    resume: Annotated[
        Text,
        typer.Option(
            metavar="[auto]",
            help="Continue the run in the output folder; with 'auto', start one if there is none.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the output folder.")
    ] = False,
    ranks: Annotated[
        _Number, option("Ranks to start. Default: one per GPU, or two on a CPU.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Times to go on from the checkpoint after a rank failed.")
    ] = 0,
    **options: Any,
) -> None:
    """Train a GPT-2 on text, on every GPU of this machine or on its CPU."""
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")
    if resume not in (None, "yes", "auto"):
        raise typer.BadParameter(f"--resume {resume}: leave the value out, or give 'auto'")
    if ranks is not None and ranks < 1:
        raise typer.BadParameter("--ranks must be at least 1")
    # Called first, because the launcher may end during the imports below, which take seconds.
    end_with_launcher()
    start = {None: Start.NEW, "yes": Start.RESUME, "auto": Start.AUTO}[resume]
    if overwrite:
        start = Start.OVERWRITE
    libraries = ("transformers", "tokenizers", "filelock", "matplotlib", "tensorboard")
    if "RANK" not in os.environ:
        try:
            require("train", "zero-engine train", *libraries)
            said = first_line(options, start, ranks)
        except ZeroError as error:
            sys.exit(refuse(error, as_json=False))
        print(f"zero-engine train: {said}", file=sys.stderr)
    # torch and transformers take seconds to import, so each command imports what it needs.
    from zero_engine.launch.ranks import fail, is_under_launcher

    try:
        if is_under_launcher():
            require("train", "zero-engine train", *libraries)
            from zero_engine.train.program import train as train_on_this_rank

            code = train_on_this_rank(options, start)
        else:
            from zero_engine.train.launch import check_request, launch

            num_ranks = check_request(options, start, ranks)
            arguments = []
            for name, value in options.items():
                if isinstance(value, bool):
                    arguments.append(flag_of(name) if value else f"--no-{name}")
                elif value is not None:
                    arguments.append(f"{flag_of(name)}={value}")
            if overwrite:
                arguments.append("--overwrite")
            if resume is not None:
                arguments.append(f"--resume={resume}")
            code = launch(["train", *arguments], num_ranks=num_ranks, max_restarts=max_restarts)
    except ZeroError as error:
        fail(error)
    sys.exit(code)


@app.command(
    # Arguments reach the script unchanged, even if they look like options of this command.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[LAUNCHER OPTIONS]",
)
def run(
    program: Annotated[
        list[str], typer.Argument(metavar="SCRIPT.PY|-m MODULE [ARGUMENTS]", show_default=False)
    ],
) -> None:
    """Run a DeepSpeed or Hugging Face script, unchanged, with this engine as its deepspeed.

    One rank per accelerator of this machine, or one on the CPU; options before the script are
    torchrun's (--nproc-per-node, --nnodes, --rdzv-endpoint, ...) or those of DeepSpeed's launcher
    (--num_gpus, --include, --hostfile, ...). A program that starts ranks by itself is started once:
    zero-engine run accelerate launch --config_file FILE SCRIPT.PY, zero-engine run bash train.sh,
    in which deepspeed is this command. Ends with the exit code of the script.
    """
    with working("starting"):  # imports take seconds
        from zero_engine.launch.ranks import fail
        from zero_engine.script.run import run_program

    try:
        code = run_program(program)
    except ZeroError as error:
        fail(error)
    sys.exit(code)


@app.command()
def plan(
    invocation: typer.Context,
    model: Annotated[
        Text,
        typer.Argument(
            metavar="[MODEL]",
            help="A Hugging Face config.json, or its folder. Default: a GPT-2.",
            show_default=False,
        ),
    ] = None,
    model_option: Annotated[Text, typer.Option("--model", hidden=True)] = None,
    size: Annotated[Text, option("Parameters of a GPT-2, as 7b, in place of its sizes.")] = None,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT-2.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the GPT-2.")] = 768,
    heads: Annotated[int, typer.Option(help="Attention heads of the GPT-2.")] = 12,
    vocab: Annotated[int, typer.Option(help="Vocabulary of the GPT-2.")] = 50257,
    tokens: Annotated[
        _Number,
        typer.Option(
            "--seq-length",
            "--tokens",
            help="Tokens per sample; given, activations and operators are traced.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        _Number, option("Samples of a step over all ranks. Default: the configuration's.")
    ] = None,
    micro_batch_size: Annotated[
        _Number, option("Samples of a rank and micro-step. Default: the configuration's.")
    ] = None,
    config: Annotated[
        Text, option("DeepSpeed-style JSON. Default: what 'zero-engine config' prints.")
    ] = None,
    ranks: Annotated[int, typer.Option("--world-size", "--ranks", help="Data-parallel ranks.")] = 1,
    ranks_per_node: Annotated[
        _Number, option("Ranks that share a node. Default: 8, or all if fewer.")
    ] = None,
    device_memory: Annotated[Text, option("Memory of one GPU, e.g. 24GB or 22GiB.")] = None,
    host_memory: Annotated[Text, option("Memory of one node, shared by its ranks.")] = None,
    rates: Annotated[
        Text,
        option(
            "Predict times by this file of 'zero-engine doctor --measure'. Default: what it kept "
            "for this machine."
        ),
    ] = None,
    no_rates: Annotated[
        bool, typer.Option("--no-rates", help="Predict no times by kept rates.")
    ] = False,
    device: Annotated[
        Text, option("Predict times by the published rates of a GPU, such as H100.")
    ] = None,
    allow_rounding: Annotated[
        bool,
        typer.Option(
            "--allow-rounding",
            help="Choose quantized communication and moments of fewer bits as well.",
        ),
    ] = False,
    nvme_path: Annotated[
        Text, option("Folder on an NVMe disk that may hold optimizer states.")
    ] = None,
    fit: Annotated[Text, option("Write the configuration that fits best there.")] = None,
    on_cpu: Annotated[
        bool, typer.Option("--cpu", help="Ranks compute on the host: all memory is the node's.")
    ] = False,
    json_file: Annotated[Text, option("Write the plan as JSON there.")] = None,
    png: Annotated[Text, option("Draw the memory as a picture there.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show more than 8 choices.")] = False,
    as_json: Json = False,
) -> None:
    """Forecast the memory, traffic and time of a run, and what fits best.

    Nothing is allocated. Times are computed from --rates, --device, or the rates that 'zero-engine
    doctor --measure' kept for this machine.

    Ends with code 1 if nothing fits the memory that was given.
    """
    given = dict(invocation.params)
    named = given.pop("model_option")
    if model is not None and named is not None:
        raise typer.BadParameter("MODEL is given twice: leave --model out")
    try:
        require("train", "zero-engine plan", "transformers")
        if png is not None:
            require("train", "--png", "matplotlib")
        with working("planning"), quiet():
            from zero_engine.plan_command import PlanRequest

            sizes = {name: given.pop(name) for name in ("layers", "width", "heads", "vocab")}
            for name in ("model", "json_file", "png", "show_all", "as_json"):
                given.pop(name)
            request = PlanRequest(model=named or model, sizes=sizes, **given)
            planned = request.make()
        from rich.console import Console

        from zero_engine.plan_command import show_plan, write_plan

        write_plan(planned, json_file, png)
        for line in filter(None, (request.write_fit(planned), request.said)):
            print(line, file=sys.stderr)
    except ZeroError as error:
        sys.exit(refuse(error, as_json=as_json))
    if as_json:
        print(planned.to_json())
    else:
        show_plan(planned, request.settings(), Console(), 1000 if show_all else 8)
    if planned.best is None:
        sys.exit(1)


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    output: Annotated[Text, option("The page. Default: report.html in the run.")] = None,
    memory: Annotated[Text, option("Memory that a rank may take, e.g. 24GB or 22GiB.")] = None,
) -> Answer:
    """Write an HTML page about a recorded run: what limits it, and what to change."""
    from zero_engine.machine import parse_bytes
    from zero_engine.report import write_report
    from zero_engine.report.compose import first_sentence
    from zero_engine.report.run import read_run

    limit = None if memory is None else parse_bytes(memory, "--memory")
    with working("report"), quiet():
        page = write_report(run, output or Path(run, "report.html"), memory_limit=limit)
        sentence = first_sentence(read_run(Path(run)), limit)
    text = f"{sentence}\nwritten to {page}: open it in a browser"
    return {"page": str(page), "sentence": sentence}, text


def _add(answer: Callable[..., Answer], name: str) -> None:
    """Add the command ``name``, which prints what ``answer`` returns."""

    @app.command(name)
    @wraps(answer)
    def run(*, as_json: bool = False, **options: Any) -> None:
        try:
            content, text = answer(**options)
        except ZeroError as error:
            sys.exit(refuse(error, as_json=as_json))
        print(json.dumps(content, indent=2) if as_json else text)

    own = signature(answer, eval_str=True)
    json_option = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    parameters = [*own.parameters.values(), json_option]
    # typer reads a command's options from `__signature__` and `__annotations__`. In Python 3.14
    # `wraps` does not copy the annotations.
    vars(run)["__signature__"] = own.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_add(report, "report")
_add(verify, "verify")
_add(inspect, "inspect")
_add(export, "export")
_add(prune, "prune")
_add(convert, "import")


@app.command()
def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's speeds, for plans.")
    ] = False,
    output: Annotated[str, typer.Option(help="Where --measure writes them.")] = "rates.json",
    ranks: Annotated[
        list[int] | None,
        option("Ranks that --measure starts. Repeatable. Default: 1 and one per GPU or core."),
    ] = None,
    disk: Annotated[
        Text, option("Folder on the disk of NVMe offload, for --measure to time.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, what this machine offers, and what is missing."""
    if measure:
        try:
            with working("measuring this machine"), quiet():
                from zero_engine.calibration.machine import measure_to

                found, kept = measure_to(output, ranks, disk)
        except ZeroError as error:
            sys.exit(refuse(error, as_json=as_json))
        said = f"{found.device}: {found.source}: {output}, kept for plans of this machine in {kept}"
        print(found.to_json() if as_json else said)
        return
    with working("examining this machine"), quiet():
        from rich.console import Console

        from zero_engine.doctor import as_table, examine

        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(as_table(findings))


@app.command()
def config(
    example: Annotated[
        Text,
        typer.Option(
            metavar="NAME",
            help=f"Print a usual case: {', '.join(EXAMPLES)}.",
            autocompletion=lambda: [*EXAMPLES],
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of configurations.")
    ] = False,
) -> None:
    """Print the default configuration, an example, or the JSON Schema."""
    if example is not None and schema:
        raise typer.BadParameter("--example and --schema exclude each other")
    if example is not None:
        if example not in EXAMPLES:
            raise typer.BadParameter(f"--example {example}: choose {', '.join(EXAMPLES)}")
        text = json.dumps(EXAMPLES[example], indent=2) + "\n"
    elif schema:
        from zero_core.config import SCHEMA_FILE

        text = SCHEMA_FILE.read_text(encoding="utf-8")
    else:
        text = default_config_text()
    print(text, end="")


def version() -> Answer:
    """Print the version."""
    return {"version": zero_engine.__version__}, zero_engine.__version__


_add(version, "version")


for _command in app.registered_commands:  # terminals wrap paragraphs by their own width
    _command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(_command.callback) or "")
    _command.short_help = _command.help.partition("\n\n")[0]  # the default cuts it off


def main() -> None:
    # By default, only the script of `run` may download from the Hugging Face hub.
    if sys.argv[1:2] != ["run"]:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    app(prog_name="zero-engine")  # shell completion depends on this name
