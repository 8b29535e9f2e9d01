"""New parameters that go up to an accelerator as lossless differences: the bits of whole ones.

The accelerator is made of threads, with random delays. The oracle is the same run on the CPU, where
nothing is sent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cpu_adam
import zero_core
from zero_core.errors import ConfigError
from zero_core.testing import Case, batch, late_device, make_model, run_alone, simulate
from zero_offload import create_tier

STEPS = 4
WIDTH = 200
"""Of the model: its shards on three ranks are long enough for differences."""


def _case(dtype: str = "bf16", clipping: float = 0.5, top: Any = None, **keys: Any) -> Case:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    block = {"device": "cpu", "lossless_upload": True, **keys.pop("offload", {})}
    return Case(
        dtype=dtype,
        zero={"offload_optimizer": block},
        clipping=clipping,
        top={"optimizer": optimizer, **(top or {})},
        width=WIDTH,
        **keys,
    )


LOW_SCALE = {"fp16": {"enabled": True, "initial_scale_power": 4}}
IN_BACKWARD = {"check_grad_overflow": False}
CASES = [
    _case(stage=1),
    _case("fp16", stage=2, accumulation=2, top=LOW_SCALE),
    _case("fp32", stage=3),
    _case(stage=3, clipping=0.0, top=IN_BACKWARD),
    _case(stage=2, offload={"state_dtype": "int8"}),
    _case(stage=2, clipping=8.0, offload={"update_in_backward": True}),
]


def _train(ranks: Any, case: Case) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the values, and the bytes that went up in each step."""
    made: list[Any] = []

    def keep_tier(**keys: Any) -> Any:
        made.append(create_tier(**{**keys, "adam_kernel": cpu_adam}))
        return made[-1]

    engine = zero_core.build(
        make_model(case.width), case.config(), process_group=ranks, state_tier=keep_tier
    )
    sent = []
    for step in range(STEPS):
        before = made[0].bytes_h2d
        for micro in range(case.accumulation):
            inputs = batch(step, micro, ranks.rank)
            loss = engine(**{**inputs, "ids": inputs["ids"].to(ranks.device)})["loss"]
            engine.backward(loss)
            engine.step()
        engine.full_state_dict()
        sent.append(made[0].bytes_h2d - before)
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return values, sent


def _run(world_size: int, number: int) -> None:
    late_device.load()
    case = CASES[number]
    expected = simulate(_train, world_size, case)
    late_device.set_delays(seed=number, kernel_s=1e-5, copy_s=1e-3)
    found = simulate(_train, world_size, case, device="late")
    for (values, sent), (exact, whole) in zip(found, expected, strict=True):
        torch.testing.assert_close(values, exact, rtol=0.0, atol=0.0)
        assert 0 < sum(sent[1:]) < 0.75 * sum(whole[1:]), (sent, whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_lossless_uploads_have_the_bits_of_the_cpu_and_send_less(
    world_size: int, number: int
) -> None:
    run_alone(_run, world_size, number)


def test_a_run_is_built_with_the_installed_codec_and_says_that_a_cpu_sends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = zero_core.build(make_model(11), _case(stage=2).config())
    engine.close()
    assert "lossless_upload has no effect: the model is computed on the CPU" in caplog.text


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    config = _case(stage=0, top={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}).config()
    with pytest.raises(ConfigError, match=r"lossless_upload = True with .*Muon is not served"):
        zero_core.build(make_model(11), config)


def test_a_plan_expects_fewer_bytes_up_at_a_lower_learning_rate() -> None:
    with torch.device("meta"):
        model = make_model(WIDTH)
    up = []
    for rate in (1e-3, 1e-5, 1e-6):
        case = _case(stage=2, top={"optimizer": {"type": "AdamW", "params": {"lr": rate}}})
        plan = zero_core.plan(model, case.config(), 2)
        up.append(sum(t.host_link_bytes for t in plan.traffic if t.collective == "to_device"))
        kept = plan.memory.host["published weights"]
    case = Case(dtype="bf16", stage=2, zero={"offload_optimizer": {"device": "cpu"}}, width=WIDTH)
    plan = zero_core.plan(model, case.config(), 2)
    whole = sum(t.host_link_bytes for t in plan.traffic if t.collective == "to_device")
    assert whole / 8 > up[2]
    assert whole / 2 > up[0] > up[1] > up[2]
    assert 0.95 * whole < kept <= whole  # two bytes of each weight, but for short shards
