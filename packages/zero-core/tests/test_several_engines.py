"""Several engines in one process, and the lookup of a parameter's engine."""

import gc
import weakref

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing.models import batch, make_model
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.simulated import on_ranks, simulate
from zero_core.testing.training import adamw, assert_same, train_steps

STEPS = 5


def model(factor):
    made = make_model()
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(factor)
    return made


class Plain:
    def __init__(self, module, ranks, *, is_training=True):
        self.module, self._ranks = module, ranks
        self._ddp = SimulatedDDP(module, ranks)
        if is_training:
            self._optimizer = adamw(module)
        else:
            module.requires_grad_(False)

    def __call__(self, **inputs):
        return self._ddp(**inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self._ddp.average_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def full_state_dict(self):
        return self.module.state_dict()


def engine(stage):
    return lambda module, ranks, **how: Case(stage).build(ranks, module, **how)


def divergence(of, to):
    return nn.functional.kl_div(of.log_softmax(-1), to.softmax(-1), reduction="batchmean")


def reinforce(ranks, policy_of, critic_of, frozen_of, sleeps):
    policy, critic = policy_of(model(1.0), ranks), critic_of(model(0.9), ranks)
    reference = frozen_of(model(1.1), ranks, is_training=False)
    reward = frozen_of(model(1.2), ranks, is_training=False)
    everyone = (policy, critic, reference, reward)
    losses = []
    for step in range(STEPS):
        inputs = batch(step, 0, ranks.rank)
        if not step % 2:  # a backward through two engines needs the same branches on all ranks
            inputs["use_side"] = True
        if sleeps:  # as if another program used the devices meanwhile
            for one in everyone:
                one.offload_states()
            for one in reversed(everyone):
                one.reload_states()
        with torch.no_grad():
            anchor = reference(**inputs)["logits"]
            advantage = reward(**inputs)["logits"].mean() - critic(**inputs)["logits"].mean()
        of_policy = divergence(policy(**inputs)["logits"], anchor) - advantage * 0.1
        if step % 2:
            policy.backward(of_policy)
            policy.step()
        of_critic = (critic(**inputs)["logits"].mean() - advantage).square()
        loss = of_critic if step % 2 else of_policy + of_critic
        critic.backward(loss)
        if not step % 2:
            policy.step()
        critic.step()
        losses.append(loss.item() + of_policy.item())
    return losses, {str(i): one.full_state_dict() for i, one in enumerate(everyone)}


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_policy_critic_reference_and_reward_train_as_under_ddp(world_size):
    expected = simulate(reinforce, world_size, Plain, Plain, Plain, False)
    for policy, critic, sleeps in ((3, 2, True), (1, 0, False)):
        makers = engine(policy), engine(critic), engine(3)
        assert_same(simulate(reinforce, world_size, *makers, sleeps), expected)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_the_engine_of_a_parameter_is_found(ranks, stage):
    engine = Case(stage).build(ranks)
    other = Case(stage).build(ranks)
    for built in (engine, other):
        for name, param in built.module.named_parameters():
            assert zero_core.engine_of(param) is built
            assert built.owns(param) == name
    train_steps(engine, 0, 1)
    assert zero_core.engine_of(engine.module.embed.weight) is engine
    assert engine.owns(other.module.embed.weight) is None
    assert engine.owns(engine.module.head.weight) == "embed.weight"


def test_a_model_has_one_engine_at_a_time():
    model = make_model()
    first = Case().build(model=model)
    text = r"engine_of\(model\.get_parameter\('gain'\)\).*by its unwrap\(\), on every rank"
    with pytest.raises(zero_core.ConfigError, match=text):
        Case().build(model=model)
    first.close()
    assert zero_core.engine_of(model.gain) is None
    second = Case().build(model=model)
    assert zero_core.engine_of(model.gain) is second
    assert first.owns(model.gain) is None
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None
