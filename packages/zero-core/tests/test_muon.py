"""The optimizer named Muon, compared with torch's Muon and AdamW under DDP."""

import pytest
import torch
from torch import nn

import zero_core
from zero_core import ConfigError
from zero_core.optim.muon import Muon, split_groups, tag_matrices
from zero_core.testing import Case, SimulatedDDP, batch, make_model, on_ranks, seeded, train
from zero_core.testing.training import assert_same, train_steps

STEPS = 4
OPTIONS = {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9}
MUON = {"type": "Muon", "params": {**OPTIONS, "betas": [0.9, 0.99], "eps": 1e-8}}


def halves(model):
    tag_matrices(model.named_parameters())
    params = [p for p in model.parameters() if p.requires_grad]
    return ([p for p in params if p.use_muon == flag] for flag in (True, False))


def train_whole(ranks):
    model = make_model()
    matrices, rest = halves(model)
    adamw = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "fused": True}
    optimizers = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9),
        torch.optim.AdamW(rest, **adamw),
    )
    wrapped = SimulatedDDP(model, ranks)
    for step in range(STEPS):
        wrapped(**batch(step, 0, ranks.rank))["loss"].backward()
        wrapped.average_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def build(ranks=None, stage=0, model=None, **further):
    return Case(stage, top={"optimizer": MUON}).build(ranks, model, **further)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (1, 5)])
def test_alone_it_is_torchs_muon_bit_by_bit(shape, adjust_lr_fn):
    torch.manual_seed(0)
    mine = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(mine.detach().clone())
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr_fn}
    both = Muon([mine], **options), torch.optim.Muon([theirs], **options)
    for _ in range(5):
        grad = torch.randn(shape)
        for param, optimizer in zip((mine, theirs), both, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert torch.equal(mine, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_update_is_that_of_torchs_muon_and_adamw_at_every_stage(ranks, stage):
    expected = train_whole(ranks)
    engine = build(ranks, stage)
    train_steps(engine, 0, STEPS)
    found = engine.full_state_dict(dtype=torch.float32)
    start = make_model().state_dict()
    assert_same({name: found[name] for name in expected}, expected)
    moved = {name for name in expected if not torch.allclose(found[name], start[name], atol=1e-3)}
    assert sum(start[name].ndim == 2 for name in moved) > 3
    sent = [row for row in engine.comm_report() if row.content == "whole parameters"]
    assert bool(sent) == (stage > 0 and ranks.size > 1)


class WithoutSlices(Muon):
    def is_elementwise_group(self, group):
        return False


WithoutSlices.__name__ = "Muon"  # checkpoints store the class name


@on_ranks(2)
def test_states_of_an_optimizer_that_declares_otherwise_are_refused(ranks, tmp_path):
    def made(kind):
        model = make_model()
        matrices, rest = halves(model)
        groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        return build(ranks, 3, model, optimizer=kind(groups))

    for kind, other, how in ((WithoutSlices, Muon, "whole"), (Muon, WithoutSlices, "in slices")):
        engine = made(kind)
        train_steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path / how)
        with pytest.raises(zero_core.CheckpointError, match=f"was saved {how}, and this engine"):
            made(other).load_checkpoint(tmp_path / how)


class Branches(nn.Module):
    """A model so small that rank 0's shards are its matrices, and rank 1's its biases."""

    def __init__(self):
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x, num_blocks):
        for block in self.blocks[:num_blocks]:
            x = block(x)
        return x.square().sum()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_matrix_without_a_gradient_is_left_alone_by_ranks_that_hold_little_else(ranks, stage):
    engine = build(ranks, stage, Branches())
    train(engine, [(torch.ones(1, 5), 2)])
    before = engine.full_state_dict()
    train(engine, [(torch.ones(1, 5), 1)])
    after = engine.full_state_dict()
    assert torch.equal(after["blocks.1.weight"], before["blocks.1.weight"])
    assert not torch.equal(after["blocks.0.weight"], before["blocks.0.weight"])


@pytest.mark.parametrize(
    ("optimizer", "more", "match"),
    [
        (MUON, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio = 0.5 with .*Muon"),
        ({"type": "Muon", "params": {"rate": 1}}, {}, "rate: unknown key; Muon takes"),
        ({"type": "Muon", "params": {"ns_method": "gram"}}, {}, "only 'standard'"),
        ({"type": "Muon", "params": {"per_head_muon": True}}, {}, "per_head_muon = True"),
        ({"type": "Muon", "params": {"lr": -1}}, {}, "params.lr: Input should be greater"),
        ({"type": "Lamb"}, {}, r"known: (?!.*muon.*muon).*muon.* pass build\(\) an object"),
    ],
)
def test_what_cannot_be_served_is_refused(optimizer, more, match):
    config = {"train_batch_size": 1, "optimizer": optimizer}
    with pytest.raises(ConfigError, match=match):
        zero_core.build(nn.Linear(3, 2), {**config, "zero_optimization": {"stage": 1, **more}})


def test_parameters_that_do_not_say_what_they_are_or_are_no_matrices_are_refused():
    model = nn.Conv1d(2, 2, 3)
    model.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"of shape .* in a group with use_muon, and is no matri"):
        build(model=model)
    with pytest.raises(ValueError, match=r"shapes \[\(2, 3\)\] do not say"):
        split_groups([nn.Parameter(torch.ones(2, 3))], {})


def test_groups_are_split_and_keep_what_they_set():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    tag_matrices(model.named_parameters())
    weights, biases = [m.weight for m in model], [m.bias for m in model]
    first, second = [weights[0], biases[0]], [weights[1], biases[1]]
    given = [{"params": first, "lr": 0.5}, {"params": second, "weight_decay": 0.0}]
    found = split_groups(given, {"lr": 0.1, "adam_lr": 0.2, "weight_decay": 0.3})
    kept = [(g["use_muon"], g["lr"], g["weight_decay"], len(g["params"])) for g in found]
    assert kept == [
        (True, 0.5, 0.3, 1),
        (False, 0.5, 0.3, 1),
        (True, 0.1, 0, 1),
        (False, 0.2, 0, 1),
    ]


def test_embeddings_and_heads_are_no_matrices_unless_they_say_so():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(3, 2), "lm_head": nn.Linear(2, 3), "up": nn.Linear(2, 2)}
    )
    model["lm_head"].weight.use_muon = True
    tag_matrices(model.named_parameters())
    assert {n for n, p in model.named_parameters() if p.use_muon} == {"lm_head.weight", "up.weight"}
