"""Types and ranges of ``optimizer.params`` and ``scheduler.params``, by name.

A name means the same for every optimizer or schedule that takes it. Which names one takes is known
where it is made (`zero_core.optim`). A value of any other name must be finite, as all values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)

LARGEST = 2**63
"""Largest whole number of a configuration, one more than `sys.maxsize`, DeepSpeed's largest."""


def as_whole(value: Any) -> Any:
    """Return ``value``, converted to int if it is a whole float: JSON's 5e8 is one in Python."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_kind(value: Any, *kinds: Any) -> Any:
    """Return ``value`` as the first of ``kinds`` that it stands for in DeepSpeed, or as it is."""
    if not isinstance(value, str | int | float) or type(value) in kinds:
        return value
    for kind in kinds:
        if kind is bool or (kind in (int, float) and isinstance(value, str)):
            try:
                return TypeAdapter(kind).validate_python(value)
            except ValidationError:
                continue
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
# One for all parameter groups, or a list of one for each.
_OneOrMore = BeforeValidator(lambda v: list(v) if isinstance(v, list | tuple) else [v])
_Rates = Annotated[list[_NonNegative], _OneOrMore]
_Momenta = Annotated[list[_Fraction], _OneOrMore]
_Epsilons = Annotated[list[_NonNegative | None], _OneOrMore]  # Adafactor has two


def _params(kinds: Mapping[Any, str]) -> type[BaseModel]:
    """Return the block whose keys, all of them optional, are of the ``kinds``."""
    fields: dict[str, Any] = {k: (kind, None) for kind, keys in kinds.items() for k in keys.split()}
    config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    return create_model("params", __config__=config, **fields)


def params_of(kind: type[BaseModel]) -> AfterValidator:
    """Return the check of ``params`` as of ``kind``, except for "auto", yet to be filled in."""

    def check(params: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in params.items() if not isinstance(v, str) or v != "auto"}
        kind.model_validate(given)
        return params

    return AfterValidator(check)


def strings(what: str) -> BeforeValidator:
    """Return the conversion of a list of strings to a tuple. An error calls it ``what``."""

    def convert(value: Any) -> Any:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ValueError(f"expected a list of {what}")

    return BeforeValidator(convert)


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
