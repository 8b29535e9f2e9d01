"""Test support: reference kernels, flat spaces and their tiers, late streams, gloo ranks."""
