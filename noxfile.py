"""All checks and tests of this repository: ``python -m nox -s SESSION -- ARGUMENTS``.

``nox -l`` lists the sessions, and ``-s "tests(zero-core)"`` runs one part of a session. Arguments
are passed to the session's program. Environments are reused, and ``-R`` also skips installation.
With uv, creating an environment takes seconds: uv caches built wheels and shares torch's files.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nox

sys.path.insert(0, str(Path(__file__).parent / "integration/compat"))
import releases

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]
# Allow bytecode in nox's environments. Without bytecode, every process compiles torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# uv ignores pip's settings, such as a link to CPU wheels of torch beside the index.
_pip_links = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
if _found := subprocess.run(_pip_links, capture_output=True, text=True, check=False).stdout:
    os.environ.setdefault("UV_FIND_LINKS", ",".join(_found.split()))
os.environ.setdefault("ZERO_COMM_REQUIRE_KERNELS", "1")  # fail if kernels are missing

PACKAGES = ("cpu-adam", "zero-core", "zero-comm", "zero-offload")
COMMANDS = "integration[train,report]"
FOLDERS = {**{name: f"packages/{name}" for name in PACKAGES}, "integration": "integration"}
SOURCES = (
    *(f"packages/{name}/src" for name in PACKAGES),
    *("integration/src", "integration/benchmarks", "integration/conformance"),
)
CHECKED = ("noxfile.py", ".ci", "packages", "integration")
CONSTRAINTS = ("--quiet", "--constraint", "constraints.txt")
PYTEST = ("python", "-m", "pytest", "-q")
# Several processes, because most tests start ranks and wait. Tests of one file share fixtures.
IN_PARALLEL = (
    *("--numprocesses=auto", "--maxprocesses=3", "--dist=loadfile", "--durations=25"),
    # Gloo may close a connection while ranks connect, before a test has begun (decision 229).
    *("--reruns=1", "--only-rerun=Gloo connectFullMesh failed", "-rR"),
)
GATE = ("-m", "not slow and not cuda", "--ignore=tests/slow")  # for every change (decision 228)

HUGGING_FACE_TESTS = "hf_ or hugging_face or libraries or lightning or trainer or gathered"
FAKE_CUDA = "packages/zero-core/tests/support/fake_cuda"


def parts(*names: str) -> Callable[..., Any]:
    """Run a session once for each of ``names``, each in a separate environment."""
    return nox.parametrize("part", [nox.param(name, id=name) for name in names])


@nox.session
def train(session: nox.Session) -> None:
    """Install everything and train."""
    install_everything(session)
    # Replace the nox process by the training, which needs time to save a checkpoint. nox kills
    # programs 0.3 s after Ctrl-C and does not forward SIGTERM. No session can follow this one.
    environment = {**os.environ, **{k: v for k, v in session.env.items() if v is not None}}
    sys.stdout.flush()
    os.execve(f"{session.bin}/zero-engine", ["zero-engine", "train", *session.posargs], environment)


@nox.session
@parts("lint", "types", *PACKAGES, "cpu-adam-and-torch", "together")
def tests(session: nox.Session, part: str) -> None:
    """Run the gate: lint, types, and tests of each package alone and of all together."""
    if part == "lint":
        lint(session)
    elif part == "types":
        install_everything(session, *group("types"), tests_of=("integration",))
        session.run("mypy", *SOURCES)
    elif part == "together":
        install_everything(session, tests_of=("integration",))
        run_tests(session, "integration", *GATE, "tests", "conformance")
        # zero-offload's few tests that need cpu-adam. Each further process would import torch.
        chosen = ("--numprocesses=0", "-k", "cpu_adam or kernel_class")
        run_tests(session, "zero-offload", *chosen)
    else:
        test_alone(session, part)


def test_alone(session: nox.Session, part: str) -> None:
    """Install one package with only its declared dependencies, and run its tests."""
    package, _, torch = part.partition("-and-")  # cpu-adam is tested with and without torch
    tools = (*group("test", package), *group("runners"))
    session.install(*CONSTRAINTS, *own(session, package + f"[{torch}]" * bool(torch)), *tools)
    # Siblings must be absent, so that an accidental import fails.
    strange = {*(name.replace("-", "_") for name in PACKAGES), "torch" * (part == "cpu-adam")}
    strange -= {package.replace("-", "_"), ""}
    found = f"[m for m in {strange} if importlib.util.find_spec(m)]"
    session.run("python", "-c", f"import importlib.util, sys; sys.exit({found} or None)", log=False)
    files = sorted(Path(FOLDERS[package], "tests").glob("test_*.py")) if torch else []
    with_torch = [f"tests/{f.name}" for f in files if "torch" in f.read_text(encoding="utf-8")]
    run_tests(session, package, *(GATE if package != "cpu-adam" else ()), *with_torch)


def slow(session: nox.Session) -> None:
    """Run the tests outside the gate (decision 228): tests/slow, and those marked ``slow``."""
    tested = ("zero-core", "zero-comm", "integration")
    install_everything(session, "nbclient>=0.10", "ipykernel>=6.29", extras=",ray", tests_of=tested)
    run_tests(session, "integration", "--dist=load", "tests/slow/test_doc_runs.py")  # long tests
    run_tests(session, "integration", "tests/slow", "--ignore=tests/slow/test_doc_runs.py")
    for package in tested:
        run_tests(session, package, "-m", "slow and not cuda", "--ignore=tests/slow", "--dist=load")


def examples(session: nox.Session) -> None:
    """Run every example by the command in its docstring. Each asserts its own result."""
    install_everything(session, "accelerate>=1.14", extras=",lightning,ray")
    found = sorted(Path("integration", "examples").rglob("*.py"))
    for path in (p for p in found if p.stem not in ("lesson", "wide_products")):
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        command = description.split("\n\n")[1]
        session.run(*shlex.split(command), env={"OMP_NUM_THREADS": "1"})  # two ranks on few cores


def experiments(session: nox.Session) -> None:
    """Import every benchmark and every experiment of the lab, and print their help."""
    install_everything(session, extras=",bench")
    for folder in ("benchmarks", "lab"):
        session.run("python", f"integration/{folder}/run.py", "--dry-run", silent=True)


def clusters(session: nox.Session) -> None:
    """Check the cluster files against the schemas of Kubernetes, Kubeflow and SkyPilot."""
    readers = ("kubeflow-trainer-api>=2.2", "skypilot>=0.14", "pyyaml>=6")
    session.install(*CONSTRAINTS, "pytest", *readers)
    # SkyPilot writes into HOME.
    session.run(*PYTEST, "integration/clusters", env={"HOME": session.create_tmp()})


def report(session: nox.Session) -> None:
    """Run a new user's commands, and view a report page in Debian's chromium or CHROMIUM."""
    install_everything(session, extras=",hf", tests_of=("integration",))
    session.run(*PYTEST, "integration/browser")


def kernels(session: nox.Session) -> None:
    """Build and run the test program of cpu-adam's kernels, which takes minutes."""
    session.install(*CONSTRAINTS, *own(session, "cpu-adam"), *group("test", "cpu-adam"))
    with session.chdir("packages/cpu-adam"):
        session.run(*PYTEST, "-m", "program")


def sanitize(session: nox.Session) -> None:
    """Run cpu-adam's kernels and tests with AddressSanitizer and UBSan (Linux, GCC)."""
    build = Path(session.create_tmp()).resolve()
    defined = (f"-Ccmake.define.CPU_ADAM_{name}=ON" for name in ("SANITIZE", "CHECK"))
    given = (*group("test", "cpu-adam"), f"-Cbuild-dir={build}", *defined)
    session.install(*CONSTRAINTS, *own(session, "cpu-adam[torch]"), *given, env={"CXX": "g++"})
    session.run(str(build / "kernel_check"), external=True)
    find = (("g++", f"-print-file-name={name}.so") for name in ("libasan", "libstdc++"))
    found = [str(session.run(*each, external=True, silent=True)).strip() for each in find]
    environment = {"LD_PRELOAD": ":".join(found), "PYTHONMALLOC": "malloc"}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # the interpreter does not free all memory
    with session.chdir("packages/cpu-adam"):
        session.run(*PYTEST, env=environment)


def resolve(session: nox.Session) -> None:
    """Resolve the requirements of all packages with each build of torch and each Python."""
    session.install("--quiet", "uv")
    session.run("python", "integration/compat/releases.py", "resolve")


_parts = (slow, examples, experiments, clusters, report, kernels, sanitize, resolve)
NIGHTLY = {each.__name__: each for each in _parts}


@nox.session
@parts(*NIGHTLY)
def nightly(session: nox.Session, part: str) -> None:
    """Run checks and tests outside the gate (decision 228)."""
    NIGHTLY[part](session)


@nox.session
def lint(session: nox.Session) -> None:
    """Check Python, C++, docstrings and imports without changing files."""
    session.install("--quiet", *group("lint"))
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    native = (p for p in Path("packages").rglob("*") if p.suffix in {".cpp", ".h", ".inl"})
    session.run("clang-format", "--dry-run", "-Werror", *sorted(map(str, native)))
    sources = os.pathsep.join((*SOURCES, "integration"))
    session.run("lint-imports", "--no-cache", ".ci/imports.toml", env={"PYTHONPATH": sources})
    for check in ("structure", "docstrings", "llms"):
        session.run("python", f".ci/{check}.py")
    workflows, check = map(str, Path(".github", "workflows").glob("*.yml")), "check-jsonschema"
    session.run(check, "--builtin-schema=vendor.github-workflows", *workflows)
    session.run(check, "--builtin-schema=vendor.citation-file-format", "CITATION.cff")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site. API pages are read from the sources without importing them."""
    session.install("--quiet", *group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark, e.g. ``nox -s bench -- engine``. Also installs DeepSpeed for comparison."""
    install_everything(session, extras=",bench")
    session.run("python", "integration/benchmarks/run.py", *session.posargs)


@nox.session
def lab(session: nox.Session) -> None:
    """Run an experiment of the lab."""
    install_everything(session, extras=",bench")
    session.run("python", "integration/lab/run.py", *session.posargs)


@nox.session
@parts("peers", "hugging-face-new", "hugging-face-old", "scars")
def compat(session: nox.Session, part: str) -> None:
    """Test compatibility with DeepSpeed, public scripts and Hugging Face's libraries.

    peers passes ``-- ARGUMENTS`` to ``compare.py``. scars runs DeepSpeed releases with silent bugs.
    """
    peers = ("trl>=1.16", "bitsandbytes>=0.50", "torchao>=0.18")
    install_everything(session, *peers, extras=",bench,ray", tests_of=("integration",))
    if part == "scars":
        session.run("python", "integration/lab/releases.py", *session.posargs)
        return
    compiled = Path(session.bin).parent.resolve() / "compiled"
    session.env["TORCH_EXTENSIONS_DIR"] = str(compiled)  # environments share the default
    run_compat(session, "compile_deepspeed.py")
    if part == "peers":
        # These tests compare with DeepSpeed's own modules, so they need DeepSpeed installed.
        beside = "test_deepspeed_names test_deepspeed_config_table slow/test_deepspeed_launcher"
        session.run(*PYTEST, *(f"integration/tests/{name}.py" for name in beside.split()))
        session.run(*PYTEST, "integration/compat/checks")
        run_compat(session, "compare.py", *session.posargs)
        return
    session.install("--quiet", "-r", f"integration/compat/{part}.txt")
    run_tests(session, "integration", "-k", HUGGING_FACE_TESTS)
    results = Path(session.create_tmp(), "compat.json")
    results.unlink(missing_ok=True)
    families = (f"--only={n}:" for n in ("TRL: trl", "transformers", "accelerate", "Lightning"))
    run_compat(session, "compare.py", *families, f"--results={results}")


def run_compat(session: nox.Session, program: str, *arguments: str) -> None:
    """Run the ``program`` of ``integration/compat``."""
    # The program imports the benchmarks' harness, which starts and measures ranks.
    path = {"PYTHONPATH": str(Path("integration").resolve())}
    session.run("python", f"integration/compat/{program}", *arguments, env=path)


@nox.session
@parts("tests", "soak")
def faults(session: nox.Session, part: str) -> None:
    """Break checkpoints, processes and configurations. ``soak -- --minutes 20`` kills at random."""
    install_everything(session, tests_of=("integration",))
    with session.chdir("integration"):
        command = (*PYTEST, "faults") if part == "tests" else ("python", "-m", "faults.soak")
        session.run(*command, *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all packages, install their wheels offline without a compiler, and train."""
    session.install("--quiet", "build>=1.2", "pip>=25")
    wheelhouse = Path("wheelhouse").resolve()
    shutil.rmtree(wheelhouse, ignore_errors=True)
    for folder in FOLDERS.values():
        # The wheel is built from the unpacked sdist, in an environment with only its requirements.
        session.run("python", "-m", "build", "--outdir", str(wheelhouse), folder)
    # By file name: an index may have other packages with these names.
    own = [
        f"{path}[all]" if path.name.startswith("zero_parts") else str(path)
        for path in sorted(wheelhouse.glob("*.whl"))
    ]
    # Download the requirements too. A package without a wheel must fail.
    pip_download = ("python", "-m", "pip", "download", *CONSTRAINTS)
    session.run(*pip_download, "--only-binary=:all:", f"--dest={wheelhouse}", *own)
    temporary = Path(session.create_tmp()).resolve()
    fresh = temporary / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    programs = fresh / ("Scripts" if sys.platform == "win32" else "bin")
    # Allow no compiler, no index, and no settings that name another source.
    bare = {"PATH": str(programs), "CC": None, "CXX": None, "PIP_FIND_LINKS": None}
    bare["PIP_CONFIG_FILE"] = os.devnull
    pip_install = (str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-index")
    session.run(*pip_install, f"--find-links={wheelhouse}", *own, env=bare, external=True)
    run = ("--steps=20", "--layers=2", "--width=64", "--ranks=2", "--output=run", "--overwrite")
    with session.chdir(temporary):  # outside the source tree
        session.run(str(programs / "zero-engine"), "train", *run, env=bare, external=True)


@nox.session(venv_backend="uv")
def cuda(session: nox.Session) -> None:
    """Run tests on torch's CUDA build over a fake CUDA. ``-- all`` adds those outside the gate."""
    install_build(session, "2.14.1", "cu130", "zero-core", "integration")
    is_all = session.posargs == ["all"]
    session.posargs[:] = () if is_all else session.posargs
    test_on_fake_cuda(session, is_all=is_all)


@nox.session(venv_backend="uv")
@nox.parametrize("python", releases.PYTHONS)
@nox.parametrize(
    "torch,build", [nox.param(*b, id=f"torch-{b[0]}, {b[1]}") for b in releases.builds()]
)
def matrix(session: nox.Session, torch: str, build: str) -> None:
    """Test all packages with a build of torch, on the CPU and over the fake CUDA."""
    install_build(session, torch, build, *FOLDERS)
    # Record a failure, which stays if a test fails below.
    releases.record(torch, build, str(session.python), session.posargs, is_passed=False)
    session.env["CUDA_VISIBLE_DEVICES"] = ""
    for package in FOLDERS:
        run_tests(session, package)
    del session.env["CUDA_VISIBLE_DEVICES"]
    if build != "cpu":
        test_on_fake_cuda(session, is_all=True)
    releases.record(torch, build, str(session.python), session.posargs, is_passed=True)


def install_build(session: nox.Session, torch: str, build: str, *tested: str) -> None:
    """Install all packages, ``tested``'s tools and torch. For CUDA, also build the fake library."""
    tools = [*(tool for name in tested for tool in group("test", name)), *group("runners")]
    packages = own(session, "cpu-adam[torch]", *PACKAGES[1:], COMMANDS)
    required, options = releases.requirements(torch, build)
    options += ["--override", f"{FAKE_CUDA}/overrides.txt"] if build != "cpu" else []
    session.install("--quiet", *packages, *tools, *required, *options)
    if build != "cpu":
        headers = str(Path(session.create_tmp(), "headers").resolve())
        listed = f"{FAKE_CUDA}/headers-{build[:4]}.txt"
        session.install("--quiet", "--target", headers, "--no-deps", "-r", listed)
        session.run("python", f"{FAKE_CUDA}/build.py", headers, build)


def test_on_fake_cuda(session: nox.Session, *, is_all: bool) -> None:
    """Run the tests of CUDA devices over the fake CUDA."""
    # With Triton installed the engine would use its kernels, which the fake CUDA cannot run.
    session.run("uv", "pip", "uninstall", "--quiet", "triton", external=True)
    rows = ("--dist=load", "tests/test_equalities.py", *(() if is_all else GATE))
    for package in ("zero-core", "integration"):
        run_tests(session, package, "-m", "cuda" if is_all else "cuda and not slow")
        run_tests(session, package, *rows)


@nox.session(python=releases.PYTHONS[0], venv_backend="uv")
@parts(*FOLDERS)
def minimum(session: nox.Session, part: str) -> None:
    """Test a package with the lowest versions that its pyproject.toml declares."""
    alone = "cpu-adam[torch]" if "cpu" in part else part
    packages = [*PACKAGES, COMMANDS] if part == "integration" else [alone]
    lowest = ("--quiet", "--resolution=lowest-direct")
    session.install(*lowest, *own(session, *packages), *group("test", part))
    session.install("--quiet", *group("runners"))  # any version will do
    run_tests(session, part, *(GATE if part != "cpu-adam" else ()))


def run_tests(session: nox.Session, package: str, *arguments: str) -> None:
    """Run a package's tests in its folder, which has the pytest settings."""
    with session.chdir(FOLDERS[package]):
        options = (*IN_PARALLEL, *arguments, *session.posargs)
        # Spinning threads would slow down others, because there are more processes than cores.
        session.run(*PYTEST, *options, env={"OMP_WAIT_POLICY": "passive"})


def install_everything(
    session: nox.Session, *further: str, extras: str = "", tests_of: tuple[str, ...] = ()
) -> None:
    """Install all packages, ``further`` requirements and test tools. ``extras``: ",ray,hf"."""
    packages = own(session, "cpu-adam[torch]", *PACKAGES[1:], f"{COMMANDS[:-1]}{extras}]")
    tools = [tool for name in tests_of for tool in (*group("test", name), *group("runners"))]
    session.install(*CONSTRAINTS, *packages, *further, *tools)


def own(session: nox.Session, *packages: str) -> tuple[str, str]:
    """Return pip's arguments for packages of this repository."""
    # Use a requirements file: uv would rebuild packages named on the command line every time.
    file = Path(session.virtualenv.location, "own.txt")
    names = [package.replace("integration", "zero-parts") for package in packages]
    folders = [Path(FOLDERS[package.split("[")[0]]).resolve().as_uri() for package in packages]
    lines = [f"{name} @ {folder}\n" for name, folder in zip(names, folders, strict=True)]
    file.write_text("".join(lines), encoding="utf-8")
    return "--requirement", str(file)


def group(name: str, package: str = "") -> tuple[str, ...]:
    """Return a dependency group of ``package``, or of the repository."""
    project = nox.project.load_toml(Path(FOLDERS.get(package, ""), "pyproject.toml"))
    return nox.project.dependency_groups(project, name)
