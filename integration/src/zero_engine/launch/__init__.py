"""Start ranks, find those that a launcher has started, and join them."""
