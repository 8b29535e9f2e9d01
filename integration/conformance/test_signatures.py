"""Signatures at run time: what the engine calls is what each part declares."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

import parts
import pytest

VARIADIC = inspect.Parameter.VAR_KEYWORD.description
ENTRY_POINTS = {
    ("zero_core.collectives", "quantized"): "zero_comm.create_collectives",
    ("zero_core.state_tiers", "host"): "zero_offload.create_tier",
    ("zero_core.param_tiers", "host"): "zero_offload.create_param_tier",
}


def shape(function: Callable[..., Any], *, is_opened: bool = False) -> list[tuple[str, str, bool]]:
    """Name, kind and optionality of each parameter but self.

    ``is_opened``: with the keys of the ``TypedDict`` in place of ``**hyper: Unpack[TypedDict]``.
    """
    found = [
        (p.name, p.kind.description, p.default is not inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]
    if is_opened and found[-1][1] == VARIADIC:
        (keys,) = get_args(get_type_hints(function, include_extras=True)[found.pop()[0]])
        first = [kind for _, kind, _ in found].index("keyword-only")
        found[first:first] = [
            (name, "keyword-only", get_origin(hint) is NotRequired)
            for name, hint in get_type_hints(keys, include_extras=True).items()
        ]
    return found


def methods(protocol: type) -> list[str]:
    """The methods that a protocol asks for, those of its bases included."""
    return sorted(
        name
        for name, value in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    )


@pytest.mark.parametrize("name", parts.FACTORIES)
def test_factory_has_the_signature_of_its_protocol(name: str) -> None:
    """A factory's parameters are those of the protocol's call."""
    factory, protocol = parts.FACTORIES[name]
    assert shape(factory) == shape(vars(protocol)["__call__"])


@pytest.mark.parametrize("name", parts.TYPES)
def test_class_has_every_method_with_the_signature_of_its_protocol(name: str) -> None:
    """A class has each method, and its parameters are the protocol's."""
    part, protocol = parts.TYPES[name]
    assert methods(protocol)
    for method in methods(protocol):
        assert shape(getattr(part, method)) == shape(getattr(protocol, method)), method


@pytest.mark.parametrize("name", parts.MODULES)
def test_module_has_every_function_with_the_signature_of_its_protocol(name: str) -> None:
    """A module has each function with the protocol's parameters, in their order.

    Others are keywords that may be left out: of a protocol that asks for more, as `CopyingKernel`.
    """
    module, protocol = parts.MODULES[name]
    for function in methods(protocol):
        asked = shape(getattr(protocol, function))
        is_opened = all(kind != VARIADIC for _, kind, _ in asked)
        found = shape(getattr(module, function), is_opened=is_opened)
        assert [parameter for parameter in found if parameter in asked] == asked, function
        for _, kind, is_optional in (parameter for parameter in found if parameter not in asked):
            assert (kind, is_optional) == ("keyword-only", True), function


@pytest.mark.parametrize("group_and_name", ENTRY_POINTS)
def test_entry_point_names_the_proved_factory(group_and_name: tuple[str, str]) -> None:
    """What the engine loads is what was proved."""
    group, name = group_and_name
    (point,) = importlib.metadata.entry_points(group=group, name=name)
    factory, _ = parts.FACTORIES[ENTRY_POINTS[group_and_name]]
    assert point.load() is factory


def test_entry_point_of_the_adam_kernel_names_the_proved_module() -> None:
    """The kernel's entry point is the module that was proved."""
    (point,) = importlib.metadata.entry_points(group="zero_core.adam_kernels", name="cpu")
    assert point.load() is parts.MODULES["cpu_adam"][0]
