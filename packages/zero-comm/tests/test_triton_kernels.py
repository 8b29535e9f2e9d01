"""Compilation of the Triton kernels for GPUs that need not be present."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import simulated_ranks as ranks
from support.backends import CPU, HAS_TRITON, IS_INTERPRETED

PROGRAM = Path(__file__).with_name("triton_compile_program.py")
TIMEOUT_S = 600
LOSSLESS = {"zero_lossless_weights": True}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton has no wheel for this system"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run `PROGRAM` in a new process and return the JSON that it prints.

    Triton reads its settings at import, and this process may have imported it for the interpreter.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**inherited, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compiled_kernels_round_every_operation_by_itself_and_all_compile_for_each_gpu(
    compiled: Any,
) -> None:
    for name, text in compiled["cuda"].items():
        assert re.findall(r"\bfma\.|\.approx|\.ftz", text) == [], name
        assert "div.rn.f32" in text, name
    assert "v_div_fixup_f32" in compiled["hip"]["encode rotated"]
    assert (len(compiled["lossless"]), len(compiled["checksums"])) == (36, 3)


def test_lossless_kernels_are_not_bound_by_registers_or_shuffles(
    compiled: Any, tmp_path: Path
) -> None:
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    hopper = {n: text for n, text in compiled["lossless"].items() if ".target sm_90a" in text}
    assert len(hopper) == 12
    for name, text in hopper.items():
        (tmp_path / "x").write_text(text)
        command = [ptxas, "-v", "--gpu-name=sm_90a", "-o", tmp_path / "cubin", tmp_path / "x"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert int(re.findall(r"Used (\d+) registers", told)[0]) <= 96, name
        assert text.count("shfl.sync") <= 32, name


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({**ranks.QWZ, **ranks.QGZ, "zeropp_loco_param": {}}, 2),
        ({**ranks.FOUR_BIT, **ranks.hpz(2), **ranks.QGZ, "zero_quantized_checksum": True}, 4),
        ({**LOSSLESS, **ranks.QGZ, "zero_quantized_stochastic_rounding": True}, 2),
        (LOSSLESS, 2),  # with shards that are part of the gathered weights
    ],
)
def test_nothing_is_compiled_after_prepare(
    config: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: set[str] = set()
    lock, interpret = threading.Lock(), InterpretedFunction.run

    def run(self: Any, *args: Any, **further: Any) -> None:
        with lock:
            JITFunction(self.fn, **self.kwargs).run(*args, **further)  # only calls the hook
            interpret(self, *args, **further)

    def hook(*, repr: str, compile: Any, **_: Any) -> bool:
        found.add(f"{repr} {compile['key']}")
        return True  # Triton then does not compile

    target = GPUTarget("cuda", 90, 32)
    driver = mock.Mock(get_current_device=lambda: 0, get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setenv("ZERO_COMM_BACKEND", "triton")

    # Gathers of fp32 weights would also compile the kernel that decodes kept errors.
    dtype = torch.bfloat16 if "zeropp_loco_param" in config else torch.float32

    def program(transport: ranks.SimulatedTransport) -> None:
        used = ranks.make_collectives(transport, config, size // 2)
        reduced = [(size * numel, torch.bfloat16, torch.float32) for numel in (1056, 544)]
        used.prepare([(0, 1056, dtype), (1, 1088, dtype)], reduced, CPU)
        compiled = set(found)
        for step in range(3):
            out = torch.ones(size, 1056, dtype=dtype)
            shard = torch.full((1056,), 1.0 + step, dtype=dtype)
            shard = out[transport.rank].copy_(shard) if config == LOSSLESS else shard
            used.all_gather(out.view(-1), shard, unit=0, version=step, backward=False).wait()
            for unit, (numel, grad_dtype, _) in enumerate(reduced):
                full = torch.randn(numel).to(grad_dtype)
                used.reduce_scatter(torch.empty(numel // size), full, unit=unit).wait()
        assert found == compiled != set()

    ranks.run_ranks(ranks.Network(size, size // 2), program)
