"""Import at first use (PEP 562), for names whose modules import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return ``__getattr__`` of ``package``, which imports a name when it is used.

    ``homes`` maps modules of the package to names in them. Names of "" are modules themselves.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        module = import_module(f"{package}.{home or name}")
        found = getattr(module, name) if home else module
        setattr(sys.modules[package], name, found)
        return found

    return get
