"""Predicted and measured time and memory of training steps."""
