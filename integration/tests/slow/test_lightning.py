"""ZeRO as a Lightning strategy, compared with Lightning's DDP strategy."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple
from unittest import TestCase
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_core
from tests.support.script_server import run_script
from zero_core.checkpoint.files import Reader
from zero_core.testing import spawn
from zero_engine.lightning import ZeroStrategy
from zero_engine.lightning.strategy import renamed_for

WIDTH, NUM_SAMPLES, BATCH = 13, 20, 2  # on two ranks: 5 batches an epoch
EPOCHS = 2


class _Module(L.LightningModule):
    """A regression that records its losses. ``is_manual``: with manual optimization."""

    earlier: Any = None  # weak reference to an earlier fit's engine

    def __init__(
        self,
        lr: float = 1e-2,
        optimizer: str | None = "AdamW",
        is_made_late: bool = False,
        is_manual: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not is_manual
        self.net: Any = None
        self.train_losses: list[float] = []
        self.validation_losses: list[float] = []
        if not is_made_late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
            self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch) / 2)
        loss = self._loss(batch)
        self.train_losses.append(loss.item())
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss / 2)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.validation_losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        assert self.earlier is None or self.earlier() is None
        kind = self.hparams["optimizer"]
        if kind is None:
            return None
        optimizer = getattr(torch.optim, kind)(self.parameters(), lr=self.hparams["lr"])
        if kind == "SGD":
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _loader() -> DataLoader[Any]:
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=BATCH)


def _trainer(strategy: Any, world_size: int, folder: Any, **options: Any) -> L.Trainer:
    shown = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    settings = {"max_epochs": EPOCHS, "default_root_dir": folder, "strategy": strategy}
    settings |= {**dict.fromkeys(shown, False), **options}
    return L.Trainer(accelerator="cpu", devices=world_size, **settings)


class _Fit(NamedTuple):
    module: _Module
    values: dict[str, Tensor]
    trainer: L.Trainer


def _fit(
    strategy: Any,
    world_size: int,
    folder: Any,
    module: _Module | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> _Fit:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = module or _Module()
    trainer = _trainer(strategy, world_size, folder, **options)
    trainer.fit(module, _loader(), _loader(), ckpt_path=ckpt_path)
    if isinstance(trainer.strategy, ZeroStrategy):
        values = trainer.strategy.engine.full_state_dict(dtype=torch.float32)
    else:
        values = {name: value.clone() for name, value in module.state_dict().items()}
    return _Fit(module, values, trainer)


def _check_same(found: _Fit, expected: _Fit) -> None:
    torch.testing.assert_close(found.values, expected.values, rtol=0.0, atol=2e-6)
    for kind in ("train_losses", "validation_losses"):
        theirs = getattr(expected.module, kind)
        assert theirs
        assert getattr(found.module, kind) == pytest.approx(theirs, abs=2e-6)


def _trains(rank: int, world_size: int, folder: Path) -> None:
    # An epoch of 5 batches (10 on one rank) in steps of 2, then 3, ends with a shorter step.
    used: list[Any] = [callbacks.GradientAccumulationScheduler({0: 2, 1: 3})]
    options = {"callbacks": used, "gradient_clip_val": 0.3}
    expected = _fit(DDPStrategy(), world_size, folder, **options)
    unclipped = _fit(DDPStrategy(), world_size, folder, callbacks=used)
    assert unclipped.module.train_losses[-1] != expected.module.train_losses[-1]
    place = folder / "within a step.ckpt"
    used.append(callbacks.LambdaCallback(on_train_batch_end=lambda t, *_: t.save_checkpoint(place)))
    for stage, suffix in itertools.product((1, 2, 3), ("", "_offload")):
        with TestCase().assertNoLogs("zero_core.extensions.guards"):
            found = _fit(f"zero_stage_{stage}{suffix}", world_size, folder, **options)
        _check_same(found, expected)
        assert found.trainer.strategy.engine.global_steps == found.trainer.global_step
        # Stages 1 and 2 leave complete values in the module. At stage 3 reads on two ranks fail.
        if stage < 3 or world_size == 1:
            torch.testing.assert_close(found.module.state_dict(), found.values)
        else:
            with pytest.raises(RuntimeError, match="full_state_dict"):
                found.module.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_weights_are_those_of_the_ddp_strategy(world_size: int, tmp_path: Path) -> None:
    spawn(_trains, world_size, tmp_path)


def _trains_in_16_bits(world_size: int, folder: Path) -> None:
    plain = _fit(DDPStrategy(), world_size, folder).module
    dtypes = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    config = {"zero_optimization": {"stage": 3}, "fp16": {"initial_scale_power": 8}}
    for precision, dtype in dtypes.items():
        found = _fit(ZeroStrategy(config), world_size, folder, precision=precision)
        assert {p.dtype for p in found.module.parameters()} == {dtype}
        engine = found.trainer.strategy.engine
        assert engine.loss_scale == (256.0 if dtype is torch.float16 else 1.0)
        assert engine.skipped_steps == 0
        assert engine.states.get_full("net.3.weight", "master_weight").dtype == torch.float32
        for name in ("train_losses", "validation_losses"):
            expected = getattr(plain, name)
            assert getattr(found.module, name) == pytest.approx(expected, rel=0.1, abs=0.02)
            assert getattr(found.module, name) != expected


def _trains_by_hand_and_is_made_late(world_size: int, folder: Path) -> None:
    late = _Module(is_made_late=True)
    assert not list(late.parameters())
    for plain, module in ((_Module(is_manual=True), _Module(is_manual=True)), (_Module(), late)):
        expected = _fit(DDPStrategy(), world_size, folder, plain)
        _check_same(_fit("zero_stage_3", world_size, folder, module), expected)


def _has_named_optimizer(world_size: int, folder: Path) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    expected = _fit(DDPStrategy(), world_size, folder, _Module(0.1, "SGD"))
    _check_same(_fit(ZeroStrategy(config), world_size, folder, _Module(0.1, None)), expected)
    for optimizer, strategy in (("SGD", ZeroStrategy(config)), (None, "zero_stage_2")):
        with pytest.raises(zero_core.ConfigError, match="either configure_optimizers"):
            _fit(strategy, world_size, folder, _Module(0.1, optimizer))


def _fits_twice(world_size: int, folder: Path) -> None:
    metrics, seconds = [], []
    for make in (DDPStrategy, lambda: "zero_stage_3"):
        module, _, trainer = _fit(make(), world_size, folder, _Module())
        metrics += trainer.test(module, _loader(), verbose=False)
        if isinstance(trainer.strategy, ZeroStrategy):
            module.earlier = weakref.ref(trainer.strategy.engine)
        seconds.append(_fit(make(), world_size, folder, module))
    assert metrics[1] == pytest.approx(metrics[0], abs=2e-6)
    _check_same(seconds[1], seconds[0])
    with pytest.raises(RuntimeError, match="until the next fit"):
        assert trainer.strategy.engine
    seconds.pop().trainer.strategy.engine.unwrap()
    module.earlier = None
    _fit("zero_stage_3", world_size, folder, module)  # the module's engine has ended
    gc.collect()  # collects Trainer and strategy, while the module keeps the engine alive
    _trainer("zero_stage_3", world_size, folder).test(module, _loader(), verbose=False)


def _refuses(world_size: int, folder: Path) -> None:
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    with pytest.raises(zero_core.ConfigError, match="use 'norm'"):
        _fit("zero_stage_2", world_size, folder, **clipped)
    averaging = callbacks.StochasticWeightAveraging(1e-2)
    with pytest.raises(zero_core.ConfigError, match="StochasticWeightAveraging"):
        _fit("zero_stage_2", world_size, folder, callbacks=[averaging])
    module = _Module()
    module.hparams["lr"] = torch.float32
    with pytest.raises(zero_core.CheckpointError, match=r"hyper_parameters\.lr is a dtype"):
        _fit("zero_stage_2", world_size, folder, module)


def _all_of(rank: int, world_size: int, folder: Path) -> None:
    by_hand = _trains_by_hand_and_is_made_late
    for program in (_trains_in_16_bits, by_hand, _has_named_optimizer, _fits_twice, _refuses):
        program(world_size, folder)


def test_precisions_manual_loops_late_models_and_second_fits_go_as_with_ddp(tmp_path: Path) -> None:
    spawn(_all_of, 2, tmp_path)


def _resumes(rank: int, world_size: int, folder: Path) -> None:
    saver = callbacks.ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_top_k=-1, monitor="loss"
    )
    options = {"max_epochs": 4, "callbacks": [saver], "enable_checkpointing": True}
    options["accumulate_grad_batches"] = 2
    straight = _fit("zero_stage_3", world_size, folder, **options)
    place = folder / "epoch=1.ckpt"
    assert (place / "checkpoint" / "manifest.json").is_file()
    # The checkpoint's learning rate replaces the module's.
    again = _fit("zero_stage_3", world_size, folder, _Module(lr=0.5), ckpt_path=place, **options)
    torch.testing.assert_close(again.values, straight.values, rtol=0.0, atol=0.0)
    half = len(straight.module.train_losses) // 2
    assert again.module.train_losses == straight.module.train_losses[half:]
    trainer = again.trainer
    best = trainer.checkpoint_callback.best_model_score
    assert best == straight.trainer.callback_metrics["loss"]
    assert trainer.global_step == straight.trainer.global_step
    # An engine that only evaluates reads only its shard of the weights.
    with patch.object(Reader, "read_parts", autospec=True, side_effect=Reader.read_parts) as read:
        _trainer("zero_stage_3", world_size, folder).test(
            _Module(), _loader(), ckpt_path=place, verbose=False
        )
    count = sum(part.numel for call in read.call_args_list for part in call.args[1])
    numel = sum(value.numel() for value in again.values.values())
    assert 0 < count < 0.75 * numel
    (tested,) = trainer.test(again.module, _loader(), ckpt_path="best", verbose=False)
    assert tested["test_loss"] == pytest.approx(float(best), abs=1e-6)


def _resumes_on(rank: int, world_size: int, folder: Path) -> None:
    """Resume at stage 1 on one rank from two ranks at stage 3, and test with other strategies."""
    module, values, trainer = _fit(
        "zero_stage_1", 1, folder, ckpt_path=folder / "epoch=1.ckpt", max_epochs=3
    )
    assert len(module.train_losses) == NUM_SAMPLES // BATCH
    assert trainer.current_epoch == 3
    # A weights-only checkpoint is one file for any strategy.
    file, shards = folder / "weights.ckpt", folder / "shards.ckpt"
    trainer.save_checkpoint(file, weights_only=True)
    trainer.save_checkpoint(shards)
    loaded = _Module.load_from_checkpoint(file)
    torch.testing.assert_close(dict(loaded.state_dict()), values, rtol=0.0, atol=0.0)
    assert loaded.hparams["lr"] == 1e-2
    (expected,) = _trainer("auto", 1, folder).test(loaded, _loader(), verbose=False)
    (mine,) = trainer.test(module, _loader(), verbose=False)
    assert mine == pytest.approx(expected, abs=1e-6)
    for place in (file, shards):
        reader = _trainer("zero_stage_3_offload", 1, folder)
        (read,) = reader.test(_Module(lr=0.5), _loader(), ckpt_path=place, verbose=False)
        assert read == pytest.approx(expected, abs=1e-6)
    _fit("ddp", 1, folder).trainer.save_checkpoint(folder / "ddp.ckpt")
    with pytest.raises(zero_core.CheckpointError, match="optimizer state of another strategy"):
        _fit("zero_stage_2", 1, folder, ckpt_path=folder / "ddp.ckpt", max_epochs=9)


def test_resumed_runs_have_the_bits_of_uninterrupted_ones(tmp_path: Path) -> None:
    spawn(_resumes, 2, tmp_path)
    spawn(_resumes_on, 1, tmp_path)


def test_lightnings_own_deepspeed_strategy_trains_saves_and_goes_on(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "lightning_deepspeed.py"
    run_script(script, "3", str(tmp_path), ranks=1)
    assert (tmp_path / "saved" / "checkpoint").is_dir()


@pytest.mark.parametrize(
    ("config", "options", "key"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "accumulate_grad_batches"),
        ({"gradient_clipping": 1.0}, {}, "gradient_clip_val"),
        ({"bf16": {"enabled": True}}, {}, "precision="),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "configure_optimizers"),
        ({"train_batch_size": 8}, {}, "DataLoader"),
        ({}, {"find_unused_parameters": True}, "find_unused_parameters"),
        ("missing.json", {}, "neither a file that exists"),
    ],
)
def test_what_the_trainer_decides_is_refused_in_the_configuration(config, options, key):
    with pytest.raises(zero_core.ConfigError, match=key):
        ZeroStrategy(config, **options)


def test_default_options_of_ddp_which_lightnings_command_line_passes_are_accepted() -> None:
    nulls = dict.fromkeys(("scheduler", "optimizer", "bf16", "gradient_clipping"))
    assert not ZeroStrategy(nulls, find_unused_parameters=False)._config


def test_configuration_in_a_file_and_precisions_that_the_engine_lacks_are_refused(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"gradient_clipping": 1.0, // the Trainer has it\n}', encoding="utf-8")
    with pytest.raises(zero_core.ConfigError, match=r"gradient_clipping = 1: leave it out"):
        ZeroStrategy(path)
    with pytest.raises(zero_core.ConfigError, match="DoublePrecision"):
        L.Trainer(accelerator="cpu", devices=1, strategy="zero_stage_2", precision="64-true")


def test_a_missing_lightning_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("zero_engine.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("zero_engine.lightning")


def test_values_by_plain_names_load_into_a_module_with_compiled_parts() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    plain = {name: value.clone() for name, value in module.state_dict().items()}
    module[1] = torch.compile(module[1], backend="eager")
    renamed = renamed_for(module, plain)
    assert list(renamed) == list(module.state_dict())
    assert renamed_for(module, renamed) == renamed
