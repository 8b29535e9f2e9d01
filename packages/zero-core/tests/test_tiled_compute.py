"""The ``tiled_compute`` block: results like those of untiled modules, in the memory of one tile."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero_core
from zero_core.config import load_config
from zero_core.errors import ConfigError
from zero_core.footprint.activations import trace_step
from zero_core.testing import Case, assert_same, on_ranks, seeded, train
from zero_core.tiled import TiledLogits

VOCAB, WIDTH, TOKENS = 37, 12, 11
TILED = {
    "tile_tokens": 8,  # with two sequences: 4 tokens of each in a tile, and a shorter last tile
    "modules": {"name_suffixes": ["mlp"]},
    "logits": {"names": ["head"]},
}


class _Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])  # like GPT-2's Conv1D
        y = self.down(functional.gelu(self.up(flat * self.gain)))
        return y.view(x.shape)


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = _Mlp(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class _Model(nn.Module):
    """A language model that computes its loss in forward, like transformers' models."""

    def __init__(self, width=WIDTH, vocab=VOCAB):
        super().__init__()
        with seeded(3):
            self.embed = nn.Embedding(vocab, width)
            self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
            self.head = nn.Linear(width, vocab, bias=False)

    def logits(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, ids):
        logits = self.logits(ids)
        labels = functional.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
        flat = logits.float().view(-1, logits.shape[-1])
        return {"loss": functional.cross_entropy(flat, labels.view(-1)), "logits": logits}


def _config(stage, **further):
    return Case(stage, top=further).config()


def _ids(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(VOCAB, (2, TOKENS), generator=generator)


def _train(ranks, config):
    engine = zero_core.build(_Model(), config, process_group=ranks)
    losses = train(engine, [{"ids": _ids(step, ranks.rank)} for step in range(3)])
    return losses, engine.full_state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("further", [{}, {"activation_checkpointing": {}}], ids=["", "recomputed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_training_in_tiles_follows_that_of_whole_modules(ranks, stage, further):
    losses, values = _train(ranks, _config(stage))
    tiled, tiled_values = _train(ranks, _config(stage, tiled_compute=TILED, **further))
    torch.testing.assert_close(tiled, losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(tiled_values, values, rtol=1e-3, atol=1e-5)
    of_stage_0, values_of_stage_0 = _train(ranks, _config(0, tiled_compute=TILED))
    assert tiled == of_stage_0
    assert_same(tiled_values, values_of_stage_0)


CLASS_WEIGHTS = torch.linspace(0.5, 1.5, VOCAB)
OPTIONS = (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"weight": CLASS_WEIGHTS},
    {"label_smoothing": 0.1},
    {"ignore_index": 5},
    {"weight": CLASS_WEIGHTS, "label_smoothing": 0.2, "ignore_index": 5},
)


@pytest.mark.parametrize("has_probabilities", [False, True], ids=["classes", "probabilities"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "default")
def test_every_option_of_cross_entropy_is_kept(options, has_probabilities):
    hidden = torch.randn(22, WIDTH)
    head = nn.Linear(WIDTH, VOCAB)
    target = torch.rand(22, VOCAB) if has_probabilities else torch.randint(VOCAB, (22,))
    if has_probabilities and "ignore_index" in options:
        options = {key: value for key, value in options.items() if key != "ignore_index"}
    whole = functional.cross_entropy(head(hidden), target, **options)
    tiled = functional.cross_entropy(TiledLogits(hidden, head, 8), target, **options)
    assert type(tiled) is Tensor
    torch.testing.assert_close(tiled, whole)


USES = (
    lambda z: z,
    lambda z: z.float(),
    lambda z: z.to(torch.float64),
    lambda z: z.view(2, -1, VOCAB),
    lambda z: z.reshape((22, -1)),
    lambda z: z.flatten(0, 1),
    lambda z: z[..., :-1, :],
    lambda z: z[:, 2:],
    lambda z: z[1],
    lambda z: z[0, -1],
    lambda z: torch.tanh(z / 30.0) * 30.0,
    lambda z: 2.0 * z,
    lambda z: z.contiguous()[:, :-1].reshape(-1, VOCAB).float(),
    lambda z: z[..., 3],
    lambda z: z[z > 0],
    lambda z: z.log_softmax(-1),
    lambda z: z + torch.ones(VOCAB),
    lambda z: torch.cat([z, z]),
    lambda z: z.detach(),
)


@pytest.mark.parametrize("number", range(len(USES)))
def test_any_use_of_the_logits_finds_their_values(number):
    use = USES[number]
    head = nn.Linear(WIDTH, VOCAB)
    hidden = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    whole = use(head(hidden))
    tiled = use(TiledLogits(hidden, head, 8))
    assert tiled.shape == whole.shape
    assert tiled.dtype == whole.dtype
    assert tiled.requires_grad == whole.requires_grad
    torch.testing.assert_close(tiled + 0, whole)
    if whole.requires_grad:
        (wanted,) = torch.autograd.grad(whole.square().mean(), hidden)
        (found,) = torch.autograd.grad((tiled * tiled).mean(), hidden)
        torch.testing.assert_close(found, wanted)


def test_what_is_saved_at_32_thousand_tokens_is_an_eighth():
    with torch.device("meta"):
        model = _Model(width=256, vocab=8192)
    inputs = [torch.zeros((1, 2**15), dtype=torch.int64)]
    names = {"modules": {"classes": ["_Mlp"]}, "logits": {"names": ["head"]}}
    plain, tiled = (
        trace_step(model, load_config(_config(3, **block), world_size=1), inputs, [model])
        for block in ({}, {"tiled_compute": names})
    )
    assert tiled.saved_bytes <= plain.saved_bytes / 8


@pytest.mark.parametrize("modules", [["_Mlp"], ["_Block"]])
def test_engine_that_has_ended_leaves_the_modules_as_they_were(modules):
    block = {**TILED, "modules": {"classes": modules}}
    config = _config(3, tiled_compute=block, activation_checkpointing={})
    engine = zero_core.build(_Model(), config)
    assert isinstance(engine(_ids(0, 0))["logits"], TiledLogits)
    with engine.gathered():
        copied = copy.deepcopy(engine.module)
    for plain in (copied, engine.unwrap()):
        assert all("forward" not in vars(module) for module in plain.modules())
        assert type(plain(_ids(0, 0))["logits"]) is Tensor


@on_ranks(2)
def test_logits_are_read_on_one_rank_without_gradients_and_refused_by_name_too_late(ranks):
    engine = zero_core.build(_Model(), _config(3, tiled_compute=TILED), process_group=ranks)
    expected = _Model()(_ids(0, 0))
    with torch.no_grad():
        found = engine(_ids(0, 0))
    if ranks.rank == 0:  # one rank may read the output, because a read gathers nothing
        torch.testing.assert_close(found["logits"], expected["logits"])
        torch.testing.assert_close(found["loss"], expected["loss"])
    found = engine(_ids(0, ranks.rank))
    engine.backward(found["loss"])
    for end in (lambda: None, engine.step):
        end()
        with pytest.raises(RuntimeError, match=r"'head' were read after their backward or a step"):
            found["logits"].argmax(-1)


def test_other_terms_of_the_loss_keep_their_gradient_after_a_look_without_gradients():
    hidden = torch.randn(22, WIDTH, requires_grad=True)
    head, target = nn.Linear(WIDTH, VOCAB), torch.randint(VOCAB, (22,))

    def gradient(logits):
        with torch.no_grad():
            assert (logits.argmax(-1) == target).sum() < 22
        loss = functional.cross_entropy(logits, target) + logits.logsumexp(-1).square().mean()
        (grad,) = torch.autograd.grad(loss, hidden)
        return grad

    torch.testing.assert_close(gradient(TiledLogits(hidden, head, 8)), gradient(head(hidden)))


CHANGES = (
    lambda z: z.div_(2.0),
    lambda z: z.__setitem__((slice(None), 3), -1e9),
    lambda z: z.__imul__(2.0),
    lambda z: torch.mul(torch.ones(()), 2.0, out=z),
    lambda z: z.retain_grad(),
    lambda z: z.register_hook(print),
    lambda z: functional.relu(z, inplace=True),
)


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_changes_in_place_are_refused(number):
    logits = TiledLogits(torch.randn(22, WIDTH), nn.Linear(WIDTH, VOCAB), 8)
    with pytest.raises(RuntimeError, match=r"leave the head out of tiled_compute\.logits"):
        CHANGES[number](logits)


def test_what_torch_refuses_is_refused_by_torch():
    logits = TiledLogits(torch.randn(22, WIDTH), nn.Linear(WIDTH, VOCAB), 8)
    with pytest.raises(ValueError, match="bogus is not a valid value for reduction"):
        functional.cross_entropy(logits, torch.zeros(22, dtype=torch.int64), reduction="bogus")
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits, torch.zeros(21, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_within_and_after_the_forward_has_its_autocast(dtype):
    model = _Model()
    target = torch.zeros(2 * TOKENS, dtype=torch.int64)
    with torch.autocast("cpu", dtype=dtype):
        whole = model(_ids(0, 0))
        engine = zero_core.build(model, _config(1, tiled_compute=TILED))
        found = engine(_ids(0, 0))
    torch.testing.assert_close(found["loss"], whole["loss"], rtol=1e-5, atol=0.0)
    assert found["logits"].dtype is dtype
    late, expected = (
        functional.cross_entropy(own["logits"].view(-1, VOCAB), target) for own in (found, whole)
    )
    torch.testing.assert_close(late, expected, rtol=1e-2, atol=0.0)


def test_a_head_that_is_called_by_keyword_is_tiled():
    model = _Model()
    head = model.head
    engine = zero_core.build(model, _config(1, tiled_compute=TILED))
    x = torch.randn(2, TOKENS, WIDTH)
    found = head(input=x)
    assert isinstance(found, TiledLogits)
    assert torch.equal(found + 0, functional.linear(x, head.weight))
    engine.close()


def test_many_tokens_of_fp16_have_a_finite_mean():
    hidden = torch.zeros(20_000, 4, dtype=torch.float16)
    head = nn.Linear(4, 50, bias=False).half()
    loss = functional.cross_entropy(
        TiledLogits(hidden, head, 4096), torch.zeros(20_000, dtype=torch.int64)
    )
    assert loss.item() == pytest.approx(3.912, abs=1e-2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"modules": {"names": ["mlps"]}}, "modules names what the model lacks: mlps"),
        ({"logits": {"classes": ["Head"]}}, "logits names what the model lacks: Head"),
        ({"tile_tokens": 0}, "tiled_compute.tile_tokens"),
        ({"mlp": {}}, "tiled_compute.mlp"),
    ],
)
def test_wrong_names_are_errors(block, message):
    model = _Model()
    block = {"modules": {"names": ["blocks.0.mlp"]}, **block}
    with pytest.raises(ConfigError, match=message):
        zero_core.build(model, _config(3, tiled_compute=block))
    assert all("forward" not in vars(module) for module in model.modules())
    zero_core.build(model, _config(3, tiled_compute=TILED))


class _Mixing(nn.Module):
    def forward(self, x, *, mask=None):
        return x.sum(-2)


@pytest.mark.parametrize("has_mask", [False, True])
def test_module_that_cannot_be_tiled_is_named(has_mask):
    model = nn.Sequential(_Mixing(), nn.Linear(4, 4))
    block = {"tile_tokens": 2, "modules": {"names": ["0"]}}
    engine = zero_core.build(model, _config(1, tiled_compute=block))
    mask = {"mask": torch.ones(3)} if has_mask else {}
    with pytest.raises(ConfigError, match=r"tiled_compute.modules: '0' \(_Mixing\)"):
        model[0](torch.randn(2, 5, 4), **mask)
    engine.close()
