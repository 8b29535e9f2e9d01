"""The Triton backend where there is no GPU: interpreted, and compiled without being run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from difference_cases import MODES
from quantizer_cases import formats, name_of

HERE = Path(__file__).parent
NAMES = sorted({name_of(fmt) for fmt in formats()})
TIMEOUT_S = 600

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed: it has no wheel for this system", allow_module_level=True)


def run_program(name: str, folder: Path, **environment: str) -> Any:
    """What a program of this folder prints, run by itself: triton reads its settings on import."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        env={**inherited, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program("triton_program.py", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def interpreted_differences(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("triton")
    return run_program("triton_difference_program.py", folder, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program("triton_compile_program.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_give_the_bytes_and_values_of_plain_torch(
    interpreted: Any, name: str
) -> None:
    found = interpreted["formats"][name]
    assert found["cases"] >= 3
    assert found["wrong"] == []


def test_block_that_no_program_can_hold_is_refused_with_what_to_do(interpreted: Any) -> None:
    assert "blocks of up to 32768 elements, got block_size 65536" in interpreted["refusal"]
    assert "ZERO_COMM_BACKEND=torch" in interpreted["refusal"]


@pytest.mark.slow
def test_compiled_kernels_round_every_operation_by_itself(compiled: Any) -> None:
    for name, text in compiled["cuda"].items():
        assert re.findall(r"\bfma\.|\.approx|\.ftz", text) == [], name
        assert "div.rn.f32" in text, name


@pytest.mark.slow
def test_compiled_kernels_move_whole_tiles_sixteen_bytes_at_a_time(compiled: Any) -> None:
    for name, text in compiled["cuda"].items():
        assert ".v4.b32" in text, name


@pytest.mark.slow
def test_decoded_values_stay_in_the_thread_that_stores_them(compiled: Any) -> None:
    for name in ("decode int4", "decode_sum e4m3"):
        assert "ld.shared" not in compiled["cuda"][name], name


@pytest.mark.slow
def test_kernels_compile_for_amd_with_ieee_division(compiled: Any) -> None:
    assert "v_div_fixup_f32" in compiled["hip"]["encode rotated"]


def test_interpreted_differences_have_the_bytes_and_values_of_plain_torch_in_every_mode(
    interpreted_differences: Any,
) -> None:
    assert interpreted_differences["wrong"] == []
    for itemsize, modes in MODES.items():
        assert set(interpreted_differences["modes"][str(itemsize)]) == modes


def test_interpreted_checksums_are_those_of_plain_torch(interpreted_differences: Any) -> None:
    assert interpreted_differences["wrong_checksums"] == []


def test_interpreted_values_have_the_bytes_values_and_verdicts_of_plain_torch(
    interpreted_differences: Any,
) -> None:
    assert interpreted_differences["wrong_values"] == []
    assert interpreted_differences["wrong_of_damaged_values"] == []


def test_interpreted_differences_refuse_damaged_bytes_as_plain_torch_does(
    interpreted_differences: Any,
) -> None:
    assert interpreted_differences["wrong_of_damaged"] == []
    refused, damaged = interpreted_differences["refused"], interpreted_differences["damaged"]
    assert damaged / 4 < refused < damaged  # a flipped code is often a good one


@pytest.mark.slow
def test_lossless_kernels_compile_for_each_gpu_and_load_elements_widely(compiled: Any) -> None:
    texts = compiled["differences"]
    assert len(texts) == 36
    for name, text in texts.items():
        if "decode" not in name:
            assert re.search(r"ld\.global\.v4\.b32|load_dwordx4", text), name


@pytest.mark.slow
def test_checksum_kernel_compiles_for_each_gpu_and_loads_words_widely(compiled: Any) -> None:
    assert len(compiled["checksums"]) == 3
    for name, text in compiled["checksums"].items():
        assert len(re.findall(r"ld\.global\.v2\.b64|load_dwordx4", text)) >= 4, name


@pytest.mark.slow
def test_lossless_kernels_have_no_atomics(compiled: Any) -> None:
    """Bytes that several codes share are put together in registers (decision 243)."""
    for name, text in compiled["differences"].items():
        assert not re.search(r"\batom\.|\bred\.|_atomic_", text), name
