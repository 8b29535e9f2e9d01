"""Print facts about the imported ``deepspeed`` package as JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

found = {
    "is found": importlib.util.find_spec("deepspeed") is not None,
    "version": importlib.metadata.version("deepspeed"),
    "packages": set(importlib.metadata.packages_distributions()["deepspeed"]) == {"deepspeed"},
    "finding it imports torch": "torch" in sys.modules,
    "arguments": sys.argv[1:],
    "hidden sitecustomize": os.environ.get("HIDDEN_SITECUSTOMIZE"),
}

import deepspeed  # noqa: E402
import deepspeed.accelerator  # noqa: E402
import deepspeed.comm.comm  # noqa: E402
import deepspeed.moe.layer  # noqa: E402
import zero_engine.deepspeed.comm.comm  # noqa: E402
from deepspeed import comm as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

import zero_engine.deepspeed  # noqa: E402


def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def imports_nonsense():
    importlib.import_module("deepspeed.nonsense")


found |= {
    "__version__": deepspeed.__version__,
    "one module": deepspeed is zero_engine.deepspeed
    and deepspeed.comm.comm is zero_engine.deepspeed.comm.comm
    and dist is sys.modules["deepspeed.comm"]
    and deepspeed.__spec__ is zero_engine.deepspeed.__spec__,
    "instance": isinstance(3, PipelineModule),
    "call": error_of(lambda: LayerSpec(int)),
    "subclass": error_of(lambda: type("Mine", (), {}) and exec("class Mine(PipelineModule): pass")),
    "attribute": error_of(lambda: deepspeed.moe.layer.MoE.forward),
    "top level": error_of(lambda: deepspeed.init_inference(None)),
    "nonsense": error_of(imports_nonsense),
}
command = [sys.executable, "-c", "import deepspeed; print(deepspeed.__name__)"]
found["child"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
print(json.dumps(found), flush=True)
