"""Rules between the keys of a configuration, and the keys that have no effect.

Each key is used, or accepted because this engine does not need it (`UNNEEDED` has the reason), or
refused with a `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_core.config.blocks import UNNEEDED, Config, as_kind
from zero_core.errors import ConfigError

_OFF = ("sparse_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state")
_ON = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_BLOCKS = ("amp", "tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger")
FURTHER_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(_OFF, False),
    **{key: {"enabled": False} for key in _BLOCKS},
    **dict.fromkeys(_ON, True),
}
"""DeepSpeed's top-level keys that `Config` lacks, each with the value that fits this engine."""


def drop_further_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Drop ``$schema`` and `FURTHER_KEYS`. Raises ConfigError if one has an unsupported value."""
    for key, same in FURTHER_KEYS.items():
        value = as_kind(raw.get(key, same), type(same))
        is_off = isinstance(value, Mapping) and as_kind(value.get("enabled"), bool) is False
        if not (value == same or is_off or (value == {} and isinstance(same, Mapping))):
            raise ConfigError(
                f"{key} = {value!r} is not served; leave the key out (same as {same!r})"
            )
    dropped = {*FURTHER_KEYS}
    if isinstance(raw.get("$schema"), str):  # editors find the JSON Schema by this key
        dropped.add("$schema")
    return {k: v for k, v in raw.items() if k not in dropped}


def check_rules(config: Config, world_size: int) -> None:
    """Raise ConfigError for contradictory keys and for unsupported features."""
    zero, bf16, again = config.zero_optimization, config.bf16, config.activation_checkpointing
    offload, is_here = zero.offload_optimizer, zero.offload_optimizer.device == "none"
    half = config.half_precision
    autocast = config.torch_autocast.dtype if config.torch_autocast.enabled else None
    if config.fp16.enabled and config.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled: only one of them can be true")
    if None not in (half, autocast) and half != autocast:
        raise ConfigError(
            f"torch_autocast.dtype is {autocast} and the weights are {half}: leave bf16 and fp16 "
            "out for weights in fp32, or torch_autocast"
        )
    where = "zero_optimization.offload_optimizer"
    shares = ("ratio", "parameters", "device_budget")
    given = [k for k in shares if k in offload.model_fields_set and getattr(offload, k) is not None]
    if offload.device == "nvme" and not offload.nvme_path:
        raise ConfigError(
            f"{where}.device = 'nvme' needs {where}.nvme_path, a folder on the NVMe disk"
        )
    keys = [key for key in ("update_in_backward", "lossless_upload") if getattr(offload, key)]
    if is_here and (on_host := keys + given):
        raise ConfigError(f"{where}.{on_host[0]} needs device 'cpu' or 'nvme'")
    if offload.update_in_backward and offload.device == "nvme" and config.can_cancel_steps:
        raise ConfigError(
            f"{where}.update_in_backward with device 'nvme': updates of states in a file cannot be "
            "undone, and gradient_clipping, fp16 or check_grad_overflow may change or cancel a "
            "step: leave them out and set check_grad_overflow to false, or use device 'cpu'"
        )
    if len(given) > 1:
        raise ConfigError(
            f"{where}: {' and '.join(given)} each say what the host updates: give one"
        )
    if offload.host_share == "first" and (is_here or offload.parameters is not None):
        raise ConfigError(
            f"{where}.host_share says at which end of the model the elements of a ratio or a "
            "device_budget lie: it needs device 'cpu' or 'nvme', and no list of parameters"
        )
    if offload.ratio == "auto" and zero.stage == 0:
        raise ConfigError(
            f"{where}.ratio = 'auto' needs stage 1 or more: at stage 0 every rank updates every "
            "element, and ranks that choose different ratios may round one differently"
        )
    if is_here and "state_dtype" in offload.model_fields_set:
        raise ConfigError(
            f"{where}.state_dtype needs device 'cpu' or 'nvme': moments of 16 or 8 bits are kept "
            "by a host's kernel (cpu-adam); on the device the optimizer is torch's, with fp32 "
            "states"
        )
    params = zero.offload_param
    if params.device != "none" and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.offload_param.device = {params.device!r} needs stage 3, found "
            f"{zero.stage}: at lower stages every rank holds all parameters"
        )
    if params.device == "nvme" and params.nvme_path is None:
        raise ConfigError(
            "zero_optimization.offload_param.device = 'nvme' needs nvme_path: name a folder on "
            "the NVMe disk"
        )
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, key) and zero.stage != 3:
            raise ConfigError(
                f"zero_optimization.{key} needs stage 3, found {zero.stage}: at lower stages the "
                "gathered weights are the master weights; leave the key out or set stage to 3"
            )
    if zero.zero_lossless_weights and zero.stage == 0:
        raise ConfigError(
            "zero_optimization.zero_lossless_weights needs stage 1, 2 or 3, found 0, where every "
            "rank updates all weights and sends none; leave the key out or set a stage"
        )
    for what in ("weights", "gradients"):
        if getattr(zero, f"zero_lossless_{what}") and getattr(zero, f"zero_quantized_{what}"):
            raise ConfigError(
                f"zero_optimization.zero_lossless_{what} sends every bit of the {what}, and "
                f"zero_quantized_{what} rounds them: leave one of the two out"
            )
    partition = zero.zero_hpz_partition_size
    if partition != 1 and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size = {partition!r} needs stage 3, found "
            f"{zero.stage}: at lower stages every rank holds all parameters; leave the key out or "
            "set stage to 3"
        )
    # a single rank gathers nothing
    if world_size > 1 and partition != "node" and world_size % partition > 0:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size = {partition} must divide the number of "
            f'ranks, {world_size}: give the number of ranks of a node, or "node"'
        )
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        raise ConfigError(
            "zero_optimization.zeropp_loco_param needs zero_quantized_gradients, whose error it "
            "feeds back: set that to true or leave the block out"
        )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise ConfigError(
            "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads = true"
        )
    if bf16.bf16_master_weights_and_grads and not bf16.enabled:
        raise ConfigError("bf16.bf16_master_weights_and_grads needs bf16.enabled = true")
    if bf16.bf16_master_weights_and_grads and is_here and not bf16.bf16_optimizer_states:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads on the device needs bf16.bf16_optimizer_states = "
            "true, as the optimizer gives states the dtype of the weights that it updates; or set "
            "zero_optimization.offload_optimizer.device"
        )
    if config.fp16.fp16_master_weights_and_grads and is_here:
        raise ConfigError(
            "fp16.fp16_master_weights_and_grads needs zero_optimization.offload_optimizer: moments "
            "in fp16 underflow"
        )
    if bf16.bf16_master_weights_and_grads and zero.stage == 0:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads needs zero_optimization.stage 1, 2 or 3, found 0"
        )
    is_asked = config.world_size_invariant
    if is_asked and zero.rounding_key is not None:
        raise ConfigError(
            f"world_size_invariant: the blocks of {zero.rounding_key} follow the slices of the "
            "ranks, of which there are as many as ranks: leave one of the two out"
        )
    if is_asked and config.gradient_allreduce_op == "sum":
        raise ConfigError(
            "world_size_invariant with gradient_allreduce_op 'sum': a sum over the ranks of means "
            "over micro-steps grows with the number of ranks: leave one of the two out"
        )
    if is_asked and offload.ratio == "auto":
        raise ConfigError(
            f"world_size_invariant with {where}.ratio 'auto': the ratio is measured, so another "
            "run may choose another one: give a number"
        )
    if is_asked and offload.state_dtype != "float32":
        raise ConfigError(
            f"world_size_invariant with {where}.state_dtype {offload.state_dtype!r}: moments of "
            "fewer bits are rounded by the place of an element on its rank: leave one of the two "
            "out"
        )
    if config.memory_checkpoint is not None and offload.device == "nvme":
        raise ConfigError(
            "memory_checkpoint with zero_optimization.offload_optimizer.device 'nvme': states that "
            "host memory has no room for cannot be copied there: leave one of the two out"
        )
    if config.memory_checkpoint is not None and offload.update_in_backward:
        raise ConfigError(
            "memory_checkpoint with zero_optimization.offload_optimizer.update_in_backward: states "
            "are copied beside the backward, which would change them: leave one of the two out"
        )
    if config.check_replicas_every > 0 and zero.stage == 3:
        raise ConfigError(
            "check_replicas_every needs zero_optimization.stage 0, 1 or 2, found 3, where no two "
            "ranks have the same values"
        )
    for key in ("profile", "synchronize_checkpoint_boundary"):
        if again is not None and getattr(again, key):
            raise ConfigError(f"activation_checkpointing.{key} is not served: leave it out")
    for key in ("mics_shard_size", "mics_hierarchical_params_gather"):
        if getattr(zero, key) > 0:
            raise ConfigError(
                f"zero_optimization.{key} is MiCS, which DeepSpeed has removed, too: use "
                "zero_hpz_partition_size, which keeps a second shard of the parameters on each node"
            )
    if zero.zenflow is not None:
        raise ConfigError("zero_optimization.zenflow is not served")
    if offload.super_offload:
        raise ConfigError(
            f"{where}.super_offload is not served: see ratio = 'auto' and update_in_backward"
        )


def find_unneeded(raw: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and reason of each key of ``raw`` that has no effect in ``config``."""
    zero, offload = config.zero_optimization, config.zero_optimization.offload_optimizer
    has_weights = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    has_gradients = zero.zero_quantized_gradients
    unneeded = dict(UNNEEDED)
    if not config.bf16.enabled:
        unneeded["bf16.check_grad_overflow"] = (
            "used with bf16.enabled only; check_grad_overflow at the top holds at every precision"
        )
    masters = "the host keeps fp32 master weights, which lose nothing"
    if config.bf16.bf16_master_weights_and_grads and not config.has_bf16_masters:
        unneeded["bf16.bf16_master_weights_and_grads"] = masters
    if config.fp16.fp16_master_weights_and_grads:
        unneeded["fp16.fp16_master_weights_and_grads"] = masters

    def idle(keys: str, why: str) -> None:
        unneeded.update((f"zero_optimization.{key}", why) for key in keys.split())

    if zero.stage not in (1, 2):
        why = "used at stages 1 and 2 only, as in DeepSpeed: unused parameters are allowed"
        idle("ignore_unused_parameters", why)
    if zero.offload_param.device == "none":
        thresholds = "stage3_param_persistence_threshold stage3_model_persistence_threshold"
        idle(f"offload_param.pin_memory {thresholds}", "used with offload_param only")
    if zero.offload_param.device != "nvme":
        buffers = "offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu"
        idle(f"offload_param.nvme_path {buffers}", "used with offload_param.device 'nvme' only")
    if offload.device != "nvme":
        keys = "offload_optimizer.nvme_path offload_optimizer.buffer_count"
        idle(keys, "used with offload_optimizer.device 'nvme' only")
    if offload.device == "none":
        keys = "offload_optimizer.pin_memory offload_optimizer.pin_memory_bytes"
        idle(keys, "used with offload_optimizer only")
    if (
        offload.device != "cpu"
        or offload.update_in_backward is False
        or not config.can_cancel_steps
        or config.memory_checkpoint is not None
    ):
        idle(
            "offload_optimizer.undo_buffer_size",
            "used with offload_optimizer.device 'cpu' only, where update_in_backward is not false "
            "and a step may be clipped or cancelled, and without memory_checkpoint",
        )
    if not has_weights:
        why = "used with zero_quantized_weights or zero_quantized_nontrainable_weights only"
        idle("zero_quantized_weights_format", why)
    if zero.zero_quantized_weights:
        why = "zero_quantized_weights covers frozen weights too"
        idle("zero_quantized_nontrainable_weights", why)
    if not has_gradients:
        idle(
            "zero_quantized_gradients_within_node zero_quantized_gradients_between_nodes "
            "zero_quantized_gradients_hadamard zero_quantized_stochastic_rounding",
            "used with zero_quantized_gradients only",
        )
    if not (has_weights or has_gradients):
        idle("zero_quantized_checksum", "used with quantized weights or gradients only")
    for path, reason in unneeded.items():
        block: Any = raw
        *parents, key = path.split(".")
        for parent in parents:
            block = block.get(parent) or {}
        if key in block:
            yield path, block[key], reason
