"""Stands for ``deepspeed.monitor``: where scalars go; see `zero_engine.monitoring`."""
