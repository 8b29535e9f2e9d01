"""Test that each part has the signatures of its protocol at run time."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

import parts
import pytest

ENTRY_POINTS = {
    ("zero_core.collectives", "quantized"): "zero_comm.create_collectives",
    ("zero_core.state_tiers", "host"): "zero_offload.create_tier",
    ("zero_core.param_tiers", "host"): "zero_offload.create_param_tier",
}


def shape(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """Return name, kind and optionality of each parameter except self, with TypedDict keywords."""
    found: list[tuple[str, str, bool]] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD and str(p.annotation).startswith("Unpack["):
            (keywords,) = get_args(get_type_hints(function)[p.name])
            for name, hint in get_type_hints(keywords, include_extras=True).items():
                is_optional = get_origin(hint) is NotRequired or name in keywords.__optional_keys__
                found.append((name, "keyword-only", is_optional))
        elif p.name != "self":
            found.append((p.name, p.kind.description, p.default is not p.empty))
    return found


def methods(protocol: type) -> list[str]:
    """Return the names of a protocol's public methods, inherited ones included."""
    return sorted(
        name
        for name, value in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    )


@pytest.mark.parametrize("name", parts.FACTORIES)
def test_factory_has_the_signature_of_its_protocol(name: str) -> None:
    factory, protocol = parts.FACTORIES[name]
    assert shape(factory) == shape(vars(protocol)["__call__"])


@pytest.mark.parametrize("name", parts.TYPES)
def test_class_has_every_method_with_the_signature_of_its_protocol(name: str) -> None:
    part, protocol = parts.TYPES[name]
    assert methods(protocol)
    for method in methods(protocol):
        assert shape(getattr(part, method)) == shape(getattr(protocol, method)), method


@pytest.mark.parametrize("name", parts.MODULES)
def test_module_has_every_function_with_the_signature_of_its_protocol(name: str) -> None:
    module, protocol = parts.MODULES[name]
    for function in methods(protocol):
        found, asked = shape(getattr(module, function)), shape(getattr(protocol, function))
        assert set(asked) <= set(found), function
        positions = [[p for p in own if p[1] != "keyword-only"] for own in (found, asked)]
        assert positions[0] == positions[1], function
        for _, kind, is_optional in (parameter for parameter in found if parameter not in asked):
            assert (kind, is_optional) == ("keyword-only", True), function


@pytest.mark.parametrize("group_and_name", ENTRY_POINTS)
def test_entry_point_names_the_proved_factory(group_and_name: tuple[str, str]) -> None:
    group, name = group_and_name
    (point,) = importlib.metadata.entry_points(group=group, name=name)
    factory, _ = parts.FACTORIES[ENTRY_POINTS[group_and_name]]
    assert point.load() is factory


def test_entry_point_of_the_adam_kernel_names_the_proved_module() -> None:
    (point,) = importlib.metadata.entry_points(group="zero_core.adam_kernels", name="cpu")
    assert point.load() is parts.MODULES["cpu_adam"][0]
