"""Whether units are updated in backward before the step is decided.

[Note: speculation]
With clipping, fp16's loss scale or ``check_grad_overflow`` the last gradient of backward decides on
the step. The state tier may begin it all the same, as if it were taken without clipping, and undo
it where that turns out wrong (`zero_core.protocols.SpeculativeTier`). No number depends on it.

An update that is undone costs the host two copies of its states and the update itself again, and
one that is kept costs it a copy. So it is done only where the configuration asks for it.
"""

from __future__ import annotations

import logging

from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.protocols import SpeculativeTier, StateTier

_log = logging.getLogger(__name__)


def updates_in_backward(config: Config) -> bool:
    """Whether units are updated in backward for good, as configured.

    By default: with optimizer offload and no clipping, fp16 or overflow check. Nor with
    ``memory_checkpoint``, which reads the states beside backward.
    """
    offload = config.zero_optimization.offload_optimizer
    if config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and config.memory_checkpoint is None


def may_speculate(config: Config) -> bool:
    """Whether units are updated in backward such that it can be undone, as configured.

    By default: with a size of the undo log, and without ``memory_checkpoint``.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "cpu" or not config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.undo_buffer_size is not None and config.memory_checkpoint is None


def speculative(tier: StateTier, config: Config, *, rank: int) -> SpeculativeTier | None:
    """Prepare ``tier`` to begin steps before they are decided, where `may_speculate`.

    Raises:
        ConfigError: it is demanded, and the tier cannot undo updates.
    """
    if not may_speculate(config):
        return None
    how = "after backward: no kernel of this optimizer can be undone"
    found = None
    if isinstance(tier, SpeculativeTier) and tier.enable_undo():
        found = tier
        how = f"in backward, with {tier.undo_bytes} bytes of undo log on a rank"
    elif config.zero_optimization.offload_optimizer.update_in_backward:
        raise ConfigError(
            "zero_optimization.offload_optimizer.update_in_backward needs updates that can be "
            "undone, as gradient_clipping, fp16 or check_grad_overflow may change or cancel a "
            "step: those of Adam, AdamW, Adagrad, SGD or Lion by cpu-adam's kernel (pip install "
            "zero-offload[cpu-adam]). Found another optimizer, no kernel or another tier: leave "
            "the key out"
        )
    if rank == 0:
        _log.info("offloaded units are updated %s", how)
    return found
