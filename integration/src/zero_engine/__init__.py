"""The whole engine put together: the train program and the doctor."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("zero-engine")
