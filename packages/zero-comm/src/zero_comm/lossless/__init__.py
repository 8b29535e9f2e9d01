"""Lossless coding of tensors, as differences from an earlier version or as values."""
