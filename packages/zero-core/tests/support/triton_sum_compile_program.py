"""Compiles a reduction's Triton kernels for absent GPUs and prints their assembly as JSON."""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zero_core.comm.triton_sum import LAUNCH_OPTIONS, NORM_TILE, TILE, norm_kernel, sum_kernel

TARGETS = {"cuda": GPUTarget("cuda", 80, 32), "hip": GPUTarget("hip", "gfx942", 64)}
POINTER = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16", "fp64": "*fp64"}


def assembly(kernel: Any, arguments: dict[str, str], constants: dict[str, Any], gpu: str) -> str:
    names = list(kernel.arg_names)
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in arguments
        if name.endswith("_ptr") or name == "numel"
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in names},
        constexprs=constants,
        attrs=aligned,
    )
    found = triton.compile(source, target=TARGETS[gpu], options=dict(LAUNCH_OPTIONS)).asm
    return str(found["ptx" if gpu == "cuda" else "amdgcn"])


def compile_sum(dtype: str, out_dtype: str, gpu: str) -> str:
    wide = "*fp64" if out_dtype == "fp64" else "*fp32"
    return assembly(
        sum_kernel,
        {
            "slices_ptr": POINTER[dtype],
            "out_ptr": POINTER[out_dtype],
            "squares_ptr": wide,
            "nonfinite_ptr": "*u8",
            "numel": "i32",
            "num_slices": "i32",
        },
        {"DTYPE": dtype, "OUT_DTYPE": out_dtype, "HAS_NORM": True, "HAS_FLAGS": True, "TILE": TILE},
        gpu,
    )


def compile_norm() -> str:
    arguments = {"squares_ptr": "*fp32", "norm_ptr": "*fp32", "num_tiles": "i32"}
    return assembly(norm_kernel, arguments, {"TILE": NORM_TILE}, "cuda")


def main() -> None:
    pairs = [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")]
    cuda = {f"{dtype} to {out}": compile_sum(dtype, out, "cuda") for dtype, out in pairs}
    hip = {"bf16 to fp32": compile_sum("bf16", "fp32", "hip")}
    fp64 = compile_sum("fp64", "fp64", "cuda")
    print(json.dumps({"cuda": cuda, "hip": hip, "fp64": fp64, "norm": compile_norm()}))


if __name__ == "__main__":
    main()
