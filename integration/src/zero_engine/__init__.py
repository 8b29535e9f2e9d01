"""The whole engine put together: the train program, the doctor, the benchmarks."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("zero-engine")
