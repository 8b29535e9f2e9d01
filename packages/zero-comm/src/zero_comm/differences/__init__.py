"""Lossless differences between two versions of a tensor."""
