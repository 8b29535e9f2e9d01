"""The experiments, a program each: see `lab.__main__` for their names."""
