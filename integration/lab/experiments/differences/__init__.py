"""Lossless differences of weights: recorded steps, comparison with other codecs, and whole runs."""
