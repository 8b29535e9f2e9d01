"""Models that are asked for by size: their shape, their plan, and their products."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from zero_core.errors import ConfigError
from zero_engine.train.launch import RETURN_MEMORY, plan_request, rank_environment
from zero_engine.train.options import RunSettings, Start
from zero_engine.train.preview import preview
from zero_engine.train.products import widen_products
from zero_engine.train.program import build_model
from zero_engine.train.settings import (
    RunFolder,
    engine_config,
    fill_auto,
    fresh_run,
    write_resolved,
)
from zero_engine.train.sizes import largest_unit, parse_size, shape_of


@pytest.mark.parametrize("size", ["1m", "125m", "350m", "2.2b", "6b", "175b", "1000b"])
def test_shape_has_the_parameters_that_were_asked_for(size: str) -> None:
    shape = shape_of(parse_size(size))
    found = 12 * shape["layers"] * shape["width"] ** 2
    assert parse_size(size) <= found
    if shape["layers"] > 11:
        assert found < 1.1 * parse_size(size)
    assert shape["width"] == 128 * shape["heads"]


LIMIT = "zero_engine.train.preview.memory_limit_bytes"


def _fresh(folder: Path, size: str, **options: Any) -> RunSettings:
    return fresh_run({"size": size, "output": str(folder / "run"), **options}, Start.NEW)


def test_states_go_to_files_where_memory_does_not_hold_them(tmp_path, monkeypatch):
    settings = _fresh(tmp_path, "60m")
    whole = preview(settings, 1)
    assert whole.settings.states == "memory"
    # bf16 values, the lower halves of masters, moments of 8 bits, gradients
    engine_bytes = whole.rank_bytes - whole.process_bytes
    assert 8.06 <= engine_bytes / whole.plan.num_parameters <= 9
    limit = whole.rank_bytes - 100_000_000
    monkeypatch.setattr(LIMIT, lambda: limit)
    streamed = preview(settings, 1)
    assert streamed.settings.states == "files"
    assert streamed.rank_bytes <= limit
    config = engine_config(streamed.settings)["zero_optimization"]
    assert config["offload_param"]["device"] == config["offload_optimizer"]["device"] == "nvme"
    monkeypatch.setattr(LIMIT, lambda: streamed.rank_bytes - 50_000_000)  # the process varies
    with pytest.raises(ConfigError, match="choose a smaller size, or fewer --ranks"):
        preview(settings, 1)
    monkeypatch.setattr(LIMIT, lambda: None)
    with pytest.raises(ConfigError, match=r"--output .*: states and results take .* free"):
        preview(_fresh(tmp_path, "1000b"), 1)


def test_largest_unit_fits_the_buffers_of_files(tmp_path: Path) -> None:
    settings = _fresh(tmp_path, "1m")
    with torch.device("meta"):
        model = build_model(settings, settings.vocab)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.transformer.h]
    rest = sum(p.numel() for p in model.parameters()) - sum(blocks)
    shape = (settings.width, settings.vocab, settings.context)
    assert largest_unit(*shape) == max(*blocks, rest)
    large = engine_config(_fresh(tmp_path, "6b", states="files"))["zero_optimization"]
    assert large["offload_param"]["buffer_size"] > 100_000_000  # the default


def test_files_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    options = {"states": "files", "export": False}
    alone = preview(_fresh(tmp_path, "60m", **options, save=False), 1)
    # bf16 values twice, the lower halves of masters, moments of 8 bits; then fp32 checkpoints
    assert alone.disk_bytes / alone.plan.num_parameters == pytest.approx(2 + 2 + 2 + 2.06, rel=0.01)
    saved = preview(_fresh(tmp_path, "60m", **options), 1)
    per_param = (saved.disk_bytes - alone.disk_bytes) / saved.plan.num_parameters
    assert per_param == pytest.approx(12, rel=0.01)


def test_plan_is_shown_before_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"size": "1m", "output": str(tmp_path / "run")}
    assert plan_request(options, Start.NEW, 2) == {**options, "states": "memory"}
    shown = capfd.readouterr().out
    assert shown.startswith("plan: 0.00 billion parameters, states in memory, memory per rank:")
    assert "2 ranks take" in shown
    assert plan_request({"output": str(tmp_path)}, Start.NEW, 2) == {"output": str(tmp_path)}
    assert capfd.readouterr().out == ""


def test_run_that_goes_on_keeps_its_size(tmp_path, monkeypatch, capfd):
    options = {"size": "1m", "output": str(tmp_path / "run")}
    settings = fresh_run(options, Start.NEW)
    write_resolved(RunFolder.of(options), settings, config={})
    monkeypatch.setattr(RunFolder, "has_checkpoint", True)
    resumed = {"output": options["output"], "size": None}
    assert plan_request(resumed, Start.RESUME, 1) == options
    assert capfd.readouterr().out == ""


def test_auto_schedule_follows_the_number_of_steps() -> None:
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "cos_min_ratio": 0.1}
    filled = fill_auto({"scheduler": {"type": "WarmupCosineLR", "params": params}}, 400)
    expected = {"warmup_num_steps": 80, "total_num_steps": 400, "cos_min_ratio": 0.1}
    assert filled["scheduler"]["params"] == expected


def test_ranks_of_a_large_model_return_freed_memory() -> None:
    assert rank_environment(2, is_tight=True).items() >= RETURN_MEMORY.items()
    assert not rank_environment(2).keys() & RETURN_MEMORY.keys()


def test_widened_products_are_those_of_fp32_rounded_once() -> None:
    torch.manual_seed(0)
    wide = Conv1D(24, 17).to(torch.bfloat16)
    torch.nn.init.normal_(wide.bias)
    exact = copy.deepcopy(wide).float()
    x = torch.randn(2, 5, 17).to(torch.bfloat16).requires_grad_()
    given = x.detach().float().requires_grad_()
    widen_products(wide)
    found, expected = wide(x), exact(given)
    assert torch.equal(found, expected.to(torch.bfloat16))
    grad = torch.randn(2, 5, 24).to(torch.bfloat16)
    found.backward(grad)
    expected.backward(grad.float())
    for ours, theirs in ((x, given), *zip(wide.parameters(), exact.parameters(), strict=True)):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.to(torch.bfloat16), rtol=0.008, atol=1e-6)


def test_a_run_that_ended_without_a_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    options = {"size": "1m", "output": str(tmp_path / "run"), "save": False}
    folder = RunFolder.of(options)
    settings = fresh_run(options, Start.NEW)
    folder.root.mkdir()
    write_resolved(folder, settings, config={})
    fresh_run(options, Start.NEW)  # it was cut short: there is nothing to keep
    folder.loss_plot.touch()
    with pytest.raises(ConfigError, match="holds a run already"):
        fresh_run(options, Start.NEW)
    fresh_run(options, Start.OVERWRITE)
