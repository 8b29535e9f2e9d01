"""Functions that start ranks, detect ranks that a launcher has started, and join them."""
