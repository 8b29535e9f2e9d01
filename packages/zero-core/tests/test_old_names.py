"""Names of the last release work under their old import paths, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext

import pytest

import zero_core
from zero_core import checkpoint, config, layout, protocols
from zero_core._aliases import MOVED
from zero_core.checkpoint import load
from zero_core.layout import arithmetic

_ALL = [(old, name, new) for old, names in MOVED.items() for name, new in names.items()]
_NATIVE = "NativeCollectives is now .*TransportCollectives; the old name goes with the next release"
_HAS_ENGINE = importlib.util.find_spec("zero_engine") is not None


@pytest.mark.parametrize(("old", "name", "new"), _ALL)
def test_an_old_name_warns_and_names_the_new_one(old: str, name: str, new: str) -> None:
    module, _, new_name = new.partition(":")
    is_here = module.startswith("zero_core") or _HAS_ENGINE
    refused = (
        nullcontext() if is_here else pytest.raises(ImportError, match=r"pip install \./integ")
    )
    old_module, found = importlib.import_module(old), None
    warned = pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {module}.{new_name}")
    with warned, refused:
        found = getattr(old_module, name)
    assert found is (getattr(importlib.import_module(module), new_name) if is_here else None)


def test_other_names_of_an_old_module_are_unknown() -> None:
    old = importlib.import_module("zero_core.parked")
    with pytest.raises(AttributeError, match="has no attribute 'park'"):
        _ = old.park
    assert importlib.util.find_spec("zero_core.no_such_module") is None


def test_a_package_serves_the_names_of_the_module_before_it() -> None:
    assert config.load_config is zero_core.load_config
    assert config.Config is zero_core.Config
    assert layout.Layout is zero_core.Layout
    assert layout.Segment is arithmetic.Segment
    assert checkpoint.read_client_state is load.read_client_state


def test_the_old_name_of_the_transport_protocol_warns() -> None:
    with pytest.warns(DeprecationWarning, match=_NATIVE):
        assert protocols.NativeCollectives is protocols.TransportCollectives
    with pytest.raises(AttributeError, match="has no attribute 'Native'"):
        _ = protocols.Native
