"""Simulations that need no accelerator."""
