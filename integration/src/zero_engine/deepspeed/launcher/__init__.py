"""Stands for ``deepspeed.launcher``."""
