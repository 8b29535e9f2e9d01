"""Import hook that serves ``deepspeed`` and ``deepspeed.*`` as ``zero_engine.deepspeed.*``.

The hook also patches modules of accelerate, Lightning and transformers after their import.
``on_path/sitecustomize.py`` installs the hook in every Python process, before it is known whether
the process imports deepspeed. Therefore only the standard library is imported at the top.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

HOME = "zero_engine.deepspeed"
_TAKEN = ["model", "state_dict", "load_config"]
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Unless it is set, transformers' threads read all weights of a quantized checkpoint ahead."""
ON_PATH = Path(__file__).parent / "on_path"
SERVED = "deepspeed"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WRITER = "ZERO_ENGINE_ERROR_FILE_WRITER"
"""Process number and path of the process that may write the error file. Child processes
inherit it."""
RECORD = "ZERO_ENGINE_RECORD"
"""Folder for records of each engine's steps, from ``zero-engine run --record``."""


def hooked(environment: Mapping[str, str]) -> dict[str, str]:
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
    record_uncaught()


def record_uncaught() -> None:
    """Write an uncaught exception to torchrun's error file, unless a parent process does."""
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
        # A forked child keeps the hook, but has another process id.
        if issubclass(kind, Exception) and own == f"{os.getpid()} {path}":
            with suppress(ImportError):  # zero_core itself may be missing
                from zero_core.adapters import write_error_file

                lines = traceback.format_exception(kind, error, trace)
                write_error_file(kind.__name__, str(error), "".join(lines))

    sys.excepthook = show


class _Served(MetaPathFinder, Loader):
    """Finder and loader of ``deepspeed.*``, and finder of `MENDS`' modules.

    Must be first in ``sys.meta_path``.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MENDS:
            return _mended(fullname, path, target)
        if fullname != SERVED and not fullname.startswith(f"{SERVED}."):
            return None
        home = f"{HOME}{fullname.removeprefix(SERVED)}"
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{home}.".startswith(f"{error.name}."):
                raise
            found = None  # a parent is a module, not a package
        if found is None:
            # Raise: on None, Python asks the next finder, which may find an installed DeepSpeed.
            raise ModuleNotFoundError(
                f"zero-engine stands for deepspeed here, and DeepSpeed 0.19.8 has no {fullname!r}",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{HOME}{spec.name.removeprefix(SERVED)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "the import system has set the alias's spec"
        module.__spec__ = module.__spec__.loader_state  # the module keeps its own


def _mended(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    # foreign: finders of other projects. Old ones have no find_spec.
    others = (f for f in sys.meta_path if not isinstance(f, _Served) and hasattr(f, "find_spec"))
    spec = next(filter(None, (f.find_spec(fullname, path, target) for f in others)), None)
    if spec is None or spec.loader is None:
        return None
    run = spec.loader.exec_module

    def run_and_mend(module: ModuleType) -> None:
        run(module)
        try:
            MENDS[fullname](module)
        except (AttributeError, ImportError) as error:  # the program may not need the patch
            import logging

            logging.getLogger("zero_engine").warning(
                "%s is not of a release that is known here (%s): it stays as it is, and may not "
                "work with this engine",
                fullname,
                error,
            )

    # Patch the loader object: its class is the interpreter's and serves other modules, too.
    spec.loader.exec_module = run_and_mend  # type: ignore[method-assign]
    return spec


def mend_accelerate(module: Any) -> None:
    """Make accelerate use all ranks with DeepSpeed on machines without an accelerator.

    accelerate (1.15, ``PartialState.__init__``) calls ``_prepare_backend`` for the backend. Without
    an accelerator and with ``cpu=False``, as for DeepSpeed, the result is None. accelerate then
    joins the group, but treats every rank as the only process: each would read all data and write
    every file. Here the result is gloo.
    """
    state = module.PartialState
    prepare = state._prepare_backend

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, *args, **kwargs)
        uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        has_ranks = uses_deepspeed and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if backend is None and not self._cpu and has_ranks:
            backend = "gloo"
            if os.environ.get("RANK", "0") == "0":
                import logging

                logging.getLogger("zero_engine").warning(
                    "no accelerator: accelerate is told to join %s ranks by gloo, as it would "
                    "otherwise take every rank for the only one",
                    os.environ["WORLD_SIZE"],
                )
        return backend, kind

    state._prepare_backend = prepare_backend


def mend_lightning(module: Any) -> None:
    """Let Lightning's own DeepSpeed strategies run without an accelerator.

    Lightning (2.6, ``DeepSpeedStrategy.setup_environment`` of the Trainer and of Fabric) accepts
    only CUDA devices with an index, as DeepSpeed needs them. This engine also computes on CPUs.
    """
    cuda = module.CUDAAccelerator
    cpu = importlib.import_module(cuda.__module__.rpartition(".")[0]).CPUAccelerator
    validate = module._validate_device_index_selection
    # The module uses CUDAAccelerator only in isinstance(), which accepts a tuple of classes.
    module.CUDAAccelerator = (cuda, cpu)
    module._validate_device_index_selection = lambda devices: validate(
        [device for device in devices if device.type != "cpu"]
    )


def mend_loading(module: Any) -> None:
    """Let transformers shard a quantized model while it loads the weights.

    At stage 3 transformers (5.23, ``PreTrainedModel.from_pretrained``) makes a model within
    ``zero.Init``, unless it is quantized: it then loads the whole model on every rank. With this
    patch each parameter is sharded when it has its value.
    """
    import inspect

    load = module.convert_and_load_state_dict_in_model
    found = list(inspect.signature(load).parameters)
    if found[: len(_TAKEN)] != _TAKEN:
        raise ImportError(f"{load.__name__}() takes {found}, expected {_TAKEN} first")

    @wraps(load)
    def load_sharded(
        model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        with ExitStack() as stack:
            is_sharded = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
            if is_sharded and load_config.hf_quantizer is not None:
                importlib.import_module(HOME).init_distributed()
                if _SEQUENTIAL not in os.environ:
                    stack.callback(os.environ.pop, _SEQUENTIAL, None)
                    os.environ[_SEQUENTIAL] = "1"
                loading = importlib.import_module(f"{HOME}.zero.partition_parameters")
                stack.enter_context(loading.sharded_loading())
            return load(model, state_dict, load_config, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = load_sharded


def mend_resizing(module: Any) -> None:
    """Gather the embeddings of a quantized model before transformers resizes them."""
    model = module.PreTrainedModel
    # Models override resize_token_embeddings for further embeddings (Gemma 4), so patch its
    # helpers.
    for name in ("_get_resized_embeddings", "_get_resized_lm_head"):
        setattr(model, name, _gathering(getattr(model, name)))


def _gathering(resize: Callable[..., Any]) -> Callable[..., Any]:

    @wraps(resize)
    def resize_gathered(self: Any, old: Any, *args: Any, **kwargs: Any) -> Any:
        if "hf_quantizer" not in vars(self):
            return resize(self, old, *args, **kwargs)
        gather = importlib.import_module(HOME).zero.GatheredParameters
        with gather(old.parameters(), modifier_rank=0):
            return resize(self, old, *args, **kwargs)

    return resize_gathered


def mend_building(module: Any) -> None:
    """Record the steps of engines in the folder of ``--record``, if it is given."""
    build, folder = module.build, os.environ.get(RECORD)

    @wraps(build)
    def build_recorded(*args: Any, **kwargs: Any) -> Any:
        engine = build(*args, **kwargs)
        if isinstance(engine, module.Engine):
            engine.record(folder)
        return engine

    module.build = build_recorded if folder else build


MENDS: Mapping[str, Callable[[Any], None]] = {
    "accelerate.state": mend_accelerate,
    "lightning.fabric.strategies.deepspeed": mend_lightning,
    "lightning.pytorch.strategies.deepspeed": mend_lightning,
    # The package pytorch-lightning has the same modules under other names.
    "lightning_fabric.strategies.deepspeed": mend_lightning,
    "pytorch_lightning.strategies.deepspeed": mend_lightning,
    "transformers.core_model_loading": mend_loading,
    "transformers.modeling_utils": mend_resizing,
    "zero_core.building": mend_building,
}
