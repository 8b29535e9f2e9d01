"""Test support: kernels, models, flat spaces and tiers, streams with late copies, gloo ranks."""
