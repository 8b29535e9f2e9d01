"""Lossless differences of weights: recorded, encoded beside other codecs, and sent in real runs."""
