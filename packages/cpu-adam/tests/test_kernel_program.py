"""The C++ test of the kernels (``native/kernel_check.cpp``), run natively and on emulated Arm.

`nox -s "nightly(sanitize)"` runs the same program with sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_adam

PACKAGE = Path(__file__).parent.parent
AARCH64_COMPILER = "aarch64-linux-gnu-g++"
AARCH64_EMULATOR = "qemu-aarch64"
TIME_LIMIT_S = 600

pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
    pytest.mark.skipif(sys.platform == "win32", reason="finds the compiler as on POSIX systems"),
]


def find_compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    return compiler


def call(*command: str | Path) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, *definitions: str) -> Path:
    call(
        *("cmake", "-S", PACKAGE, "-B", folder, "-DCPU_ADAM_CHECK=ON"),
        *("-DCMAKE_BUILD_TYPE=Release", *definitions),
    )
    call("cmake", "--build", folder, "--parallel", "2")
    return folder / "kernel_check"


def digests(said: str) -> dict[str, str]:
    """Parse the program's output to {instruction set: digest of its results}."""
    found = re.findall(r"^(\w+) cases=\d+ wrong=0 digest=(\w+)$", said, re.MULTILINE)
    assert len(found) == len(said.splitlines())
    return dict(found)


@pytest.fixture(scope="module")
def native_digests(tmp_path_factory):
    program = build(tmp_path_factory.mktemp("native"), f"-DCMAKE_CXX_COMPILER={find_compiler()}")
    return digests(call(program))


def test_every_instruction_set_gives_the_scalar_bits(native_digests):
    assert tuple(native_digests) == cpu_adam.available_isas()
    assert len(set(native_digests.values())) == 1


def test_arm_gives_the_bits_of_this_machine(native_digests, tmp_path):
    for needed in (AARCH64_COMPILER, AARCH64_EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    program = build(
        tmp_path,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={AARCH64_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    emulated = digests(call(AARCH64_EMULATOR, program))
    assert list(emulated) == ["scalar", "neon"]
    assert emulated["neon"] == emulated["scalar"]
    assert set(emulated.values()) == set(native_digests.values())
