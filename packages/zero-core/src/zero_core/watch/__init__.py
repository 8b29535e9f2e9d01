"""Names the rank that others wait for: heartbeats, and what follows from them."""
