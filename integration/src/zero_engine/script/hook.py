"""Import hook that serves ``deepspeed`` and ``deepspeed.*`` as ``zero_engine.deepspeed.*``.

    alias    one module object under both names
    mended   another project's module, patched after its import

``on_path/sitecustomize.py`` installs the hook in every Python process, before it is known whether
the process imports deepspeed. Therefore this file imports only the standard library at the top.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType

from zero_engine.script.mends import HOME, MENDS

ON_PATH = Path(__file__).parent / "on_path"
SERVED = "deepspeed"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WRITER = "ZERO_ENGINE_ERROR_FILE_WRITER"
"""Process number and path of the process that may write the error file. Child processes
inherit it."""
SHARDED_DDP = "--sharded_ddp"
INSTEAD = (
    "was FairScale's, and transformers has dropped it: give --deepspeed zero.json (in code "
    'deepspeed="zero.json") instead, a file with {"train_micro_batch_size_per_gpu": "auto", '
    '"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto"}, '
    '"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}} (stage 1 for "simple", 2 for '
    '"zero_dp_2", 3 for "zero_dp_3"; "offload" is "offload_optimizer": {"device": "cpu"} in '
    "zero_optimization)"
)
"""Advice for users of FairScale's option, which transformers has dropped."""

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def hooked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with the hook's folders in front of PYTHONPATH and PATH."""
    return {
        **environment,
        "ZERO_ENGINE_PYTHON": sys.executable,  # Python for the program `deepspeed`
        "PYTHONPATH": _in_front(str(ON_PATH), environment.get("PYTHONPATH", "")),
        # The folder has the program `deepspeed`, DeepSpeed's launcher.
        "PATH": _in_front(str(ON_PATH / "bin"), environment.get("PATH", os.defpath)),
    }


def _in_front(folder: str, others: str) -> str:
    return os.pathsep.join([folder, *(o for o in others.split(os.pathsep) if o and o != folder)])


def install() -> None:
    """Serve deepspeed in this process, even if DeepSpeed is installed. May be called repeatedly."""
    if any(isinstance(finder, _Served) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Served())
    sys.excepthook = tell_after(sys.excepthook)
    record_uncaught()


def record_uncaught() -> None:
    """Write an uncaught exception to torchrun's error file, unless a parent process does.

    torchrun leaves the file to the script (``@record``).
    """
    path = os.environ.get(ERROR_FILE, "")
    own = f"{os.getpid()} {path}"
    known = os.environ.get(WRITER, "")
    is_taken = known.endswith(f" {path}") and known != own
    if not path or is_taken:
        return
    os.environ[WRITER] = own
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        # A forked child keeps the hook, but has another process number.
        if issubclass(kind, Exception) and own == f"{os.getpid()} {path}":
            with suppress(ImportError):  # the error may be a failed import of zero_core
                from zero_core.adapters import write_error_file

                lines = traceback.format_exception(kind, error, trace)
                write_error_file(kind.__name__, str(error), "".join(lines))

    sys.excepthook = show


def tell_after(shown: _ExceptHook) -> _ExceptHook:
    """Return a ``sys.excepthook`` that adds `INSTEAD` if ``sharded_ddp`` is rejected."""

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        shown(kind, error, traceback)
        if kind is TypeError and "unexpected keyword argument 'sharded_ddp'" in str(error):
            print(f"zero-engine: sharded_ddp {INSTEAD}", file=sys.stderr)

    return show


class _Served(MetaPathFinder):
    """Finder of aliases and of modules to mend. Must come first in ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MENDS:
            return _mended(fullname, path, target)
        if fullname != SERVED and not fullname.startswith(f"{SERVED}."):
            return None
        home = f"{HOME}{fullname.removeprefix(SERVED)}"
        found = _spec_of(home)
        if found is None:
            # With None, the next finder would find an installed DeepSpeed's module.
            raise ModuleNotFoundError(
                f"zero-engine stands for deepspeed here, and DeepSpeed 0.19.8 has no {fullname!r}",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(home), origin=found.origin, is_package=is_package)


class _Alias(Loader):
    """Loader that imports a module under its other name."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: ModuleSpec | None = None

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the alias' spec


def _spec_of(home: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(home)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{home}.".startswith(f"{error.name}."):
            return None  # a parent is a module, not a package
        raise


def _mended(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return the module's own spec, with a loader that mends the module after running it."""
    # foreign: finders of other projects. Old ones have no find_spec.
    others = (f for f in sys.meta_path if not isinstance(f, _Served) and hasattr(f, "find_spec"))
    found = (finder.find_spec(fullname, path, target) for finder in others)
    spec = next(filter(None, found), None)
    if spec is None or spec.loader is None:
        return None
    run = spec.loader.exec_module

    def run_and_mend(module: ModuleType) -> None:
        run(module)
        try:
            MENDS[fullname](module)
        except (
            AttributeError,
            ImportError,
        ) as error:  # programs may not need DeepSpeed
            import logging

            logging.getLogger("zero_engine").warning(
                "%s is not of a release that is known here (%s): it stays as it is, and may not "
                "work with this engine",
                fullname,
                error,
            )

    # Patch this loader only: its class is the interpreter's.
    spec.loader.exec_module = run_and_mend  # type: ignore[method-assign]
    return spec
