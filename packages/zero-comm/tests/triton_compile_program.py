"""Compiles the Triton kernels for GPUs that need not be there.

Started as ``python triton_compile_program.py``; prints a JSON object of assembly, by GPU and
kernel.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zero_comm import BlockFormat
from zero_comm.differences import triton_blocks, triton_codec
from zero_comm.quantizer import triton_backend, triton_checksum, triton_tiles
from zero_comm.values import triton_blocks as value_blocks
from zero_comm.values import triton_codec as value_codec

CUDA, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
HIP = GPUTarget("hip", "gfx942", 64)
POINTER = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16"}
# Between them every function of the kernels.
ROTATED = BlockFormat("int4", 192, is_symmetric=False, has_rotation=True)
ASYMMETRIC = BlockFormat("int8", 256, is_symmetric=False)
FLOAT8 = BlockFormat("e4m3", 128)
INT4 = BlockFormat("int4", 128)


def assembly(
    kernel: Any, arguments: dict[str, str], constants: dict[str, Any], target: GPUTarget
) -> str:
    """PTX, or that of an AMD GPU, with pointers and strides known to be aligned."""
    constants = dict(constants)
    options = {**triton_backend.LAUNCH_OPTIONS, "num_warps": constants.pop("num_warps")}
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    names = list(kernel.arg_names)
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in arguments
        if name.endswith(("_ptr", "_stride"))
        and not kernel.params[names.index(name)].do_not_specialize_on_alignment
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in names},
        constexprs=constants,
        attrs=aligned,
    )
    found = triton.compile(source, target=target, options=options).asm
    return str(found["amdgcn" if target is HIP else "ptx"])


def encode(fmt: BlockFormat, dtype: str, target: GPUTarget, *, is_stochastic: bool) -> str:
    strides = {"numel": "i32", "x_stride": "i32", "group_stride": "i32", "out_stride": "i32"}
    strides |= {"num_rows": "i32", "seed": "i32"}
    encoding = {"DTYPE": dtype, "LARGEST_BITS": 0x7F7F0000, "IS_STOCHASTIC": is_stochastic}
    return assembly(
        triton_tiles.encode_kernel,
        {"x_ptr": POINTER[dtype], "out_ptr": "*u8", **strides},
        {**triton_backend.constants_of(fmt), **encoding},
        target,
    )


def decode(fmt: BlockFormat, dtype: str) -> str:
    strides = {"numel": "i32", "group_stride": "i32", "rows_stride": "i32", "out_stride": "i32"}
    strides["num_rows"] = "i32"
    return assembly(
        triton_tiles.decode_kernel,
        {"rows_ptr": "*u8", "out_ptr": POINTER[dtype], **strides},
        {**triton_backend.constants_of(fmt), "DTYPE": dtype},
        CUDA,
    )


def decode_sum(fmt: BlockFormat) -> str:
    return assembly(
        triton_tiles.decode_sum_kernel,
        {
            "rows_ptr": "*u8",
            "out_ptr": "*fp32",
            "numel": "i32",
            "group_stride": "i32",
            "rows_stride": "i32",
            "num_rows": "i32",
        },
        triton_backend.constants_of(fmt),
        CUDA,
    )


def difference(name: str, itemsize: int, target: GPUTarget) -> str:
    """One of the kernels of lossless differences."""
    element = f"*i{8 * itemsize}"
    places = {"descriptors_ptr": "*i16", "ends_ptr": "*i64", "codes_ptr": "*u8"}
    both = {"old_ptr": element, "new_ptr": element}
    kernel, arguments = {
        "choose": (triton_blocks.choose_kernel, {**both, "descriptors_ptr": "*i16"}),
        "encode": (triton_blocks.encode_kernel, {**both, **places}),
        "decode": (
            triton_blocks.decode_kernel,
            {**places, "values_ptr": element, "is_bad_ptr": "*i32", "codes_nbytes": "i64"},
        ),
    }[name]
    return assembly(
        kernel, {**arguments, "numel": "i64"}, triton_codec.constants_of(itemsize), target
    )


def values(name: str, itemsize: int, target: GPUTarget) -> str:
    """One of the kernels of coded values."""
    element = f"*i{8 * itemsize}"
    places = {"descriptors_ptr": "*i16", "ends_ptr": "*i64", "codes_ptr": "*u8"}
    kernel, arguments = {
        "choose": (value_blocks.choose_kernel, {"descriptors_ptr": "*i16"}),
        "encode": (value_blocks.encode_kernel, places),
        "decode": (
            value_blocks.decode_kernel,
            {**places, "is_bad_ptr": "*i32", "codes_nbytes": "i64"},
        ),
    }[name]
    arguments = {**arguments, "values_ptr": element, "numel": "i64"}
    return assembly(kernel, arguments, value_codec.constants_of(itemsize), target)


def checksum(target: GPUTarget) -> str:
    """The kernel of checksums."""
    arguments = {"words_ptr": "*i64", "sums_ptr": "*i64", "num_words": "i64", "row_stride": "i64"}
    constants = {"TURNS": triton_checksum.TURNS, "num_warps": 4}
    return assembly(triton_checksum.sum_kernel, arguments, constants, target)


def main() -> None:
    """Compile, print."""
    cuda = {
        "encode rotated": encode(ROTATED, "bf16", CUDA, is_stochastic=True),
        "encode asymmetric": encode(ASYMMETRIC, "fp16", CUDA, is_stochastic=False),
        "encode e4m3": encode(FLOAT8, "fp32", CUDA, is_stochastic=True),
        "decode rotated": decode(ROTATED, "bf16"),
        "decode int4": decode(INT4, "bf16"),
        "decode_sum e4m3": decode_sum(FLOAT8),
    }
    hip = {"encode rotated": encode(ROTATED, "bf16", HIP, is_stochastic=True)}
    differences = {
        f"{of.__name__}: {name} {8 * itemsize} bits {target.arch}": of(name, itemsize, target)
        for of in (difference, values)
        for name in ("choose", "encode", "decode")
        for itemsize in (2, 4)
        for target in (CUDA, HOPPER, HIP)
    }
    checksums = {str(target.arch): checksum(target) for target in (CUDA, HOPPER, HIP)}
    found = {"cuda": cuda, "hip": hip, "differences": differences, "checksums": checksums}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
