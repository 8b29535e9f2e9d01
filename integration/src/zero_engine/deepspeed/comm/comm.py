"""Stands for ``deepspeed.comm.comm``, where DeepSpeed defines what ``deepspeed.comm`` has."""

from zero_engine.deepspeed.comm import *  # noqa: F403
