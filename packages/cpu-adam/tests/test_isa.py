"""The best instruction set is used, unless CPU_ADAM_ISA selects another one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import cpu_adam

SHOW = "import cpu_adam; print(cpu_adam.active_isa())"


def run_with(isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, "CPU_ADAM_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def test_scalar_is_always_available_and_the_best_is_active():
    isas = cpu_adam.available_isas()
    assert isas[0] == "scalar"
    if not os.environ.get("CPU_ADAM_ISA"):
        assert cpu_adam.active_isa() == isas[-1]


@pytest.mark.parametrize("isa", cpu_adam.available_isas())
def test_the_environment_variable_forces_an_instruction_set_in_any_case(isa):
    assert run_with(f" {isa.upper()} ").stdout.strip() == isa


def test_an_unknown_instruction_set_is_refused_by_name():
    result = run_with("mmx")
    assert result.returncode != 0
    assert "CPU_ADAM_ISA='mmx' is no instruction set" in result.stderr
    assert ", ".join(cpu_adam.available_isas()) in result.stderr


@pytest.mark.parametrize("isa", ["avx2", "avx512", "neon"])
def test_a_known_instruction_set_that_the_machine_lacks_is_refused(isa, monkeypatch):
    from cpu_adam import _isa, _kernels

    monkeypatch.setattr(_kernels, "available_isas", lambda: ["scalar"])
    with pytest.raises(ValueError, match="not supported by this machine"), _isa.use_isa(isa):
        pass
