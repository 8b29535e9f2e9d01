"""``deepspeed.utils.z3_leaf_module``: modules that are gathered as one unit.

`initialize` reads the marks. A block of a module list is one unit without a mark, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zero_core.config import LeafModuleConfig

_MARKS = ("_z3_leaf", "_is_zero_leaf")
"""DeepSpeed's attribute, which scripts read, and the attribute that `zero_core.build` reads."""


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(getattr(model, _MARKS[0], False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    return "ds_z3_leaf_module" in vars(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    for mark in _MARKS:
        setattr(model, mark, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by class or class name. Returns the modules."""
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove marks by class or class name. Returns the modules."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Returns those modules, and names without a module."""
    return _set_by_name(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by suffixes of names. Returns those modules, and suffixes without a module."""
    return _set_by_name(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def mark_configured(model: nn.Module, leaf_module: LeafModuleConfig | None) -> None:
    """Mark the leaf modules that the configuration names, for scripts that read the marks."""
    if leaf_module is not None:
        leaves = [m for path, m in model.named_modules() if leaf_module.is_leaf(path, m)]
        _set_all(leaves, True)


def _set_by_class(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    classes = list(classes)  # so that ``in`` neither exhausts an iterator nor matches a substring
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    found = [
        m
        for m in model.modules()
        if isinstance(m, kinds)
        or type(m).__name__ in classes
        or f"{type(m).__module__}.{type(m).__qualname__}" in classes
    ]
    _set_all(found, flag)
    if not found and raise_if_not_found:
        raise ValueError(f"no module of {list(classes)} in {type(model).__name__}")
    return found


def _set_by_name(
    model: nn.Module,
    wanted: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    fits: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    wanted = list(wanted)
    modules = dict(model.named_modules())
    found = [m for n, m in modules.items() if any(fits(n, name) for name in wanted)]
    missing = [name for name in wanted if not any(fits(n, name) for n in modules)]
    if missing and raise_if_not_found:
        raise ValueError(f"no module named {missing} in {type(model).__name__}")
    _set_all(found, flag)
    return found, missing


def _set_all(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
