"""Command line, train program and adapters around zero_core."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("zero-parts")
