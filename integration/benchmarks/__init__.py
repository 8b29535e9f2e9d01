"""Benchmarks against other libraries. `run.py` starts them."""
