"""Benchmarks: every contender in one run, on one machine, with one model. See `run.py`."""
