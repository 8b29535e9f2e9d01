"""Shared by the tests: reference kernels, flat spaces and their tiers, late streams, gloo ranks."""
