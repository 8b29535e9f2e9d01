"""axolotl's plugin: the key ``zero`` of a YAML file trains with this engine.

    plugins:
      - zero_engine.axolotl.ZeroPlugin
    zero: stage3-offload

``zero`` is the argument of `zero_engine.hf.ZeroTrainer`. Leave out ``deepspeed`` and ``fsdp``.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pydantic
from axolotl.core import trainers
from axolotl.integrations.base import BasePlugin
from axolotl.utils.import_helper import get_cls_from_module_str

from zero_core import ConfigError
from zero_engine.hf import ZeroTrainer

_KINDS = {"reward_model": "AxolotlRewardTrainer", "process_reward_model": "AxolotlPRMTrainer"}
"""Keys that select a Trainer other than AxolotlTrainer."""


class ZeroArgs(pydantic.BaseModel):
    """Key that the plugin adds to axolotl's schema."""

    zero: str | dict[str, Any] | None = None


class PluginTrainer(ZeroTrainer):
    """Mixin for axolotl's Trainers, which axolotl makes and whose model it saves."""

    zero: ClassVar[str | dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, zero=self.zero, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the whole model on every rank, because rank 0 alone saves it then."""
        result = super().train(*args, **kwargs)
        assert self.engine is not None
        self.engine.unwrap(drops_partial=True)
        self.engine = self.optimizer = self.lr_scheduler = None  # another call builds them anew
        return result


class ZeroPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin that puts `PluginTrainer` before the Trainer that axolotl's configuration selects."""

    def get_input_args(self) -> str:
        return f"{__name__}.{ZeroArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[ZeroTrainer] | None:
        """Return the Trainer's class, or None without ``zero``. ConfigError with the key ``rl``."""
        if cfg.zero is None:
            return None
        if cfg.rl:
            raise ConfigError(
                f"rl: {cfg.rl} with zero: {cfg.zero}: axolotl passes no model to a plugin's "
                "Trainer; use the key deepspeed and zero-engine run, or TRL's trainer by "
                "zero_engine.hf.zero_trainer"
            )
        if cfg.trainer_cls:
            kind = get_cls_from_module_str(cfg.trainer_cls)
        else:
            name = next((name for key, name in _KINDS.items() if cfg[key]), "AxolotlTrainer")
            kind = getattr(trainers, name)
        zero = cfg.zero if isinstance(cfg.zero, str) else cfg.zero.to_dict()
        bases = PluginTrainer, kind
        return cast(type[ZeroTrainer], type(f"Zero{kind.__name__}", bases, {"zero": zero}))
