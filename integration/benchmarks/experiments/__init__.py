"""The experiments, a program each: see `benchmarks.__main__` for their names."""
