"""Compiles the Triton kernels for GPUs that need not be present.

``python triton_compile_program.py`` prints a JSON object of assembly by GPU and kernel.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zero_comm import BlockFormat
from zero_comm.lossless import triton_codec, triton_differences, triton_values
from zero_comm.quantizer import triton_backend, triton_checksum, triton_tiles

CUDA, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
HIP = GPUTarget("hip", "gfx942", 64)
POINTER = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16"}
# Together these formats use every function of the kernels.
ROTATED = BlockFormat("int4", 192, is_symmetric=False, has_rotation=True)
ASYMMETRIC = BlockFormat("int8", 256, is_symmetric=False)
FLOAT8 = BlockFormat("e4m3", 128)
INT4 = BlockFormat("int4", 128)
# Types of arguments by name. Other arguments are 32-bit integers.
TYPES = {
    "rows_ptr": "*u8",
    "codes_ptr": "*u8",
    "descriptors_ptr": "*i16",
    "ends_ptr": "*i64",
    "is_bad_ptr": "*i32",
    "codes_nbytes": "i64",
    "words_ptr": "*i64",
    "sums_ptr": "*i64",
    "num_words": "i64",
}


def assembly(kernel: Any, target: GPUTarget, constants: dict[str, Any], **types: str) -> str:
    """Return PTX or AMD assembly, for aligned strides and, where kernels allow it, pointers."""
    constants = dict(constants)
    options = {**triton_backend.LAUNCH_OPTIONS, "num_warps": constants.pop("num_warps")}
    types = {**TYPES, **types, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride"))
        and not kernel.params[index].do_not_specialize_on_alignment
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs=constants,
        attrs=aligned,
    )
    found = triton.compile(source, target=target, options=options).asm
    return str(found["amdgcn" if target is HIP else "ptx"])


def encode(fmt: BlockFormat, dtype: str, target: GPUTarget, *, is_stochastic: bool) -> str:
    encoding = {"DTYPE": dtype, "LARGEST_BITS": 0x7F7F0000, "IS_STOCHASTIC": is_stochastic}
    constants = {**triton_backend.constants_of(fmt), **encoding}
    kernel = triton_tiles.encode_kernel
    return assembly(kernel, target, constants, x_ptr=POINTER[dtype], out_ptr="*u8")


def decode(fmt: BlockFormat, dtype: str) -> str:
    constants = {**triton_backend.constants_of(fmt), "DTYPE": dtype}
    return assembly(triton_tiles.decode_kernel, CUDA, constants, out_ptr=POINTER[dtype])


def decode_sum(fmt: BlockFormat) -> str:
    constants = triton_backend.constants_of(fmt)
    return assembly(triton_tiles.decode_sum_kernel, CUDA, constants, out_ptr="*fp32")


def lossless(blocks: Any, name: str, itemsize: int, target: GPUTarget) -> str:
    """Compile one kernel of lossless differences or of coded values."""
    kernel, element = getattr(blocks, f"{name}_kernel"), f"*i{8 * itemsize}"
    elements = dict.fromkeys(("old_ptr", "new_ptr", "values_ptr"), element)
    return assembly(kernel, target, triton_codec.constants_of(itemsize), numel="i64", **elements)


def checksum(target: GPUTarget) -> str:
    constants = {"TURNS": triton_checksum.TURNS, "num_warps": 4}
    return assembly(triton_checksum.sum_kernel, target, constants, row_stride="i64")


def main() -> None:
    cuda = {
        "encode rotated": encode(ROTATED, "bf16", CUDA, is_stochastic=True),
        "encode asymmetric": encode(ASYMMETRIC, "fp16", CUDA, is_stochastic=False),
        "encode e4m3": encode(FLOAT8, "fp32", CUDA, is_stochastic=True),
        "decode rotated": decode(ROTATED, "bf16"),
        "decode int4": decode(INT4, "bf16"),
        "decode_sum e4m3": decode_sum(FLOAT8),
    }
    hip = {"encode rotated": encode(ROTATED, "bf16", HIP, is_stochastic=True)}
    coded = {
        f"{blocks.__name__}: {name} {8 * itemsize} bits {target.arch}": lossless(
            blocks, name, itemsize, target
        )
        for blocks in (triton_differences, triton_values)
        for name in ("choose", "encode", "decode")
        for itemsize in (2, 4)
        for target in (CUDA, HOPPER, HIP)
    }
    checksums = {str(target.arch): checksum(target) for target in (CUDA, HOPPER, HIP)}
    print(json.dumps({"cuda": cuda, "hip": hip, "lossless": coded, "checksums": checksums}))


if __name__ == "__main__":
    main()
