"""Memory and traffic of a run before it starts: `zero_core.plan` and its computations.

`plan` is the entry point. The other names serve predictions of time, as in `zero_engine.planning`.
"""

from zero_core.comm.meter import Links, Traffic
from zero_core.core.facts import facts_nbytes
from zero_core.extensions.invariance import arithmetic_of
from zero_core.footprint.activations import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Operator,
    Trace,
    trace_step,
)
from zero_core.footprint.forecast import (
    Forecast,
    TrafficChoice,
    gather_calls,
    num_gathers,
    reduction_calls,
)
from zero_core.footprint.planner import Machine, Planner, Variant, plan, ranks_of_node, variant_of
from zero_core.footprint.result import AS_CONFIGURED, Choice, Placement, Plan, Table, format_bytes
from zero_core.layout.arithmetic import Layout, Segment, UnitLayout
from zero_core.layout.gradient_plan import GradientCase, accumulated_dtype
from zero_core.step.update import may_speculate, updates_in_backward

__all__ = [
    "AS_CONFIGURED",
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "Choice",
    "Forecast",
    "GradientCase",
    "Layout",
    "Links",
    "Machine",
    "Operator",
    "Placement",
    "Plan",
    "Planner",
    "Segment",
    "Table",
    "Trace",
    "Traffic",
    "TrafficChoice",
    "UnitLayout",
    "Variant",
    "accumulated_dtype",
    "arithmetic_of",
    "facts_nbytes",
    "format_bytes",
    "gather_calls",
    "may_speculate",
    "num_gathers",
    "plan",
    "ranks_of_node",
    "reduction_calls",
    "trace_step",
    "updates_in_backward",
    "variant_of",
]
