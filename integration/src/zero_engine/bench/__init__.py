"""Benchmarks: every contender in one run, on one machine, with one model.

``python -m zero_engine.bench engine`` compares this engine with DDP, FSDP2 and DeepSpeed.
"""
