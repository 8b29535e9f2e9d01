"""Experiments. `benchmarks.__main__` lists their names."""
