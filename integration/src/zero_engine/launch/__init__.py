"""Start ranks, find ranks that a launcher has started, and join them."""
