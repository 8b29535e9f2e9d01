"""Stands for ``deepspeed.comm.comm``, where DeepSpeed defines what ``deepspeed.comm`` has."""

from zero_engine.deepspeed.comm import *  # noqa: F403
from zero_engine.script.refusal import refuse_other_names

refuse_other_names(__name__)
