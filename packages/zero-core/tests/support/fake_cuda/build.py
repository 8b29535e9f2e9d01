"""Builds fake CUDA libraries into torch's folder: ``python build.py HEADERS BUILD``.

torch's CUDA wheel cannot be imported without NVIDIA's libraries. ``HEADERS`` is a folder with
NVIDIA's header packages, ``BUILD`` the CUDA version of the wheel, such as ``cu130``. This program
creates in ``torch/lib``

- ``libcudart``, ``libnccl`` and ``libfake_cuda_ops``, compiled from the sources in this folder;
- stubs of all other NVIDIA functions that torch imports. Most print their name and fail.

torch's libraries search ``torch/lib`` last, so NVIDIA's own packages must not be installed. Every
program of the environment uses the fake libraries, including those that torchrun starts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
_FLAGS = ("g++", "-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-w")
_PREFIXES = {  # libraries by prefix of a function's name, for symbols without a version
    "nccl": "libnccl",
    "cusparseLt": "libcusparseLt",
    "cuFile": "libcufile",
    "nvshmem": "libnvshmem_host",
    "nvrtc": "libnvrtc",
    "nvJitLink": "libnvJitLink",
    "cu": "libcuda",
}
# Stubs that succeed silently, because torch calls them without needing their effect.
_SILENT = (
    r"cublas(Set|Get|Destroy)\w*|cu(dnn|solver|sparse)\w*(Create|Destroy|Set|Get)\w*|nvshmem\w*"
)
_STUB = """
#include <dlfcn.h>
#include <stdio.h>
static int told(const char* name, int silent) {
  if (!silent) fprintf(stderr, "fake CUDA: %s has no stand-in\\n", name);
  return !silent;
}
"""
_CAPTURE = "void* stream, int* status) { *status = 0; return 0; }"
_WRITTEN = {  # handwritten stubs: arguments and body
    "cudaStreamGetCaptureInfo": _CAPTURE,
    "cudaStreamGetCaptureInfo_v2": _CAPTURE,
    # torch 2.15 registers its allocator's memory with each communicator.
    "ncclCommRegister": "void* comm, void* memory, unsigned long size, void** handle) {\n"
    "  *handle = memory; return 0; }",
    "ncclCommDeregister": "void* comm, void* handle) { return 0; }",
    "cublasCreate_v2": """void** handle) {
        static long next;
        *handle = (void*)(next += 64);
        return 0;
    }""",
    "cuDevicePrimaryCtxGetState": """int device, unsigned* flags, int* is_active) {
        unsigned long (*contexts)() = dlsym(RTLD_DEFAULT, "fake_contexts");
        *flags = 0;
        *is_active = contexts() >> device & 1;
        return 0;
    }""",
}


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("fake CUDA: install torch's CUDA build first")
    return Path(found.origin).parent


def imported_functions(folder: Path) -> dict[str, set[str]]:
    """Return the NVIDIA functions that torch's libraries in ``folder`` import, by soname."""
    libraries = sorted(folder.glob("lib*torch*.so")) + sorted(folder.glob("libc*.so"))
    needed = set()
    for library in libraries:
        found = re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", str(library)))
        needed.update(found)
    sonames = {name.split(".so")[0]: name for name in needed if re.match("lib(cu|nv|nccl)", name)}
    functions = defaultdict(set)
    for library in libraries:
        for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            prefix = next((p for p in _PREFIXES if name.removeprefix("__").startswith(p)), None)
            if prefix is None:
                continue
            soname = version.lstrip("@") or sonames.get(_PREFIXES[prefix], "")
            if version == "NVSHMEM":
                soname = sonames["libnvshmem_host"]
            if soname:
                functions[soname].add(name)
    for soname in sonames.values():
        functions.setdefault(soname, set())
    return dict(functions)


def build(headers: Path, expected: str) -> None:
    """Compile the libraries into torch's folder, unless an earlier build had the same sources.

    Args:
        headers: folder that contains NVIDIA's packages of headers.
        expected: the CUDA version of torch's wheel, such as ``cu130``.
    """
    torch = torch_folder()
    if f"+{expected}'" not in (torch / "version.py").read_text():
        raise SystemExit(f"fake CUDA: the torch in {torch} is not a build for {expected}")
    target = torch / "lib"
    parts = [p.read_text() for p in sorted(HERE.glob("*.*"))]
    key = hashlib.sha256("\n".join([*parts, (torch / "version.py").read_text()]).encode())
    mark = target / "fake_cuda.key"
    if mark.exists() and mark.read_text() == key.hexdigest():
        return
    if any((torch.parent / "nvidia").glob("**/libcudart.so*")):
        raise SystemExit("fake CUDA: uninstall NVIDIA's packages, which torch would find first")
    functions = imported_functions(target)
    includes = [f"-I{path}" for path in sorted(headers.glob("nvidia/*/include"))]
    includes += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory() as folder:
        for soname, names in sorted(functions.items()):  # libcudart before libnccl, which links it
            _compile_library(Path(folder), soname, names, includes)
        _run(
            *_FLAGS,
            *includes,
            str(HERE / "ops.cpp"),
            *("-o", f"{folder}/libfake_cuda_ops.so"),
            *(
                f"-L{folder}",
                f"-L{target}",
                "-ltorch_cpu",
                "-lc10",
                "-lc10_cuda",
                "-Wl,--allow-shlib-undefined",
            ),
            f"-l:{next(s for s in functions if s.startswith('libcudart'))}",
        )
        for made in Path(folder).glob("*.so*"):
            shutil.move(made, target / f"{made.name}.new")
            (target / f"{made.name}.new").replace(
                target / made.name
            )  # a running program may still use the old file
    mark.write_text(key.hexdigest())


def _compile_library(
    folder: Path, soname: str, names: Iterable[str], includes: Iterable[str]
) -> None:
    own = {"libcudart": "cudart.cpp", "libnccl": "nccl.cpp"}.get(soname.split(".so")[0])
    objects = []
    if own:
        objects.append(str(folder / f"{own}.o"))
        _run(*_FLAGS, *includes, "-c", str(HERE / own), "-o", objects[0])
    # Read the object file's names, because CUDA's headers rename some functions (suffix _v2).
    listed = _output("nm", "-g", "--defined-only", *objects).splitlines() if objects else []
    missing = sorted(set(names).difference(line.split()[-1] for line in listed))
    stubs = folder / "stubs.c"
    stubs.write_text(_STUB + "".join(map(_stub, missing)))
    objects.append(str(folder / "stubs.o"))
    _run("gcc", "-w", "-O0", "-fPIC", "-c", str(stubs), "-o", objects[-1])
    version = "NVSHMEM" if soname.startswith("libnvshmem") else soname
    script = folder / "version"
    script.write_text(f"{version} {{ global: *; }};")
    links = ["-ldl"]
    if own == "nccl.cpp":
        links = [f"-L{folder}", f"-l:{next(p.name for p in folder.glob('libcudart.so.*'))}"]
    _run(
        *_FLAGS,
        *objects,
        *("-o", str(folder / soname), f"-Wl,-soname,{soname}"),
        *((f"-Wl,--version-script={script}",) if own != "nccl.cpp" else ()),
        *links,
    )


def _stub(name: str) -> str:
    is_silent = int(re.fullmatch(_SILENT, name) is not None)
    body = _WRITTEN.get(name, f'void) {{ return told("{name}", {is_silent}); }}')
    return f"int {name}({body}\n"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _run(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"fake CUDA: {' '.join(command)}\n{result.stderr[-4000:]}")


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
