"""Parameters that a module's forward reads though they belong to another module."""

from __future__ import annotations

from torch import nn

from zero_core import engine_of
from zero_core.layout.discovery import note_reader
from zero_engine.deepspeed.errors import NotServedError

__all__ = ["register_external_parameter", "unregister_external_parameter"]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` reads ``parameter`` in its forward, before the engine is made.

    Raises:
        NotServedError: an engine has the parameter already, and it isn't one of ``module``'s own.
    """
    if any(parameter is own for own in module.parameters()):
        return
    if engine_of(parameter) is not None:
        raise NotServedError(
            "zero.register_external_parameter() after initialize()",
            "call it in the module's __init__, or read the parameter within "
            "zero.GatheredParameters",
        )
    note_reader(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back `register_external_parameter`.

    Raises:
        RuntimeError: it was not registered.
    """
    if not note_reader(module, parameter, is_reader=False):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as an external one "
            f"of this {type(module).__name__}"
        )
