"""Hang diagnosis: heartbeats of ranks, and which rank the other ranks wait for."""
