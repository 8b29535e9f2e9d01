"""Copies between the compute device and a host tier's memory."""
