"""Benchmarks of a single accelerator."""
