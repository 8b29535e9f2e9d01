"""`OffloadedOptimizer` in plain torch loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from support.models import groups_of, loop, make_model, weights
from support.tiers import BF16, RATIOS
from torch import Tensor, nn, optim

from zero_offload import OffloadedOptimizer

CLASSES = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"lr": 1e-2}),
    (optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 1e-3}),
    (optim.Adadelta, {"lr": 1.0}),
    (optim.NAdam, {"lr": 1e-2}),
    (optim.RAdam, {"lr": 1e-2}),
    (optim.Adamax, {"lr": 1e-2}),
]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("cls", "settings"), CLASSES)
def test_fp32_loop_equals_torch_bit_for_bit(
    cls: type[optim.Optimizer], settings: dict[str, Any], ratio: float
) -> None:
    plain, ours = make_model(), make_model()
    expected = loop(plain, cls(groups_of(plain), **settings))
    assert loop(ours, OffloadedOptimizer(cls, groups_of(ours), ratio=ratio, **settings)) == expected
    assert torch.equal(weights(ours), weights(plain))


def test_state_dict_survives_a_weights_only_file(tmp_path: Any) -> None:
    model, other = make_model(), make_model()
    optimizer = OffloadedOptimizer(optim.AdamW, model.named_parameters(), lr=1e-2)
    loop(model, optimizer)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    torch.save(saved, tmp_path / "state.pt")
    target = OffloadedOptimizer(optim.AdamW, other.named_parameters(), lr=1e-2, ratio=0.5)
    target.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(weights(other), weights(model))  # loading master weights sets the parameters
    entry = target.state_dict()["state"][0]
    assert entry["num_steps"] == 5
    assert entry["exp_avg"].shape == next(iter(model.parameters())).shape


@pytest.mark.parametrize("way", ["itself", "full by DCP", "as DCP unflattens"])
@pytest.mark.parametrize(("cls", "settings"), CLASSES)
def test_a_plain_torch_state_dict_loads(
    cls: type[optim.Optimizer], settings: dict[str, Any], way: str
) -> None:
    plain, ours = make_model(), make_model()
    source = cls(groups_of(plain), **settings)
    loop(plain, source, steps=range(3))
    ours.load_state_dict(plain.state_dict())
    target = OffloadedOptimizer(cls, groups_of(ours), ratio=0.5, **settings)
    if way == "full by DCP":
        optim.lr_scheduler.StepLR(target, step_size=2)  # adds initial_lr, as in the source
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = dcp.get_optimizer_state_dict(plain, source, options=options)
        dcp.set_optimizer_state_dict(ours, target, copy.deepcopy(found), options=options)
    else:
        saved = copy.deepcopy(source.state_dict())
        for entry in saved["state"].values():
            if way == "as DCP unflattens":  # a missing state is an empty dictionary
                entry.update(master_weight={}, num_steps={})
        target.load_state_dict(saved)
    for entry in target.state_dict()["state"].values():
        assert entry["num_steps"] == entry.get("step", 1)
    assert loop(plain, source, steps=range(3, 6)) == loop(ours, target, steps=range(3, 6))


def test_load_hooks_give_the_state_and_see_it_loaded() -> None:
    model, seen = make_model(), []
    optimizer = OffloadedOptimizer(optim.AdamW, model.parameters(), lr=1e-2)
    loop(model, optimizer)

    def doubled(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        state = {k: {**v, "exp_avg": 2 * v["exp_avg"]} for k, v in saved["state"].items()}
        return {**saved, "state": state}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda found: seen.append(found.state_dict()))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0]["state"][0]["exp_avg"], 2 * saved["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    ("fault", "match"),
    [("shape", "99"), ("groups", "betas"), ("states", "square_avg"), ("scalars", "mu_product")],
)
def test_a_refused_state_dict_changes_nothing(fault: str, match: str) -> None:
    model = make_model()
    optimizer = OffloadedOptimizer(optim.AdamW, model.parameters(), lr=1e-2)
    loop(model, optimizer)
    before, saved = optimizer.state_dict(), optimizer.state_dict()
    saved["state"][0]["master_weight"] = torch.zeros_like(saved["state"][0]["master_weight"])
    name, value = {"shape": "exp_avg"}.get(fault, match), torch.zeros(99)
    saved["state"][len(saved["state"]) - 1][name] = 1.0 if fault == "scalars" else value
    if fault == "groups":
        saved = optim.SGD(model.parameters(), lr=5).state_dict()
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["master_weight"], before["state"][0]["master_weight"])


def test_memory_formats_scalars_and_empty_parameters_are_served() -> None:
    def params() -> list[nn.Parameter]:
        torch.manual_seed(0)
        image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        return [
            nn.Parameter(image),
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.empty(0)),
            nn.Parameter(torch.randn(6, 4).t()),
            nn.Parameter(torch.randn(1)),
        ]

    plain, ours = params(), params()
    optimizers = (
        optim.Adam(plain, lr=0.1),
        OffloadedOptimizer(optim.Adam, ours, lr=0.1, ratio=0.37),
    )
    for step in range(3):
        for members, optimizer in zip((plain, ours), optimizers, strict=True):
            for i, p in enumerate(members):
                generator = torch.Generator().manual_seed(10 * step + i)
                # The gradient is contiguous, and the parameter may be transposed.
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(p, q)
    expected, state = optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"]
    for i in (0, 1, 3, 4):
        assert torch.equal(state[i]["exp_avg"], expected[i]["exp_avg"])
    again = OffloadedOptimizer(optim.Adam, params(), lr=0.1, ratio=0.9)
    again.load_state_dict(optimizers[1].state_dict())
    for i, entry in again.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg_sq"], state[i]["exp_avg_sq"])


def test_closure_is_run_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = OffloadedOptimizer(optim.SGD, [weight], lr=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.equal(weight.detach(), torch.zeros(3))


@pytest.mark.parametrize("ratio", RATIOS)
def test_weights_that_others_write_are_followed(ratio: float) -> None:
    """Weights are clamped after each step. The next step must start from the clamped weights."""

    def train(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
        for step in range(4):
            loop(model, optimizer, steps=range(step, step + 1))
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)
        return weights(model)

    plain, ours = make_model(), make_model()
    expected = train(plain, optim.AdamW(groups_of(plain), lr=1e-2))
    optimizer = OffloadedOptimizer(optim.AdamW, groups_of(ours), lr=1e-2, ratio=ratio)
    assert torch.equal(train(ours, optimizer), expected)
    with torch.no_grad():
        ours.get_parameter("0.weight").fill_(0.25)
    assert (optimizer.state_dict()["state"][0]["master_weight"] == 0.25).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_masters_keep_their_bits_where_weights_are_written_as_they_were(ratio: float) -> None:
    model = make_model(BF16)
    optimizer = OffloadedOptimizer(optim.AdamW, model.parameters(), lr=1e-5, ratio=ratio)
    loop(model, optimizer)
    before = optimizer.state_dict()["state"]
    with torch.no_grad():
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        model.get_parameter("0.weight")[0, 0] = 0.5
    after = optimizer.state_dict()["state"]
    changed = before[0]["master_weight"].clone()
    changed[0, 0] = 0.5
    assert torch.equal(after[0]["master_weight"], changed)
    for i in range(1, len(before)):
        assert torch.equal(after[i]["master_weight"], before[i]["master_weight"])


def test_misuse_is_refused_with_the_reason() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = OffloadedOptimizer(optim.SGD, [weight], lr=0.1)
    with pytest.raises(ValueError, match="cannot grow"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    weight.data = torch.ones(4)
    weight.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="other memory"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(4))]
    with pytest.raises(RuntimeError, match="other parameters than at construction"):
        optimizer.step()
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        OffloadedOptimizer(optim.SGD, [weight, weight], lr=0.1)
    with pytest.raises(ValueError, match="without gaps"):
        OffloadedOptimizer(optim.SGD, [nn.Parameter(torch.ones(4, 4)[:, :2])], lr=0.1)
    mixed = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))]
    with pytest.raises(ValueError, match="one device"):
        OffloadedOptimizer(optim.SGD, mixed, lr=0.1)
    with pytest.raises(TypeError, match=r"a class, then params: OffloadedOptimizer\(SGD"):
        OffloadedOptimizer(optim.SGD([weight]))  # type: ignore[arg-type]
    shown = repr(OffloadedOptimizer(optim.SGD, [nn.Parameter(torch.ones(4))], ratio=0.5))
    assert shown.startswith("OffloadedOptimizer (")
    assert shown.endswith("): 2 of 4 elements, 8 bytes on the host")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        OffloadedOptimizer(optim.SGD, [nn.Parameter(torch.ones(1))], lr=-1.0)


def _train_with_scaler(
    model: nn.Module, optimizer: optim.Optimizer, *, max_norm: float = 0.0
) -> None:
    """Train for five steps, of which the third overflows and halves the loss scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scales = []
    for step in range(5):
        data = torch.randn(11, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(data.to(next(model.parameters()).dtype)).float().square().mean()
        factor = torch.inf if step == 2 else 1.0
        scaler.scale(loss * factor).backward()
        if max_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4096.0, 4096.0, 2048.0, 2048.0, 2048.0]


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_fp32_loop_with_a_scaler_equals_torch_bit_for_bit(ratio: float, max_norm: float) -> None:
    plain, ours = make_model(), make_model()
    _train_with_scaler(plain, optim.AdamW(plain.parameters(), lr=1e-2), max_norm=max_norm)
    optimizer = OffloadedOptimizer(optim.AdamW, ours.parameters(), lr=1e-2, ratio=ratio)
    _train_with_scaler(ours, optimizer, max_norm=max_norm)
    assert torch.equal(weights(ours), weights(plain))
    assert optimizer.state_dict()["state"][0]["num_steps"] == 4
