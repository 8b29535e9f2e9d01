"""Plug-ins for ``zero_core.collectives``, and the notifications that the engine sends them."""

from collections.abc import Collection

import pytest
import torch

import zero_core
from zero_core import CollectiveError, ConfigError, MissingPartError
from zero_core.core import access
from zero_core.protocols import EXACT_PARAMETERS
from zero_core.testing import Case, assert_same, make_model, on_ranks, simulate, train_steps

CONFIG = Case(3).config()


class _Part:
    private_nbytes = {"secondary shards": 4711}  # noqa: RUF012

    def __init__(self, native):
        self.native = native
        self.num_forgotten = 0
        self.failure = None
        self.lost = []
        self.versions = set()

    def all_gather(self, out, shard, *, version, **further):
        def job():
            if self.failure is not None:
                self.lost.append(out)
                raise self.failure
            assert out.data_ptr() not in map(torch.Tensor.data_ptr, self.lost), "late bytes"
            self.native.all_gather(out, shard, version=version, **further).wait()

        self.versions.add(version)
        return self.native.launch(job, is_reduction=False)

    def reduce_scatter(self, out, full, *, unit):
        def job():
            self.native.reduce_scatter(out, full.clone(), unit=unit).wait()

        return self.native.launch(job, is_reduction=True)

    def forget_values(self):
        self.num_forgotten += 1

    def forget_errors(self):
        pass

    def begin_step(self, number):
        pass


def _build(ranks, **further):
    told = {}

    def factory(native, **given):
        told.update(given, part=_Part(native))
        return told["part"]

    engine = zero_core.build(
        make_model(), CONFIG, collectives=factory, process_group=ranks, **further
    )
    return engine, told["part"], told


@on_ranks(2)
def test_a_gather_that_fails_is_named_and_leaves_no_values_behind(ranks):
    engine, part, _ = _build(ranks)
    plain = zero_core.build(make_model(), CONFIG, process_group=ranks)
    part.failure = RuntimeError("Connection closed by peer")
    for _ in range(2):
        named = rf"rank {ranks.rank}: all_gather of unit 0 .root. failed .*Connection closed"
        with pytest.raises(CollectiveError, match=named):
            train_steps(engine, 0, 1)
        assert all(map(access.is_refused, engine.module.parameters()))
    with pytest.raises(CollectiveError, match="Connection closed"), engine.gathered():
        pass
    assert part.lost
    part.failure = None
    for each in (engine, plain):
        train_steps(each, 0, 1)
    part.versions.clear()
    with engine.gathered(), plain.gathered():
        assert part.versions == {EXACT_PARAMETERS}
        assert_same(engine.module.state_dict(), plain.module.state_dict())


@on_ranks(4, ranks_per_node=2)
def test_a_part_is_told_the_nodes_and_what_is_frozen_and_may_use_the_lanes(ranks):
    engine, part, told = _build(ranks)
    assert (told["rank"], told["world_size"], told["ranks_per_node"]) == (ranks.rank, 4, 2)
    frozen = [s.index for s in engine.layout.segments if not s.is_trainable]
    assert isinstance(told["frozen"], Collection)
    assert sorted(told["frozen"]) == frozen != []
    assert told["config"]["stage"] == 3
    assert engine.memory_report()["secondary shards"] == 4711
    # Training with jobs on both queues is bit-identical to training without a plug-in.
    plain = zero_core.build(make_model(), CONFIG, process_group=ranks)
    for each in (engine, plain):
        train_steps(each, 0, 4)
    assert part.num_forgotten == 0
    assert_same(engine.full_state_dict(), plain.full_state_dict())
    assert engine.comm_report() == plain.comm_report()


@on_ranks(2)
def test_a_part_forgets_what_it_keeps_whenever_values_are_replaced_or_saved(ranks, tmp_path):
    engine, part, _ = _build(ranks)
    name, values = "blocks.0.norm.weight", torch.full((11,), 3.0)

    def read():
        with engine.gathered():
            pass

    def edit():
        with engine.gathered(modifier_rank=1) as module, torch.no_grad():
            module.blocks[0].norm.weight.fill_(2.0)

    for use, count in (
        (lambda: train_steps(engine, 0, 1), 0),
        (lambda: engine.states.get_full(name), 0),
        (lambda: engine.save_checkpoint(tmp_path), 1),
        (lambda: engine.load_checkpoint(tmp_path), 1),
        (edit, 1),
        (read, 0),
        (lambda: engine.states.set_full(name, values), 1),
        (lambda: engine.states.set_full("frozen.0.norm.weight", values), 1),
        (lambda: engine.states.set_full(name, values, "exp_avg"), 0),  # writes no parameter
        (lambda: engine.export_safetensors(tmp_path / "export"), 0),
    ):
        part.num_forgotten = 0
        use()
        assert part.num_forgotten == count
    engine, part, _ = _build(ranks, pretrained=tmp_path / "export")
    train_steps(engine, 1, 2)
    assert part.num_forgotten == 1


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "zero_quantized_weights": True},
        {"stage": 3, "zero_quantized_nontrainable_weights": True},
        {"stage": 1, "zero_quantized_gradients": True},
        {"stage": 3, "zero_hpz_partition_size": 2},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ],
    ids=lambda zero: list(zero)[1],
)
def test_each_key_that_needs_a_package_is_named_where_it_is_missing(zero, monkeypatch):
    def build(ranks):
        zero_core.build(make_model(), {**CONFIG, "zero_optimization": zero}, process_group=ranks)

    monkeypatch.setattr("zero_core.parts.entry_points", lambda **kwargs: ())
    monkeypatch.setattr("zero_core.parts.FOUND", {})
    key = list(zero)[1]
    package = "zero-offload" if "offload" in key else "zero-comm"
    with pytest.raises(MissingPartError, match=rf"zero_optimization\.{key}.*packages/{package} "):
        simulate(build, 2)


def test_what_a_part_refuses_is_an_error_of_the_configuration():
    def factory(native, **given):
        raise ValueError("zero_optimization.zero_quantized_weights_format: no such format")

    with pytest.raises(ConfigError, match="no such format"):
        zero_core.build(make_model(), CONFIG, collectives=factory)


def test_collectives_are_refused_when_they_keep_values_and_not_all_of_the_protocol():
    def half_stateful(native, **given):
        native.forget_values = lambda: None
        return native

    with pytest.raises(ConfigError, match="have forget_values alone"):
        zero_core.build(make_model(), CONFIG, collectives=half_stateful)
