"""ZeRO as a Lightning strategy: Lightning's own DDP strategy is the oracle."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from script_server import run_script
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zero_core
import zero_engine.lightning
from zero_core.checkpoint.files import Reader
from zero_core.checkpoint.json_values import decode, encode
from zero_core.testing import spawn
from zero_engine.lightning import ZeroStrategy
from zero_engine.lightning.strategy import renamed_for

WIDTH, NUM_SAMPLES, BATCH = 13, 20, 2  # on two ranks: 5 batches an epoch
EPOCHS = 2


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1).tanh()


class _Module(L.LightningModule):
    """A small regression; the losses of its training and validation steps are kept."""

    def __init__(self, lr: float = 1e-2, is_made_late: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None
        self.train_losses: list[float] = []
        self.validation_losses: list[float] = []
        if not is_made_late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.train_losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.validation_losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class _Manual(_Module):
    """Its own loop: two backwards, then a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            loss = self._loss(batch)
            self.manual_backward(loss / 2)
        optimizer.step()
        self.train_losses.append(loss.item())
        return loss


def _loader() -> DataLoader[Any]:
    return DataLoader(_Samples(), batch_size=BATCH)


def _trainer(strategy: Any, world_size: int, folder: Any, **options: Any) -> L.Trainer:
    settings = {
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        **options,
    }
    return L.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **settings)


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _values(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    if isinstance(trainer.strategy, ZeroStrategy):
        return trainer.strategy.engine.full_state_dict(dtype=torch.float32)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _fit(
    strategy: Any, world_size: int, folder: str, module: _Module | None = None, **options: Any
) -> tuple[_Module, dict[str, Tensor], L.Trainer]:
    module = module or _Module()
    trainer = _trainer(strategy, world_size, folder, **options)
    trainer.fit(module, _loader(), _loader())
    return module, _values(trainer, module), trainer


def _check_same(
    found: tuple[_Module, dict[str, Tensor], Any],
    expected: tuple[_Module, dict[str, Tensor], Any],
    atol: float,
) -> None:
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.0, atol=atol)
    for kind in ("train_losses", "validation_losses"):
        theirs = getattr(expected[0], kind)
        assert theirs
        assert getattr(found[0], kind) == pytest.approx(theirs, abs=atol)


# ------------------------------------------------------------------ training


def _trains(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    # 5 batches an epoch (10 on one rank) in steps of 3: each epoch ends with a shorter one.
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    expected = _fit(DDPStrategy(), world_size, folder, **options)
    unclipped = _fit(DDPStrategy(), world_size, folder, accumulate_grad_batches=3)
    assert unclipped[0].train_losses[-1] != expected[0].train_losses[-1]
    for stage in (1, 2, 3):
        for suffix in ("", "_offload"):
            strategy = f"zero_stage_{stage}{suffix}"
            found = _fit(strategy, world_size, folder, **options)
            _check_same(found, expected, 2e-6)
            assert found[2].strategy.engine.global_steps == found[2].global_step
            # Stages 1 and 2 leave a module that holds its values; stage 3 says who has them.
            if stage < 3 or world_size == 1:
                torch.testing.assert_close(found[0].state_dict(), found[1])
            else:
                with pytest.raises(RuntimeError, match="full_state_dict"):
                    found[0].state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_weights_are_those_of_the_ddp_strategy(world_size: int, tmp_path: Path) -> None:
    spawn(_trains, world_size, str(tmp_path))


def _trains_in_16_bits(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    plain, *_ = _fit(DDPStrategy(), world_size, folder)
    dtypes = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    config = {"zero_optimization": {"stage": 3}, "fp16": {"initial_scale_power": 8}}
    for precision, dtype in dtypes.items():
        module, _, trainer = _fit(ZeroStrategy(config), world_size, folder, precision=precision)
        assert {p.dtype for p in module.parameters()} == {dtype}
        engine = trainer.strategy.engine
        assert engine.loss_scale == (256.0 if dtype is torch.float16 else 1.0)
        assert engine.skipped_steps == 0
        assert engine.states.get_full("net.3.weight", "master_weight").dtype == torch.float32
        for name in ("train_losses", "validation_losses"):
            expected = getattr(plain, name)
            assert getattr(module, name) == pytest.approx(expected, rel=0.1, abs=0.02)
            assert getattr(module, name) != expected


def _trains_manually(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    expected = _fit(DDPStrategy(), world_size, folder, _Manual())
    _check_same(_fit("zero_stage_3", world_size, folder, _Manual()), expected, 2e-6)


def _is_made_late(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    expected = _fit(DDPStrategy(), world_size, folder)
    module = _Module(is_made_late=True)
    assert not list(module.parameters())
    _check_same(_fit("zero_stage_3", world_size, folder, module), expected, 2e-6)


def _has_named_optimizer(rank: int, world_size: int, folder: str) -> None:
    _quiet()

    class Without(_Module):
        def configure_optimizers(self) -> Any:
            return None

    class With(_Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    expected = _fit(DDPStrategy(), world_size, folder, With())
    _check_same(_fit(ZeroStrategy(config), world_size, folder, Without()), expected, 2e-6)
    for module, strategy in ((With(), ZeroStrategy(config)), (Without(), "zero_stage_2")):
        with pytest.raises(zero_core.ConfigError, match="either configure_optimizers"):
            _fit(strategy, world_size, folder, module)


class _Watching(_Module):
    """Sees that the engine of an earlier fit is gone before the next one is built."""

    earlier: Any = None

    def configure_optimizers(self) -> Any:
        assert self.earlier is None or self.earlier() is None
        return super().configure_optimizers()


def _fits_twice(rank: int, world_size: int, folder: str) -> None:
    """The second fit starts from the first one's weights; a test in between sees them, too."""
    _quiet()
    runs = []
    for strategy in (DDPStrategy(), "zero_stage_3"):
        module, _, trainer = _fit(strategy, world_size, folder, _Watching())
        metrics = trainer.test(module, _loader(), verbose=False)
        if strategy == "zero_stage_3":
            module.earlier = weakref.ref(trainer.strategy.engine)
        second = _fit(_another(strategy), world_size, folder, module)
        runs.append((metrics, second))
    assert runs[0][0] == [pytest.approx(runs[1][0][0], abs=2e-6)]
    _check_same(runs[1][1], runs[0][1], 2e-6)
    with pytest.raises(RuntimeError, match="until the next fit"):
        assert trainer.strategy.engine
    runs[1][1][2].strategy.engine.unwrap()
    module.earlier = None
    _fit("zero_stage_3", world_size, folder, module)  # though the script has ended its engine
    gc.collect()  # its Trainer and strategy are gone: the engine stays with the module
    _trainer("zero_stage_3", world_size, folder).test(module, _loader(), verbose=False)


def _another(strategy: Any) -> Any:
    """Another strategy like it: a Trainer takes one of its own."""
    return strategy if isinstance(strategy, str) else type(strategy)()


def _all_of(rank: int, world_size: int, folder: str) -> None:
    for worker in (
        _trains_in_16_bits,
        _trains_manually,
        _is_made_late,
        _has_named_optimizer,
        _fits_twice,
    ):
        worker(rank, world_size, folder)


def test_precisions_manual_loops_late_models_and_second_fits_go_as_with_ddp(tmp_path: Path) -> None:
    spawn(_all_of, 2, str(tmp_path))


# --------------------------------------------------------------- checkpoints


def _keeps(folder: str) -> dict[str, Any]:
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, monitor="loss")
    return {"enable_checkpointing": True, "callbacks": [saver], "accumulate_grad_batches": 2}


def _resumes(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    options = {"max_epochs": 4, **_keeps(folder)}
    straight = _fit("zero_stage_3", world_size, folder, **options)
    place = Path(folder, "epoch=1.ckpt")
    assert (place / "checkpoint" / "manifest.json").is_file()
    again = _Module(lr=0.5)  # the checkpoint knows better
    trainer = _trainer("zero_stage_3", world_size, folder, **options)
    trainer.fit(again, _loader(), _loader(), ckpt_path=place)
    values = _values(trainer, again)
    for name, value in straight[1].items():
        assert torch.equal(values[name], value), name
    half = len(straight[0].train_losses) // 2
    assert again.train_losses == straight[0].train_losses[half:]
    assert trainer.checkpoint_callback.best_model_score == straight[2].callback_metrics["loss"]
    assert trainer.global_step == straight[2].global_step
    # An engine that only evaluates reads its shard of the weights, and no more.
    numel = sum(value.numel() for value in values.values())
    counted: list[int] = []
    original = Reader.read_parts

    def count(reader, parts):
        counted.append(sum(part.last - part.first for part in parts))
        return original(reader, parts)

    Reader.read_parts = count
    _trainer("zero_stage_3", world_size, folder).test(
        _Module(), _loader(), ckpt_path=place, verbose=False
    )
    Reader.read_parts = original
    assert 0 < sum(counted) < 0.75 * numel  # half, and padding
    # The best one, for a test.
    (tested,) = trainer.test(again, _loader(), ckpt_path="best", verbose=False)
    best = float(trainer.checkpoint_callback.best_model_score)
    assert tested["test_loss"] == pytest.approx(best, abs=1e-6)


def _resumes_on(rank: int, world_size: int, folder: str) -> None:
    """What two ranks at stage 3 wrote, one rank goes on with at stage 1, and DDP evaluates."""
    _quiet()
    module = _Module()
    trainer = _trainer("zero_stage_1", world_size, folder, max_epochs=3)
    trainer.fit(module, _loader(), ckpt_path=Path(folder, "epoch=1.ckpt"))
    assert len(module.train_losses) == NUM_SAMPLES // BATCH
    assert trainer.current_epoch == 3
    # One file of weights, for any strategy.
    file = Path(folder, "weights.ckpt")
    trainer.save_checkpoint(file, weights_only=True)
    loaded = _Module.load_from_checkpoint(file)
    torch.testing.assert_close(loaded.state_dict(), _values(trainer, module), rtol=0.0, atol=0.0)
    assert loaded.hparams["lr"] == 1e-2
    (mine,) = trainer.test(module, _loader(), verbose=False)
    (theirs,) = _trainer("auto", 1, folder).test(loaded, _loader(), verbose=False)
    assert mine == pytest.approx(theirs, abs=1e-6)
    trainer.save_checkpoint(Path(folder, "shards.ckpt"))
    for place in (file, Path(folder, "shards.ckpt")):
        reader = _trainer("zero_stage_3_offload", 1, folder)
        (read,) = reader.test(_Module(lr=0.5), _loader(), ckpt_path=place, verbose=False)
        assert read == pytest.approx(theirs, abs=1e-6)
    # Another strategy's optimizer state is refused, and not left out in silence.
    ddp = _trainer("ddp", 1, folder)
    ddp.fit(_Module(), _loader())
    ddp.save_checkpoint(Path(folder, "ddp.ckpt"))
    with pytest.raises(zero_core.CheckpointError, match="optimizer state of another strategy"):
        _trainer("zero_stage_2", 1, folder, max_epochs=9).fit(
            _Module(), _loader(), ckpt_path=Path(folder, "ddp.ckpt")
        )


def test_resumed_runs_have_the_bits_of_uninterrupted_ones(tmp_path: Path) -> None:
    spawn(_resumes, 2, str(tmp_path))
    spawn(_resumes_on, 1, str(tmp_path))


def test_saved_states_come_back_as_they_were() -> None:
    state = {
        "best": torch.tensor(0.1),
        "kept": {"a.ckpt": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "steps": [1, 2.5, None, True, ("x", float("inf"))],
        "empty": torch.zeros(0, 3, dtype=torch.int64),
    }
    found = decode(json.loads(json.dumps(encode(state, "checkpoint"))))
    torch.testing.assert_close(found.pop("best"), state.pop("best"), rtol=0.0, atol=0.0)
    torch.testing.assert_close(found.pop("kept"), state.pop("kept"), rtol=0.0, atol=0.0)
    torch.testing.assert_close(found.pop("empty"), state.pop("empty"))
    assert found == state


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"net": nn.Linear(1, 1)}, r"hparams\.net is a Linear"),
        ([1, {2}], r"hparams\[1\] is a set"),
        ({"ema": torch.zeros(70_000)}, r"hparams\.ema is a tensor of shape \(70000,\)"),
    ],
)
def test_states_that_are_neither_json_nor_small_are_named(value: Any, message: str) -> None:
    with pytest.raises(zero_core.CheckpointError, match=message):
        encode(value, "hparams")


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"gradient_accumulation_steps": 2}, "accumulate_grad_batches"),
        ({"gradient_clipping": 1.0}, "gradient_clip_val"),
        ({"bf16": {"enabled": True}}, "precision="),
        ({"scheduler": {"type": "WarmupLR"}}, "configure_optimizers"),
        ({"train_batch_size": 8}, "DataLoader"),
    ],
)
def test_what_the_trainer_decides_is_refused_in_the_configuration(
    config: dict[str, Any], key: str
) -> None:
    with pytest.raises(zero_core.ConfigError, match=key):
        ZeroStrategy(config)


def test_options_of_ddp_are_refused() -> None:
    with pytest.raises(zero_core.ConfigError, match="find_unused_parameters"):
        ZeroStrategy({}, find_unused_parameters=True)


def test_precisions_that_the_engine_lacks_are_refused() -> None:
    with pytest.raises(zero_core.ConfigError, match="DoublePrecision"):
        L.Trainer(accelerator="cpu", devices=1, strategy="zero_stage_2", precision="64-true")


def _refuses(rank: int, world_size: int, folder: str) -> None:
    _quiet()
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    with pytest.raises(zero_core.ConfigError, match="use 'norm'"):
        _fit("zero_stage_2", world_size, folder, **clipped)
    with pytest.raises(zero_core.ConfigError, match="StochasticWeightAveraging"):
        _fit("zero_stage_2", 1, folder, callbacks=[StochasticWeightAveraging(1e-2)])
    module = _Module()
    module.hparams["lr"] = torch.float32
    with pytest.raises(zero_core.CheckpointError, match=r"hyper_parameters\.lr is a dtype"):
        _fit("zero_stage_2", world_size, folder, module)


def test_mistakes_are_told_before_anything_is_trained(tmp_path: Path) -> None:
    spawn(_refuses, 1, str(tmp_path))


def test_a_missing_lightning_is_named_with_its_cure() -> None:
    program = (
        "import sys; sys.modules['lightning'] = None\n"
        "try:\n    import zero_engine.lightning\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
    )
    assert "pip install lightning" in done.stdout


def test_importing_it_registers_the_names() -> None:
    registered = L.pytorch.strategies.StrategyRegistry.available_strategies()
    for stage in (1, 2, 3):
        assert {f"zero_stage_{stage}", f"zero_stage_{stage}_offload"} <= set(registered)
    assert zero_engine.lightning.ZeroStrategy is ZeroStrategy


def test_configuration_may_be_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"gradient_clipping": 1.0, // the Trainer has it\n}', encoding="utf-8")
    with pytest.raises(zero_core.ConfigError, match=r"gradient_clipping = 1: leave it out"):
        ZeroStrategy(path)
    with pytest.raises(zero_core.ConfigError, match="neither a file that exists"):
        ZeroStrategy(tmp_path / "missing.json")


def test_values_by_plain_names_load_into_a_module_with_compiled_parts() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    plain = {name: value.clone() for name, value in module.state_dict().items()}
    module[1] = torch.compile(module[1], backend="eager")
    renamed = renamed_for(module, plain)
    assert list(renamed) == list(module.state_dict())
    module.load_state_dict(renamed)
    assert renamed_for(module, renamed) == renamed


def test_lightnings_own_deepspeed_strategy_trains_saves_and_goes_on(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "lightning_deepspeed.py"
    run_script(script, "3", str(tmp_path), ranks=1)
    assert (tmp_path / "saved" / "checkpoint").is_dir()
