"""Blocks of the configuration: every key with its type, range and default.

Most names and defaults are DeepSpeed's. `zero_core.config.schema` reads a configuration, and
`zero_core.config.rules` checks keys against each other. A key that never has an effect has its
default and the reason in a call of `unneeded`. Two tables, `OPTIMIZER_PARAMS` and
`SCHEDULER_PARAMS`, have the types and ranges of the keys in ``params``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

LARGEST = 2**63
"""Largest integer that most keys accept. DeepSpeed's largest is `sys.maxsize`, one less."""


def as_whole(value: Any) -> Any:
    """Return ``value``, as an int if it is a whole float: JSON's 5e8 is a float in Python."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_kind(value: Any, *kinds: Any) -> Any:
    """Convert ``value`` to the first of ``kinds`` (bool, int, float) that accepts it, if needed."""
    if not isinstance(value, str | int | float) or type(value) in kinds:
        return value
    for kind in kinds:
        if kind is bool or (kind in (int, float) and isinstance(value, str)):
            with suppress(pydantic.ValidationError):
                return pydantic.TypeAdapter(kind).validate_python(value)
    return value


_Whole = BeforeValidator(as_whole)
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST), _Whole]
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST), _Whole]
_Count = Annotated[int, Field(ge=-1, le=LARGEST), _Whole]
_NonNegative = Annotated[float, Field(ge=0.0)]
_Positive = Annotated[float, Field(gt=0.0)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
_Pair = (
    Field(min_length=2, max_length=2),
    BeforeValidator(lambda value: list(value) if isinstance(value, tuple) else value),
)
_Betas = Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], *_Pair]
_TwoNumbers = Annotated[list[_NonNegative], *_Pair]
# One value for all parameter groups, or a list with one value per group.
_OneOrMore = BeforeValidator(lambda v: list(v) if isinstance(v, list | tuple) else [v])
_Rates = Annotated[list[_NonNegative], _OneOrMore]
_Momenta = Annotated[list[_Fraction], _OneOrMore]
_Epsilons = Annotated[list[_NonNegative | None], _OneOrMore]  # Adafactor has a pair of epsilons


def _params(kinds: Mapping[Any, str]) -> type[BaseModel]:
    """Return a model of optional keys. ``kinds`` has the key names of each type, as one string."""
    fields: dict[str, Any] = {k: (kind, None) for kind, keys in kinds.items() for k in keys.split()}
    config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    return pydantic.create_model("params", __config__=config, **fields)


def params_of(kind: type[BaseModel]) -> pydantic.AfterValidator:
    """Return a validator of ``params`` by the model ``kind``. It accepts "auto" for every key."""

    def check(params: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in params.items() if not isinstance(v, str) or v != "auto"}
        kind.model_validate(given)
        return params

    return pydantic.AfterValidator(check)


def strings(what: str, at_least: int = 0) -> BeforeValidator:
    """Return a validator that converts a list of strings to a tuple. ``what`` is for messages."""

    def convert(value: Any) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) >= at_least
        if is_list and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ValueError(f"expected a list of {what}")

    return BeforeValidator(convert)


BlockKind = Literal["int8", "int4", "e4m3", "e5m2"]
"""Format of quantized blocks: integers of 8 or 4 bits, or 8-bit floating point."""
WeightFormat = Literal["int8", "int4", "e4m3", "e5m2", "int4_difference"]


def unneeded(default: Any, why: str) -> Any:
    """Return the field of a key that is accepted without effect, for the reason ``why``."""
    return Field(default, json_schema_extra={"no effect": why})


class _Block(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class OffloadOptimizerConfig(_Block):
    """``zero_optimization.offload_optimizer``: placement and update of optimizer state."""

    device: Literal["none", "cpu", "nvme"] = "none"
    ratio: _Fraction | Literal["auto"] | None = 1.0
    """Share of the elements that the host updates (Twin-Flow), exact to the element. "auto" selects
    the fastest share that fits, by measurements. None if ``parameters`` or ``device_budget`` is
    given instead."""
    host_share: Literal["last", "first"] = "last"
    """End of the model that the host updates, with ``ratio`` or ``device_budget``. The last blocks
    get their gradients first and are needed last. Not in DeepSpeed's configuration."""
    parameters: Annotated[tuple[str, ...], strings("patterns of parameter names", 1)] | None = None
    """Patterns (`fnmatch`) of the names of the parameters that the host updates."""
    device_budget: NonNegativeInt | None = None
    """Bytes per rank that master weights, states and copied gradients may take on the device. The
    host updates the elements that do not fit."""
    pin_memory: bool = True
    pin_memory_bytes: NonNegativeInt | None = None
    """Limit of the host bytes that a rank page-locks for transfers. None sets no limit."""
    update_in_backward: bool | None = None
    """Update each unit in backward. None selects this if nothing can cancel the step or
    ``undo_buffer_size`` is given, unless ``memory_checkpoint`` is on or the optimizer has a step
    pre-hook."""
    undo_buffer_size: PositiveInt | None = None
    """Limit in bytes of a rank's undo log in host memory. The log is kept if units are updated in
    backward and the step may still be clipped or cancelled. Units for which it has no room are
    updated after backward. None sets no limit if ``update_in_backward`` is true. Not in DeepSpeed's
    configuration."""
    lossless_upload: bool = False
    """Send new parameters to an accelerator as lossless differences, for slow links. The host keeps
    the parameters that it sent last. Not in DeepSpeed's configuration."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of Adam's moments on the host. Not in DeepSpeed's configuration."""
    nvme_path: str | None = None
    """Folder on the NVMe disk, for device nvme. The ranks of a host may share it."""
    buffer_count: PositiveInt = 16
    """Host buffers of 1 Mi elements of state each, for reads ahead with device nvme. DeepSpeed's 4
    buffers hold a whole parameter each."""
    fast_init: bool = unneeded(
        False, "states that start at zero are never written to NVMe before their first update"
    )
    pipeline_read: bool = unneeded(False, "reads from NVMe always overlap with the update")
    pipeline_write: bool = unneeded(False, "writes to NVMe always overlap with the update")
    super_offload: bool = False
    cpuadam_cores_perc: _Fraction = unneeded(0.8, "used with super_offload only")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _say_it_once(cls, block: Any) -> Any:
        """Drop the default ``ratio`` if ``parameters`` or ``device_budget`` replaces it."""
        keys = ("parameters", "device_budget")
        if isinstance(block, Mapping) and any(block.get(key) is not None for key in keys):
            return {"ratio": None, **block}
        return block

    @pydantic.field_validator("ratio", mode="before")
    @classmethod
    def _check_ratio(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value in (None, "auto") or (is_number and 0.0 <= value <= 1.0):
            return value
        raise ValueError('expected a number from 0 to 1, or "auto"')


class OffloadParamConfig(_Block):
    """``zero_optimization.offload_param``: placement of parameter shards at stage 3."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: PositiveInt = 5
    """Host buffers for shards that are read ahead of use and kept afterwards, with ``nvme``."""
    buffer_size: PositiveInt = 100_000_000
    """Elements of the largest shard that a host buffer may have to hold."""
    max_in_cpu: NonNegativeInt = 1_000_000_000
    """Elements kept in host memory with device ``nvme``, the first ones in order of use."""
    pin_memory: bool = True


class LocoConfig(_Block):
    """``zero_optimization.zeropp_loco_param``: error feedback of quantized gradients.

    A gradient's quantization error is added to the next step's gradient (LoCo, arXiv 2407.04480).
    """

    err_beta: _Fraction = 0.8
    """Decay of the running mean of the error."""
    reset_T: PositiveInt = 1024
    """Steps after which the error is reset."""


_Names = Annotated[
    tuple[str, ...],
    strings("strings"),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class ModulesConfig(_Block):
    """Modules of the model, by class or name."""

    classes: _Names = ()
    """Names of the modules' classes, with or without the Python module."""
    names: _Names = ()
    """Names of the modules, as in ``named_modules``."""
    name_suffixes: _Names = ()

    def selects(self, path: str, module: nn.Module) -> bool:
        is_named = path in self.names or path.endswith(self.name_suffixes)
        return is_named or not _class_names(module).isdisjoint(self.classes)

    def missing(self, model: nn.Module) -> list[str]:
        """Return the classes, names and suffixes for which ``model`` has no module."""
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        classes = {name for module in model.modules() for name in _class_names(module)}
        return [
            *(name for name in self.classes if name not in classes),
            *(name for name in self.names if name not in paths),
            *(s for s in self.name_suffixes if not any(path.endswith(s) for path in paths)),
        ]


def _class_names(module: nn.Module) -> set[str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


class LeafModuleConfig(ModulesConfig):
    """``zero_optimization.leaf_module``: modules that are one unit each, with all submodules.

    A module with ``_is_zero_leaf = True`` is a leaf, too. DeepSpeed's default classes (the experts
    of some models) are within units in any case.
    """

    def is_leaf(self, path: str, module: nn.Module) -> bool:
        # foreign: DeepSpeed's models have this attribute
        return self.selects(path, module) or bool(getattr(module, "_is_zero_leaf", False))


class ZeroConfig(_Block):
    """``zero_optimization``: ZeRO stage, offload and communication."""

    stage: Annotated[int, Field(ge=0, le=3), _Whole] = 0
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()
    zero_quantized_weights: bool = False
    """Gather quantized weights (qwZ), at stage 3."""
    zero_quantized_nontrainable_weights: bool = False
    """Quantize frozen weights alone, at stage 3."""
    zero_quantized_weights_format: WeightFormat = "int8"
    """Format of quantized weights. "int4_difference" sends the change since the last gather
    (SDP4Bit, arXiv 2410.15526, section 3.1), and frozen weights as "int8". Not in DeepSpeed's
    configuration."""
    zero_lossless_weights: bool = False
    """Send only the changes of weights since they were sent last, without loss, at stages 1, 2 and
    3. Not in DeepSpeed's configuration."""
    zero_lossless_gradients: bool = False
    """Encode gradients for other nodes without loss, at any stage. Not in DeepSpeed's
    configuration."""
    zero_hpz_partition_size: PositiveInt | Literal["node"] = 1
    """Ranks of a group that keep gathered weights in secondary shards (hpZ), at stage 3. It divides
    the number of ranks. "node" is the number of ranks of a node, which `Config.on_nodes` fills in.
    "node" is not in DeepSpeed's configuration."""
    zero_quantized_gradients: bool = False
    """Reduce quantized gradients in two hops (qgZ), within a node and between nodes."""
    zero_quantized_gradients_within_node: BlockKind = "int4"
    """Format of the first hop. Not in DeepSpeed's configuration."""
    zero_quantized_gradients_between_nodes: BlockKind = "int4"
    """Format of the second hop. Not in DeepSpeed's configuration."""
    zero_quantized_gradients_hadamard: bool = False
    """Rotate gradients before they are quantized, which spreads outliers over their block. Not in
    DeepSpeed's configuration."""
    zero_quantized_stochastic_rounding: bool = False
    """Round gradients stochastically, unbiased. Not in DeepSpeed's configuration."""
    zero_quantized_checksum: bool = False
    """Checksum every quantized message. Not in DeepSpeed's configuration."""
    zeropp_loco_param: LocoConfig | None = None
    """Error feedback of quantized gradients. None disables it."""
    mics_shard_size: Annotated[int, Field(le=LARGEST), _Whole] = -1
    mics_hierarchical_params_gather: bool = False
    zenflow: dict[str, Any] | None = None
    leaf_module: LeafModuleConfig | None = None
    contiguous_gradients: bool = unneeded(True, "gradients are always in flat buffers")
    reduce_scatter: bool = unneeded(True, "a reduction always delivers just the shard")
    reduce_bucket_size: NonNegativeInt = unneeded(500_000_000, "a unit is the bucket")
    allgather_partitions: bool = unneeded(True, "a unit is always gathered in one collective")
    allgather_bucket_size: NonNegativeInt = unneeded(500_000_000, "a unit is the bucket")
    overlap_comm: bool | None = unneeded(None, "communication always overlaps with compute")
    load_from_fp32_weights: bool = unneeded(True, "checkpoints always hold the fp32 master weights")
    elastic_checkpoint: bool = unneeded(False, "checkpoints always load at any world size")
    sub_group_size: NonNegativeInt = unneeded(1_000_000_000, "the host update runs unit by unit")
    stage3_prefetch_bucket_size: NonNegativeInt = unneeded(
        50_000_000, "the next unit is always prefetched"
    )
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_model_persistence_threshold: NonNegativeInt = 2**63 - 1
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    """Elements that stay gathered between the forwards of a generation."""
    stage3_max_reuse_distance: NonNegativeInt = unneeded(
        1_000_000_000, "units are released in the order of execution"
    )
    stage3_gather_16bit_weights_on_model_save: bool = unneeded(
        False, "full_state_dict and export_safetensors gather on request"
    )
    ignore_unused_parameters: bool = True
    """False: at stages 1 and 2 a step raises if a trainable parameter got no gradient."""
    round_robin_gradients: bool = unneeded(False, "shards are slices of units, already balanced")
    memory_efficient_linear: bool = unneeded(True, "saved weights are always kept by reference")
    use_multi_rank_bucket_allreduce: bool = unneeded(True, "a unit is the bucket")
    compute_grad_norm: bool = unneeded(True, "the norm comes with the check for overflow")
    stage3_module_granularity_threshold: NonNegativeInt = unneeded(
        0, "a block is always gathered whole"
    )
    stage3_use_all_reduce_for_fetch_params: bool = unneeded(False, "a unit is gathered at once")
    stage3_allgather_sequential: bool = unneeded(False, "a unit is gathered at once")
    legacy_stage1: bool = unneeded(False, "all stages are one code path")
    parameter_alignment: bool = unneeded(False, "slices are split at any element")
    pipeline_loading_checkpoint: bool = unneeded(False, "each rank reads the ranges that it keeps")
    override_module_apply: bool = unneeded(
        True, "while a model is made, apply() sees whole parameters"
    )
    log_trace_cache_warnings: bool = unneeded(
        False, "there is no trace: a unit fetches the next one"
    )
    enable_sanity_checks: bool = unneeded(False, "checks are always on")
    save_muon_momentum_buffer_in_memory: bool = unneeded(
        False, "offload_optimizer says where states are kept"
    )

    @property
    def rounding_key(self) -> str | None:
        """Path of the first enabled key that quantizes messages, which rounds values, or None."""
        kinds = ("weights", "nontrainable_weights", "gradients")
        keys = [f"zero_quantized_{kind}" for kind in kinds]
        return next((f"zero_optimization.{key}" for key in keys if getattr(self, key)), None)

    @property
    def quantized_key(self) -> str | None:
        """Path of the first enabled key that compresses messages or keeps secondary shards."""
        exact = {
            "zero_lossless_weights": self.zero_lossless_weights,
            "zero_lossless_gradients": self.zero_lossless_gradients,
            "zero_hpz_partition_size": self.zero_hpz_partition_size != 1,
        }
        asked = (f"zero_optimization.{key}" for key, is_asked in exact.items() if is_asked)
        return self.rounding_key or next(asked, None)


class Fp16Config(_Block):
    """``fp16``: half precision with a loss scale (Micikevicius et al., arXiv 1710.03740)."""

    enabled: bool = False
    loss_scale: _NonNegative = 0.0
    """Static loss scale. 0 selects a dynamic one."""
    initial_scale_power: Annotated[NonNegativeInt, Field(le=127)] = 16  # fp32's largest power of 2
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: _Positive = 1.0
    auto_cast: bool = unneeded(False, "floating inputs are always cast")
    fp16_master_weights_and_grads: bool = False
    """Accepted only with ``offload_optimizer``, whose host master weights stay in fp32."""


class Bf16Config(_Block):
    """``bf16``: bfloat16 compute over master weights in fp32, or optionally in bf16."""

    enabled: bool = False
    immediate_grad_update: bool = unneeded(False, "a gradient is handed on as soon as it is there")
    bf16_master_weights_and_grads: bool = False
    """Update bf16 parameters without other master weights, and accumulate gradients in bf16. Needs
    ``bf16_optimizer_states``. No effect with ``offload_optimizer``: its master weights are fp32."""
    bf16_optimizer_states: bool = False
    """Keep optimizer states in bf16 (Adam's moments, on a host)."""


class TorchAutocastConfig(_Block):
    """``torch_autocast``: `torch.autocast` around each forward, over weights in fp32.

    If ``bf16`` or ``fp16`` is also enabled, ``dtype`` must equal it, and weights are in that
    dtype. Float16 uses a dynamic loss scale with the defaults of `torch.amp.GradScaler`, or with
    the settings of ``fp16`` if enabled. At stage 3 a weight is cast for each use, and again in
    backward.
    """

    enabled: bool = False
    dtype: Literal["fp16", "bf16"] = "bf16"
    lower_precision_safe_modules: Annotated[tuple[str, ...], strings("class names")] = unneeded(
        (), "autocast chooses by operation, and communication_data_type says what travels"
    )

    @pydantic.field_validator("dtype", mode="before")
    @classmethod
    def _name_dtype(cls, value: Any) -> Any:
        """Accept torch's names of the dtypes, too."""
        long = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
        name = str(value).removeprefix("torch.")
        return long.get(name, name)


class DataTypesConfig(_Block):
    """``data_types``: dtypes other than the compute dtype."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Dtype in which gradients accumulate. None selects fp32."""
    buffer_dtype: Literal["fp32", "fp16", "bf16", "as_made"] | None = None
    """Dtype of floating buffers. None selects the compute dtype. "as_made" keeps each buffer's own,
    as DeepSpeed does if the key is missing. DeepSpeed has no "as_made"."""
    master_weights_from: Literal["given", "rounded"] = "given"
    """Initial master weights: the model's values as they are given, or rounded to the compute dtype
    first, as in DeepSpeed. Not in DeepSpeed's configuration."""


class ActivationCheckpointingConfig(_Block):
    """``activation_checkpointing``: recompute every block in backward."""

    enabled: bool = True
    cpu_checkpointing: bool = False
    """Keep the blocks' inputs in host memory until backward."""
    partition_activations: bool = unneeded(False, "there are no model-parallel ranks")
    contiguous_memory_optimization: bool = unneeded(False, "a block keeps its inputs alone")
    number_checkpoints: PositiveInt | None = unneeded(None, "every block is one")
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class TiledComputeConfig(_Block):
    """``tiled_compute``: modules that are computed a few tokens at a time, for long sequences.

    Backward recomputes each tile (ALST, arXiv 2506.13996).
    """

    tile_tokens: PositiveInt = 2048
    """Tokens of a tile, over all sequences of a micro-batch."""
    modules: ModulesConfig = ModulesConfig()
    """Modules that act on each token by itself, such as ``{"name_suffixes": ["mlp"]}``."""
    logits: ModulesConfig = ModulesConfig()
    """Heads, such as ``{"names": ["lm_head"]}``: the cross entropy of their output is tiled."""


# In these tables a key has the same type and range for all optimizers or schedules. Values of other
# keys must only be finite. The optimizer or schedule refuses keys that it does not have.
OPTIMIZER_PARAMS = _params(
    {
        _NonNegative: "lr muon_lr adam_lr weight_decay momentum alpha lr_decay t0 momentum_decay "
        "initial_accumulator_value",
        _Fraction: "rho",
        float: "dampening beta2_decay d lambd",
        _Betas: "betas",
        _Epsilons: "eps",
        _TwoNumbers: "etas step_sizes",
        bool: "amsgrad nesterov centered maximize foreach fused capturable differentiable "
        "decoupled_weight_decay adam_w_mode torch_adam bias_correction fp32_optimizer_states "
        "set_grad_none per_head_muon",
        str: "ns_method adjust_lr_fn",
    }
)

SCHEDULER_PARAMS = _params(
    {
        _Rates: "warmup_min_lr warmup_max_lr lr_range_test_min_lr cycle_min_lr cycle_max_lr "
        "base_lr max_lr",
        _Momenta: "cycle_min_mom cycle_max_mom base_momentum max_momentum",
        _NonNegative: "warmup_min_ratio cos_min_ratio cycle_second_step_size decay_lr_rate "
        "decay_step_size eta_min gamma factor start_factor end_factor power",
        _Positive: "cycle_first_step_size step_size_up step_size_down div_factor final_div_factor",
        _Fraction: "pct_start",
        float: "lr_range_test_step_rate decay_mom_rate",
        NonNegativeInt: "warmup_num_steps total_num_steps cycle_first_stair_count "
        "cycle_second_stair_count total_iters",
        PositiveInt: "lr_range_test_step_size T_0 T_max T_mult step_size total_steps epochs "
        "steps_per_epoch",
        _Count: "last_batch_iteration last_epoch",
        list[NonNegativeInt]: "milestones",
        bool: "lr_range_test_staircase cycle_momentum three_phase",
        Literal["log", "linear"]: "warmup_type",
        str: "anneal_strategy mode scale_mode",
    }
)


class OptimizerConfig(_Block):
    """``optimizer``: an optimizer by name and its ``params``, as `zero_core.optim` makes it."""

    type: str
    params: Annotated[dict[str, Any], params_of(OPTIMIZER_PARAMS)] = Field(default_factory=dict)


class SchedulerConfig(_Block):
    """``scheduler``: a schedule by name, as `zero_core.schedules` makes it."""

    type: str
    params: Annotated[dict[str, Any], params_of(SCHEDULER_PARAMS)] = Field(default_factory=dict)


class MemoryCheckpointConfig(_Block):
    """``memory_checkpoint``: copies of all states in host memory, for a restart without loss.

    Not in DeepSpeed's configuration.
    """

    every: PositiveInt = 1
    """Steps between copies. A restart repeats at most this number of steps."""
    copies: Annotated[int, Field(ge=0, le=1)] = 1
    """Copies on another node, if there are several nodes. With 0, a lost node's states are lost."""
    path: str | None = None
    """Folder in each host's memory, which outlives the ranks. None selects a folder of the launcher
    in ``/dev/shm``, which is removed with the job."""


class StepRecordsConfig(_Block):
    """``step_records``: a line per step and rank on disk, as by `zero_core.Engine.record`.

    Not in DeepSpeed's configuration.
    """

    folder: str
    """Folder of all ranks' files, created if missing."""
    max_bytes: Annotated[int, Field(ge=2**16, le=2**29)] = 32 * 2**20
    """Limit of the size of one rank's file. If it is reached, every other step is dropped."""
    detail_every: PositiveInt = 50
    """Steps from one record of a step's spans to the next."""


class WeightPatchesConfig(_Block):
    """``weight_patches``: log of changes for `zero_core.Engine.weight_patch`.

    Not in DeepSpeed's configuration.
    """

    versions: PositiveInt = 4
    """Number of versions in the log, one per patch. A version takes at most 1.25 bits of host
    memory per parameter element, over all ranks together."""
    max_bytes: PositiveInt | None = None
    """Limit of the log on one rank. Older versions are dropped. None sets no limit."""


class Config(_Block):
    """Resolved configuration, with all defaults filled in."""

    train_batch_size: PositiveInt
    train_micro_batch_size_per_gpu: PositiveInt
    gradient_accumulation_steps: PositiveInt
    accumulation_schedule: Literal["horizontal", "vertical", "auto"] = "horizontal"
    """Order in which ``train_batch`` computes a step's micro-batches: one after the other, or all
    in one unit before the next unit. Not in DeepSpeed's configuration."""
    zero_optimization: ZeroConfig = ZeroConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: _NonNegative = 0.0
    """Largest global 2-norm of the gradient. 0 disables clipping."""
    check_grad_overflow: bool = True
    """Skip a step with a non-finite gradient, at every precision."""
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    activation_checkpointing: ActivationCheckpointingConfig | None = None
    tiled_compute: TiledComputeConfig | None = None
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Reduction of the ranks' gradients, at every stage."""
    prescale_gradients: bool = unneeded(False, "gradients are divided first and summed in fp32")
    gradient_predivide_factor: _Positive = unneeded(
        1.0, "gradients are divided first and summed in fp32"
    )
    broadcast_buffers: bool = True
    """Broadcast rank 0's buffers before a forward, as DDP does."""
    seed: Annotated[int, Field(ge=0, lt=2**64), _Whole] | None = None
    """Seed of torch on every rank before the first step."""
    world_size_invariant: bool = False
    """Give the same bits at any number of ranks, for one ``train_batch_size`` and micro-batch size.
    Not in DeepSpeed's configuration."""
    name_waits_within_s: _NonNegative = 10.0
    """Seconds within which a rank that waits for another rank logs which one, at least 0.5. The
    wait goes on. 0 disables the log. Not in DeepSpeed's configuration."""
    collective_timeout_s: _Positive | None = None
    """Seconds after which a wait for another rank fails. None selects the process group's timeout.
    With NCCL, the process group itself keeps the new timeout, and a process whose device still
    waits 2 seconds later ends. Not in DeepSpeed's configuration."""
    check_replicas_every: NonNegativeInt = 0
    """Steps from one comparison of all ranks' parameter values to the next, at stages 0 to 2. 0
    disables the comparisons. Not in DeepSpeed's configuration."""
    memory_checkpoint: MemoryCheckpointConfig | None = None
    """Copies of all states in host memory. Not in DeepSpeed's configuration."""
    step_records: StepRecordsConfig | None = None
    """Records of steps, for `zero_core.Engine.report`. Not in DeepSpeed's configuration."""
    weight_patches: WeightPatchesConfig | None = None
    """Log of the changed weights, for `zero_core.Engine.weight_patch`. Not in DeepSpeed's
    configuration."""
    steps_per_print: PositiveInt | None = None
    """Steps between log lines of step, loss scale and learning rate. None disables them."""

    @pydantic.field_validator("name_waits_within_s")
    @classmethod
    def _check_time(cls, value: float) -> float:
        if 0.0 < value < 0.5:
            raise ValueError("expected 0, or at least 0.5")
        return value

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype that floating-point parameters are cast to. None keeps each parameter's dtype."""
        return _dtype_of(self.half_precision)

    @property
    def half_precision(self) -> Literal["bf16", "fp16"] | None:
        """Name of `compute_dtype`, or None."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else None

    @property
    def is_vertical(self) -> bool:
        """Whether each unit processes all micro-batches of a step before the next unit starts.

        Always False with one micro-batch per step. ``accumulation_schedule = "auto"`` selects this
        at stage 3 with other ranks or offloaded parameters, if blocks are recomputed and the
        package greenlet, which the schedule needs, is installed.
        """
        steps, zero = self.gradient_accumulation_steps, self.zero_optimization
        if steps == 1 or self.accumulation_schedule != "auto":
            return steps > 1 and self.accumulation_schedule == "vertical"
        has_peers = self.train_batch_size > steps * self.train_micro_batch_size_per_gpu
        is_moved = has_peers or zero.offload_param.device != "none"
        is_useful = zero.stage == 3 and is_moved and self.is_recomputed
        return is_useful and find_spec("greenlet") is not None

    @property
    def is_recomputed(self) -> bool:
        """Whether every block is recomputed in backward."""
        block = self.activation_checkpointing
        return block is not None and block.enabled

    @property
    def extension_keys(self) -> tuple[str, ...]:
        """Keys that request an extension of `zero_core.extensions`, in the order of attachment."""
        zero = self.zero_optimization
        asked = {
            "check_replicas_every": self.check_replicas_every,
            "zero_optimization.ignore_unused_parameters": zero.stage in (1, 2)
            and not zero.ignore_unused_parameters,
            "world_size_invariant": self.world_size_invariant,
            "memory_checkpoint": self.memory_checkpoint is not None,
            "tiled_compute": self.tiled_compute is not None,
            "activation_checkpointing": self.is_recomputed,
        }
        return tuple(key for key, is_asked in asked.items() if is_asked)

    @property
    def has_inputs_on_host(self) -> bool:
        """Whether blocks' inputs are kept in host memory until recomputation. No effect on a CPU.

        With the vertical schedule, gradients of tied weights are kept there, too.
        """
        block = self.activation_checkpointing
        return block is not None and block.enabled and block.cpu_checkpointing

    @property
    def own_masters(self) -> tuple[torch.dtype, ...]:
        """Dtypes of parameters that are their own master weights, with states of the same dtype."""
        from zero_core.config.dtypes import DTYPES, WIDE_DTYPES

        return (*WIDE_DTYPES, DTYPES["bf16"]) if self.has_bf16_masters else WIDE_DTYPES

    @property
    def has_bf16_masters(self) -> bool:
        """Whether bf16 parameters are their own master weights: never with offloaded states."""
        is_here = self.zero_optimization.offload_optimizer.device == "none"
        return self.bf16.enabled and self.bf16.bf16_master_weights_and_grads and is_here

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the master weights of parameters with compute dtype ``dtype``."""
        from zero_core.config.dtypes import master_dtype

        return master_dtype(dtype, self.own_masters)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of `torch.autocast` around each forward, or None if autocast is off."""
        return _dtype_of(self.torch_autocast.dtype) if self.torch_autocast.enabled else None

    @property
    def loss_scaling(self) -> Fp16Config:
        """Settings of the loss scale, used if ``enabled``."""
        autocast = self.torch_autocast
        if self.fp16.enabled or not (autocast.enabled and autocast.dtype == "fp16"):
            return self.fp16
        # Defaults of torch.amp.GradScaler.
        return Fp16Config(enabled=True, loss_scale_window=2000, hysteresis=1)

    @property
    def can_cancel_steps(self) -> bool:
        """Whether a step may be clipped or skipped because of its gradient."""
        return bool(self.gradient_clipping or self.loss_scaling.enabled or self.check_grad_overflow)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """Dtype that floating-point buffers are cast to. None keeps each buffer's dtype."""
        name = self.data_types.buffer_dtype or self.half_precision
        return None if name == "as_made" else _dtype_of(name)

    def on_nodes(self, ranks_per_node: int, world_size: int) -> Config:
        """Return a copy with ``zero_hpz_partition_size`` "node" resolved: 1 for a single node."""
        zero = self.zero_optimization
        if zero.zero_hpz_partition_size != "node":
            return self
        size = ranks_per_node if ranks_per_node < world_size else 1
        zero = zero.model_copy(update={"zero_hpz_partition_size": size})
        return self.model_copy(update={"zero_optimization": zero})


def _dtype_of(name: str | None) -> torch.dtype | None:
    from zero_core.config.dtypes import DTYPES

    return None if name is None else DTYPES[name]


def block_of(key: FieldInfo) -> type[BaseModel] | None:
    """Return the type of the block that is the value of ``key``, or None for other values."""
    kinds = [key.annotation, *get_args(key.annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def keys_of(block: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield path and field of each key of ``block``, inner keys before that of their block."""
    for name, key in block.model_fields.items():
        if (inner := block_of(key)) is not None:
            yield from keys_of(inner, f"{path}{name}.")
        yield f"{path}{name}", key


UNNEEDED: Mapping[str, str] = {
    path: str(key.json_schema_extra["no effect"])
    for path, key in keys_of(Config)
    if isinstance(key.json_schema_extra, dict)
}
"""Keys that are accepted without effect, and the reason."""
