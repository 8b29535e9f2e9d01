"""Lossless coding of values themselves, such as gradients: format, backends and messages."""
