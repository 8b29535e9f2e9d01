"""Everything that is run on this repository: ``python -m nox -s SESSION -- ARGUMENTS``.

    train      trains a model: arguments go to ``zero-engine train``
    tests      the gate: lint, every package alone, then all together; arguments name parts
    nightly    what the gate leaves out: long tests and programs around the packages ("slow"),
               "examples", "experiments" (each one starts), "clusters", "report" (a new user's path,
               and a page in Debian's chromium or CHROMIUM), "kernels" and "sanitize" (cpu-adam's
               without Python, and under AddressSanitizer); arguments name parts
    lint       ruff, clang-format, docstrings, structure of the imports
    docs       the documentation site, into site/; any warning fails
    bench      benchmarks: arguments go to ``python integration/benchmarks/run.py``
    lab        experiments: arguments go to ``python integration/lab/run.py``; ``-- --dry-run``
               imports all of them
    compat     public scripts with DeepSpeed itself and with ``zero-engine run``; arguments go to
               ``integration/compat/compare.py``. Without any, TRL's trainers too. ``scars``:
               releases of DeepSpeed that had silent bugs. ``hugging-face``: the tests and scripts
               of Hugging Face's libraries and Lightning, with their two newest releases
    faults     tests that break checkpoints, processes and configurations; arguments go to pytest.
               ``soak --minutes 20 --seed 1``: runs that are killed at random moments
    wheels     wheels and sdists of all packages, installed from the wheelhouse alone where there is
               no compiler; trains there
    matrix     the tests of everything, for a torch release and a Python version; arguments go to
               pytest
    minimum    each package's tests with the lowest releases that it declares; arguments as above

Environments are kept; ``-R`` also skips installing into them, for a quick second run.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # it has pip at hand; venv unpacks it for seconds
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]
# Of what is installed little is imported, so its bytecode is written then, not before (most of
# pip's time). In pip's settings the name of the option stands for what it turns off. Where bytecode
# is not to be written at all, every process would compile torch again: not in nox's environments.
os.environ.setdefault("PIP_NO_COMPILE", "0")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PACKAGES = ("cpu-adam", "zero-core", "zero-comm", "zero-offload")
PARTS = ("lint", *PACKAGES, "together")
NIGHTLY = ("slow", "examples", "experiments", "clusters", "report", "kernels", "sanitize")
EVERYTHING = ("packages/cpu-adam[torch]", *(f"packages/{name}" for name in PACKAGES[1:]))
WHEELS = Path(".nox", "built")  # not the environment of the session `wheels`
TORCH = Path(".nox", "torch")
SOURCES = (
    *(f"packages/{name}/src" for name in PACKAGES),
    *("integration/src", "integration/benchmarks"),
)
NATIVE_FOLDERS = (
    "cpu-adam/native",
    "cpu-adam/tests/native",
    "zero-comm/native",
    "zero-core/src/zero_core/testing/late_device",
)
CHECKED = ("noxfile.py", ".ci", "packages", "integration")
CONSTRAINTS = ("--constraint", "constraints.txt")
PIP_FLAGS = ("--quiet", "--progress-bar=off")
RUNNERS = ("pytest-xdist>=3.7", "pytest-rerunfailures>=16.3")
PYTEST_FAULTS = ("python", "-m", "pytest", "-q", "faults")
TEST_TOOLS = ("pytest>=8.3", "hypothesis>=6.100", *RUNNERS)
# Files of tests go to several processes: most tests start ranks, which wait for each other more
# than they compute. A file stays together, for what its tests share.
IN_PARALLEL = (
    *("--numprocesses=auto", "--maxprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"),
    "--durations=25",
    # Gloo may close a connection while ranks meet, before any test has begun (decision 229).
    *("--reruns=1", "--only-rerun=Gloo connectFullMesh failed", "-rR"),
)
HAVE_SLOW_TESTS = ("zero-core", "zero-comm", "integration")
WITHOUT_SLOW = ("-m", "not slow")  # the gate: decision 228
ONE_PROCESS = "--numprocesses=0"  # for few tests: each process imports torch, for seconds
# Files that take longest are begun first. Begun last, one would run while the other processes have
# nothing left to do.
LONGEST = {
    "zero-core": (
        *("vertical_schedule", "vertical_models", "compile", "late_engine", "equivalence"),
        *("direct_exchange", "memory_peak", "triton_sum", "plan", "training_loops", "param_grads"),
        *("tail", "weight_patches", "step_time", "peak_memory", "several_engines"),
    ),
    "zero-comm": ("triton_kernels", "fsdp2_plugin", "ddp_comm_hook", "quantizer_backends"),
    "zero-offload": ("data_parallel", "nvme_tier"),
    "integration": (
        *("happens_before", "stop_and_resume", "nvme_offload", "host_share", "host_rules"),
        *("few_bits", "param_offload", "sharded_hugging_face"),
        *("process_group_end",),
    ),
    "slow": ("lightning", "accelerate_launch", "deepspeed_launcher", "tutorials"),
}
# There are more processes than cores: a thread that spins until others come takes theirs away.
NO_SPINNING = {"OMP_WAIT_POLICY": "passive"}
LINT_TOOLS = ("ruff>=0.15,<0.18", "clang-format>=20", "check-jsonschema>=0.39")
TYPE_TOOLS = ("mypy>=1.19", "pybind11")
# mkdocs 2 has no plugins, and mkdocs-material no release for it.
DOCS_TOOLS = ("mkdocs>=1.6,<2", "mkdocs-material>=9.8,<10", "mkdocstrings-python>=2.0,<3")

# A torch release and the CUDA version that its wheels on the package index are built for.
TORCH_CUDA = {
    "2.10.0": "12.8",
    "2.11.0": "13.0",
    "2.12.0": "13.0",
    "2.13.0": "13.0",
    "2.14.0": "13.0",
    "2.15.0": "13.2",
}
# Triton's interpreter, which only tests use, converts arrays as NumPy allowed it until 2.3.
OLD_NUMPY = {"2.10.0": ("numpy<2.4",), "2.11.0": ("numpy<2.4",)}
# The newest releases and the ones before that work with the rest of the row on a CPU. A package
# that has none has its newest twice.
HUGGING_FACE = (
    {
        "transformers": "5.23.0",
        "accelerate": "1.15.0",
        "trl": "1.16.0",
        "peft": "0.21.2",
        "lightning": "2.6.6",
    },
    {
        "transformers": "5.22.2",
        "accelerate": "1.14.0",
        "trl": "1.14.2",  # 1.15.0 has its losses in a GPU's kernels alone
        "peft": "0.21.2",  # 0.21.1 does not adapt T5 with these transformers
        "lightning": "2.6.5",
    },
)
HUGGING_FACE_TESTS = (
    "test_accelerate.py",
    "test_gathered_parameters.py",
    "test_hf_arguments.py",
    "test_hf_trainer.py",
    "test_hugging_face.py",
    "test_sharded_hugging_face.py",
    "slow/test_accelerate_launch.py",
    "slow/test_lightning.py",
    "slow/test_trainer_script.py",
)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@nox.session
def train(session: nox.Session) -> None:
    """Install everything and train."""
    install_everything(session)
    # In nox's place, not below it: nox gives a program 0.3 s after Ctrl-C and passes no SIGTERM
    # on, and this one saves a checkpoint first. So this session is the last of a nox run.
    program = str(Path(session.bin) / "zero-engine")
    environment = {**os.environ, **{k: v for k, v in session.env.items() if v is not None}}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, ["zero-engine", "train", *session.posargs], environment)


@nox.session
@nox.parametrize("part", [nox.param(part, id=part) for part in PARTS])
def tests(session: nox.Session, part: str) -> None:
    """Lint, test one package alone, or check the types of all packages and test them together."""
    choose(session, part, PARTS)
    if part == "lint":
        lint(session)
    elif part == "together":
        test_together(session)
    else:
        test_alone(session, part)


@nox.session
@nox.parametrize("part", [nox.param(part, id=part) for part in NIGHTLY])
def nightly(session: nox.Session, part: str) -> None:
    """Run what the gate leaves out: see decision 228."""
    choose(session, part, NIGHTLY)
    run = {
        "slow": test_slow,
        "examples": run_examples,
        "experiments": start_experiments,
        "clusters": check_clusters,
        "report": look_at_report,
        "kernels": run_kernels,
        "sanitize": test_sanitized,
    }
    run[part](session)


def choose(session: nox.Session, part: str, parts: tuple[str, ...]) -> None:
    """Skip ``part`` unless the session's arguments name it, or are none."""
    unknown = set(session.posargs) - {*parts}
    if unknown:
        session.error(f"unknown part {unknown.pop()!r}: choose {parts}")
    if session.posargs and part not in session.posargs:
        session.skip("not asked for")


@nox.session
def lint(session: nox.Session) -> None:
    """Check Python, C++, docstrings and the structure of the imports; change nothing."""
    session.install(*PIP_FLAGS, *LINT_TOOLS)
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    folders = [Path("packages", folder) for folder in NATIVE_FOLDERS]
    files = (path for folder in folders for path in folder.rglob("*"))
    found = sorted(path for path in files if path.suffix in {".cpp", ".h", ".inl"})
    session.run("clang-format", "--dry-run", "-Werror", *(str(path) for path in found))
    session.run("python", ".ci/structure.py")
    session.run("python", ".ci/docstrings.py")
    workflows = sorted(str(path) for path in Path(".github", "workflows").glob("*.yml"))
    session.run("check-jsonschema", "--builtin-schema=vendor.github-workflows", *workflows)


def run_examples(session: nox.Session) -> None:
    """Run the examples, each by the command that stands in it; each asserts that its loss fell."""
    install_everything(session, "accelerate>=1.13", extras="[lightning,ray]")
    environment = {"OMP_NUM_THREADS": "1"}  # two ranks, and CI has few cores
    for path in sorted(Path("integration", "examples").rglob("*.py")):
        if path.stem == "lesson":
            continue  # what the tutorials share is no program
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        command = description.split("\n\n")[1]
        session.run(*shlex.split(command), env=environment)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site. The API is read from the sources: nothing is imported."""
    session.install(*PIP_FLAGS, *DOCS_TOOLS, *LINT_TOOLS[:1])  # ruff formats signatures
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # decision 214
    session.run("mkdocs", "build", "--strict", *session.posargs, env=quiet)


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark, e.g. ``nox -s bench -- engine``; DeepSpeed is installed to compare with."""
    install_everything(session, extras="[bench]")
    session.run("python", "integration/benchmarks/run.py", *session.posargs)


@nox.session
def lab(session: nox.Session) -> None:
    """Run an experiment of the lab."""
    install_everything(session, extras="[bench]")
    session.run("python", "integration/lab/run.py", *session.posargs)


def look_at_report(session: nox.Session) -> None:
    """Go a new user's path, and look at a report's page in headless Chromium."""
    if not (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    ):
        session.error("no browser: apt-get install chromium, or set CHROMIUM to the program of one")
    install_everything(session, *TEST_TOOLS, extras="[hf]")
    session.run("python", "-m", "pytest", "-q", "integration/browser")


def start_experiments(session: nox.Session) -> None:
    """Import every benchmark and every experiment of the lab, and print their help."""
    install_everything(session, extras="[bench]")
    for folder in ("benchmarks", "lab"):
        session.run("python", f"integration/{folder}/run.py", "--dry-run", silent=True)


def check_clusters(session: nox.Session) -> None:
    """Check the files for clusters by the schemas of Kubernetes, Kubeflow and SkyPilot."""
    readers = ("kubeflow-trainer-api>=2.2", "skypilot>=0.14", "pyyaml>=6")
    session.install(*PIP_FLAGS, *CONSTRAINTS, "pytest", *readers)
    home = {"HOME": session.create_tmp()}  # SkyPilot keeps files there
    session.run("python", "-m", "pytest", "-q", "integration/clusters", env=home)


@nox.session
def compat(session: nox.Session) -> None:
    """Compare losses, step time and memory with DeepSpeed's own, which is installed here.

    With the argument ``scars``: bugs of DeepSpeed's releases, in the releases that had them. With
    ``hugging-face``: Hugging Face's libraries and Lightning, in their two newest releases.
    """
    install_everything(
        session,
        *TEST_TOOLS,
        "trl>=1.16",
        "bitsandbytes>=0.50",
        "torchao>=0.18",
        extras="[bench,ray,test]",
    )
    if session.posargs[:1] == ["scars"]:
        run_compat(session, "releases.py", *session.posargs[1:])
        return
    compile_deepspeed(session)
    if session.posargs == ["hugging-face"]:
        test_hugging_face(session)
        return
    # That each of its modules is served or refused can be told only where it is installed.
    # In a run of its own: it preloads what the checks expect not to be imported yet.
    session.run("python", "-m", "pytest", "-q", "integration/tests/slow/test_import_hook.py")
    session.run("python", "-m", "pytest", "-q", "integration/compat/checks")
    run_compat(session, "compare.py", *session.posargs)
    if not session.posargs:
        run_compat(session, "trl_grid.py")


@nox.session
def faults(session: nox.Session) -> None:
    """Break things and count what held, beside torch and DeepSpeed: ``-- -k X`` for a part.

    With the argument ``soak``: kill training at random moments and compare what it ends with.
    """
    install_everything(session, *TEST_TOOLS, extras="[bench,test]")
    with session.chdir("integration"):
        if session.posargs[:1] == ["soak"]:
            session.run("python", "-m", "faults.soak", *session.posargs[1:])
        else:
            session.run(*PYTEST_FAULTS, *session.posargs, env={"DS_ACCELERATOR": "cpu"})


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all packages, install them from the wheelhouse alone without a compiler, and train."""
    session.install(*PIP_FLAGS, "build>=1.2")
    wheelhouse = Path("wheelhouse").resolve()
    shutil.rmtree(wheelhouse, ignore_errors=True)
    for folder in (*(f"packages/{name}" for name in PACKAGES), "integration"):
        # The wheel is built from the unpacked sdist, in an environment with what it requires alone.
        session.run("python", "-m", "build", "--outdir", str(wheelhouse), folder)
    # By file: an index may have packages of these names that are not these.
    own = [
        f"{path}[all]" if path.name.startswith("zero_engine") else str(path)
        for path in sorted(wheelhouse.glob("*.whl"))
    ]
    # What they require joins them there: binaries only, what has to be built would fail.
    pip_download = ("python", "-m", "pip", "download", *PIP_FLAGS, *CONSTRAINTS)
    session.run(*pip_download, "--only-binary=:all:", f"--dest={wheelhouse}", *own)
    temporary = Path(session.create_tmp()).resolve()
    fresh = temporary / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    programs = fresh / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(programs / "python")
    # No compiler within reach, no index, no settings that name another place.
    bare = {"PATH": str(programs), "CC": None, "CXX": None, "PIP_FIND_LINKS": None}
    bare["PIP_CONFIG_FILE"] = os.devnull
    session.run(python, "-c", NO_COMPILER, env=bare, external=True, silent=True, log=False)
    pip_install = (python, "-m", "pip", "install", *PIP_FLAGS, "--no-index")
    links = f"--find-links={wheelhouse}"
    session.run(*pip_install, links, *own, env=bare, external=True)
    run = ("--steps=20", "--layers=2", "--width=64", "--ranks=2", "--overwrite")
    with session.chdir(temporary):  # away from the sources
        zero_engine = str(programs / "zero-engine")
        session.run(zero_engine, "train", *run, "--output=run", env=bare, external=True)


def test_sanitized(session: nox.Session) -> None:
    """Run cpu-adam's tests on a module built with AddressSanitizer and UBSan (Linux, GCC)."""
    sanitized = "--config-settings=cmake.define.CPU_ADAM_SANITIZE=ON"
    requirement = "packages/cpu-adam[torch,test]"
    session.install(*PIP_FLAGS, *CONSTRAINTS, requirement, sanitized, env={"CXX": "g++"})
    runtimes = [
        str(session.run("g++", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter leaves memory to its end
        "PYTHONMALLOC": "malloc",
    }
    with session.chdir("packages/cpu-adam"):
        session.run("python", "-m", "pytest", "-q", env=environment)


def run_kernels(session: nox.Session) -> None:
    """Build and run the test program of cpu-adam's kernels; takes minutes."""
    session.install(*PIP_FLAGS, "packages/cpu-adam[test]")
    with session.chdir("packages/cpu-adam"):
        session.run("python", "-m", "pytest", "-q", "-m", "program")


@nox.session
@nox.parametrize("python", PYTHONS)
@nox.parametrize(
    "torch",
    [nox.param(torch, id=f"torch-{torch}-cuda-{cuda}") for torch, cuda in TORCH_CUDA.items()],
)
def matrix(session: nox.Session, torch: str) -> None:
    """Test everything together with another torch or Python.

    The CUDA version is that of the release's wheels. Without a GPU the same tests run on the CPU:
    that column is what CI runs, with the release in constraints.txt.
    """
    for package in PACKAGES:
        session.install(*PIP_FLAGS, "--no-deps", "--force-reinstall", *find_wheel(session, package))
    tested = ("cpu-adam[test,torch]", *(f"{package}[test]" for package in PACKAGES[1:]))
    pinned = (f"torch=={torch}", *OLD_NUMPY.get(torch, ()))
    session.install(*PIP_FLAGS, *pinned, *tested, "./integration[test]", *RUNNERS)
    run_parts(session, *PACKAGES, "integration")


@nox.session(python=PYTHONS[0])
@nox.parametrize("part", [nox.param(part, id=part) for part in (*PACKAGES, "integration")])
def minimum(session: nox.Session, part: str) -> None:
    """Test a package with the lowest releases of all that its pyproject.toml declares."""
    folder = part if part == "integration" else f"packages/{part}"
    siblings = PACKAGES if part == "integration" else (part,)
    own = [wheel for package in siblings for wheel in find_wheel(session, package)]
    extras = ("--extra=test", *(("--extra=torch",) if part == "cpu-adam" else ()))
    session.install(*PIP_FLAGS, "uv>=0.9")
    uv_install = ("uv", "pip", "install", "--quiet", f"--python={session.bin}/python")
    lowest = ("--resolution=lowest-direct", f"--requirements={folder}/pyproject.toml")
    # Siblings by file: an index may have packages of their names that are not these.
    session.run(*uv_install, *lowest, *extras, *own)
    # The runner is no dependency of the package: it may be any release.
    session.run(*uv_install, *RUNNERS)
    if part == "integration":
        session.run(*uv_install, "--no-deps", "./integration")
    run_parts(session, part)


def test_hugging_face(session: nox.Session) -> None:
    """Test what goes into transformers, accelerate, TRL, PEFT and Lightning with their releases."""
    for number, releases in enumerate(HUGGING_FACE):
        pinned = (f"{name}=={release}" for name, release in releases.items())
        session.install(*PIP_FLAGS, *pinned)
        with session.chdir("integration"):
            files = [f"tests/{name}" for name in HUGGING_FACE_TESTS]
            session.run("python", "-m", "pytest", "-q", *IN_PARALLEL, *files, env=NO_SPINNING)
        results = Path(session.create_tmp(), f"compat{number}.json")
        results.unlink(missing_ok=True)
        families = [
            f"--only={name}:" for name in ("TRL", "transformers", "accelerate", "Lightning")
        ]
        page = results.with_suffix(".md")
        run_compat(session, "compare.py", *families, f"--results={results}", f"--page={page}")


def test_alone(session: nox.Session, package: str) -> None:
    """Install one package with nothing but what it declares, and run its tests."""
    if package != "cpu-adam":
        link_torch(session)
    install(session, f"packages/{package}[test]", *RUNNERS)
    refuse_siblings(session, package)
    if package == "cpu-adam":  # torch is optional: first without, then with it
        refuse(session, ["torch"])
        run_package_tests(session, package)
        link_torch(session)
        install(session, f"packages/{package}[torch,test]")
        files = sorted(Path("packages", package, "tests").glob("test_*.py"))
        with_torch = [f"tests/{f.name}" for f in files if "torch" in f.read_text(encoding="utf-8")]
        with session.chdir(f"packages/{package}"):
            run_tests(session, ONE_PROCESS, *with_torch)
        return
    run_package_tests(session, package)


def test_together(session: nox.Session) -> None:
    """Types, conformance and end-to-end tests, in one environment."""
    install_everything(session, *TYPE_TOOLS, *TEST_TOOLS, extras="[test]")
    run_typecheck(session)
    run_integration_tests(session)
    # Those of its tests that take cpu-adam, which was not there when it was tested alone.
    chosen = ("-k", "cpu_adam or kernel_class")
    run_package_tests(session, "zero-offload", ONE_PROCESS, *chosen)


def test_slow(session: nox.Session) -> None:
    """Programs around the packages, and what tests leave out of the gate: decision 228."""
    marked = [package for package in PACKAGES if package in HAVE_SLOW_TESTS]
    extras = (f"packages/{package}[test]" for package in marked)
    install_everything(session, *extras, *TEST_TOOLS, extras="[ray,test]")
    with session.chdir("integration"):
        run_tests(session, *longest_first("slow", "tests/slow"))
        run_tests(session, "-m", "slow", "tests", "conformance")
    for package in marked:
        with session.chdir(f"packages/{package}"):
            run_tests(session, "-m", "slow", "tests")


def install_everything(session: nox.Session, *further: str, extras: str = "") -> None:
    """Install the five packages of this repository, and ``further`` requirements."""
    for package in PACKAGES:  # compiled while a session beside this one makes torch's files
        find_wheel(session, package)
    link_torch(session)
    install(session, *EVERYTHING, f"./integration{extras}", *further)


def install(session: nox.Session, *requirements: str) -> None:
    """Install ``requirements``; a package's wheel is built once for all sessions."""
    wheels: list[str] = []
    others = []
    for requirement in requirements:
        name, bracket, extras = requirement.removeprefix("packages/").partition("[")
        if name in PACKAGES:
            wheels += find_wheel(session, name)
            others.append(name + bracket + extras)
        else:
            others.append(requirement)
    if wheels:  # by force: pip takes a wheel of the same version for the one that is there
        session.install(*PIP_FLAGS, "--no-deps", "--force-reinstall", *wheels)
    session.install(*PIP_FLAGS, *CONSTRAINTS, *others)


def link_torch(session: nox.Session) -> None:
    """Put torch and what it requires into an environment whose packages declare torch.

    pip unpacks torch once for all sessions, and Python compiles it once: environments have hard
    links to those files. They have nothing else in common.
    """
    there = Path(session.virtualenv.location).resolve()
    if sys.platform == "win32" or (there / "bin" / "torchrun").exists():
        return  # pip's programs for Windows are binary files with the environment's path
    digest = hashlib.sha256(interpreter(there) + Path(CONSTRAINTS[1]).read_bytes()).hexdigest()
    kept = TORCH.resolve() / digest[:16]
    with made_once(kept) as made:
        if made is not None:
            session.run_install("python", "-m", "venv", "--without-pip", str(made))
            python = str(made / "bin" / "python")
            pip = ("python", "-m", "pip", "--python", python)
            session.run_install(*pip, "install", *PIP_FLAGS, *CONSTRAINTS, "torch")
            # Environments may have another release of it from the beginning.
            session.run_install(*pip, "uninstall", "--quiet", "--yes", "setuptools")
            session.run_install(python, "-W", "ignore", "-c", IMPORTS, external=True, log=False)
    if kept.exists():
        shutil.copytree(libraries(kept), libraries(there), copy_function=link, dirs_exist_ok=True)
        program = (kept / "bin" / "torchrun").read_text(encoding="utf-8")
        made_in = re.escape(str(kept)) + r"\.\d+"
        # The last file: without it the environment is incomplete.
        own = there / "bin" / "torchrun"
        own.write_text(re.sub(made_in, str(there), program), encoding="utf-8")
        own.chmod(0o755)


@contextmanager
def made_once(kept: Path) -> Iterator[Path | None]:
    """A folder that becomes ``kept`` when it is made; None: it is there. An error removes it."""
    made = kept.with_suffix(f".{os.getpid()}")
    for left in kept.parent.glob("*.*"):  # by a run that was killed; none takes a day
        with suppress(OSError):  # a run beside this one has just renamed it
            if left.stat().st_mtime < time.time() - 24 * 3600:
                shutil.rmtree(left)
    try:
        yield None if kept.exists() else made
        if made.exists():
            with suppress(OSError):  # a run beside this one was first
                made.rename(kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def interpreter(environment: Path) -> bytes:
    """What an environment says of its interpreter, which need not be nox's own."""
    lines = (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith(("home =", "version ="))).encode()


def libraries(environment: Path) -> Path:
    """Return the folder of an environment that packages are installed into."""
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def link(source: str, target: str) -> None:
    """Make a hard link, unless an interrupted run has made it."""
    with suppress(FileExistsError):
        os.link(source, target)


def find_wheel(session: nox.Session, package: str) -> list[str]:
    """The wheel of ``package``: of an earlier session, if what it is made from is the same.

    Empty where there is none and nox was told to install nothing.
    """
    folder = Path("packages", package)
    made_from = sorted(path for path in folder.rglob("*") if is_source(path.relative_to(folder)))
    digest = hashlib.sha256(interpreter(Path(session.virtualenv.location)))
    for path in made_from:
        digest.update(f"{path.as_posix()} {path.stat().st_size} ".encode() + path.read_bytes())
    kept = WHEELS / digest.hexdigest()[:16]
    with made_once(kept) as made:
        if made is not None:
            pip_wheel = ("python", "-m", "pip", "wheel", *PIP_FLAGS, "--no-deps")
            session.run_install(*pip_wheel, f"--wheel-dir={made}", str(folder))
    return [str(path) for path in kept.glob("*.whl")]


def is_source(path: Path) -> bool:
    """Whether a file of a package goes into its wheel, ``path`` being relative to the package."""
    is_cache = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return bool(path.suffix) and path.suffix != ".so" and path.parts[0] != "tests" and not is_cache


def run_package_tests(session: nox.Session, package: str, *options: str) -> None:
    """Run a package's own tests from within its folder, where its settings are."""
    with session.chdir(f"packages/{package}"):
        chosen = WITHOUT_SLOW if package in HAVE_SLOW_TESTS else ()
        run_tests(session, *chosen, *options, *longest_first(package, "tests"))


def run_integration_tests(session: nox.Session) -> None:
    """Run conformance and the end-to-end tests."""
    with session.chdir("integration"):
        files = longest_first("integration", "tests", "conformance")
        run_tests(
            session, *WITHOUT_SLOW, *(file for file in files if "slow" not in Path(file).parts)
        )


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest on files, which are begun in the order they are named."""
    session.run("python", "-m", "pytest", "-q", *IN_PARALLEL, *arguments, env=NO_SPINNING)


def run_parts(session: nox.Session, *parts: str) -> None:
    """Run all tests of ``parts``, slow ones too. The session's arguments go to pytest."""
    failed = []
    for part in parts:
        is_package = part != "integration"
        with session.chdir(f"packages/{part}" if is_package else part):
            folders = ("tests",) if is_package else ("tests", "conformance")
            try:
                further = ("--continue-on-collection-errors", *session.posargs)
                run_tests(session, *further, *longest_first(part, *folders))
            except CommandFailed:
                failed.append(part)
    if failed:
        session.error(f"tests of {', '.join(failed)} failed")


def longest_first(package: str, *folders: str) -> list[str]:
    """Return the test files in ``folders`` of the current one, those of `LONGEST` before others.

    All by name: pytest takes a file that is named beside its folder for a part of the folder.
    """
    files = sorted(path for folder in folders for path in Path(folder).rglob("test_*.py"))
    named = {path.stem: path for path in files}
    longest = [named[f"test_{name}"] for name in LONGEST.get(package, ())]
    return [str(path) for path in dict.fromkeys([*longest, *files])]


def run_compat(session: nox.Session, program: str, *arguments: str) -> None:
    """Run public scripts, as the ``program`` in ``integration/compat`` says."""
    # It takes what starts and measures ranks from the benchmarks' harness.
    found = os.environ.get("PYTHONPATH")
    paths = [str(Path("integration").resolve()), *([found] if found else [])]
    path = {"PYTHONPATH": os.pathsep.join(paths)}
    session.run("python", f"integration/compat/{program}", *arguments, env=path)


def compile_deepspeed(session: nox.Session) -> None:
    """Compile what DeepSpeed otherwise compiles at its first use on a CPU, into the environment.

    All environments have one folder for it by default, and each compiles all of it again. A program
    that is ended while it compiles leaves a lock there, for which all later ones wait.
    """
    compiled = Path(session.bin).parent.resolve() / "compiled"
    session.env["TORCH_EXTENSIONS_DIR"] = str(compiled)
    for lock in compiled.glob("*/lock"):
        lock.unlink()
    session.run("python", "-c", COMPILE, env={"DS_ACCELERATOR": "cpu"}, silent=True, log=False)


def run_typecheck(session: nox.Session) -> None:
    """Mypy with the settings of the root pyproject.toml."""
    session.run("mypy", *SOURCES, "integration/conformance")


# An environment that is said to have no compiler must not find one.
NO_COMPILER = """
import shutil
found = [name for name in ("cc", "gcc", "c++", "g++", "clang", "cl") if shutil.which(name)]
assert not found, f"a compiler is within reach: {found}"
"""

# What tests import of torch, for its bytecode.
IMPORTS = """
import torch.distributed.fsdp, torch.distributed.run, torch.distributed.tensor
import torch._dynamo.testing, torch._inductor.compile_fx, torch.optim, torch.utils.checkpoint
"""

COMPILE = """
from deepspeed.ops.op_builder import cpu
for name in ("CPUAdam", "FusedAdam", "PinMemory", "ShareMemComm"):
    getattr(cpu, f"{name}Builder")().load(verbose=False)
"""

# A package that imports a sibling by accident must not find it.
REFUSE = """
import importlib.util
found = [name for name in {modules!r} if importlib.util.find_spec(name)]
assert not found, f"installed, but not declared: {{found}}"
"""


def refuse_siblings(session: nox.Session, package: str) -> None:
    """Fail if another package of this repository is in the environment."""
    refuse(session, [name.replace("-", "_") for name in PACKAGES if name != package])


def refuse(session: nox.Session, modules: list[str]) -> None:
    """Fail if one of ``modules`` is in the environment: nobody declared it."""
    session.log(f"not installed here: {', '.join(modules)}")
    session.run("python", "-c", REFUSE.format(modules=modules), silent=True, log=False)
