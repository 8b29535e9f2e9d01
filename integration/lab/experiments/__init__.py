"""Experiments. `lab.__main__` lists their names."""
