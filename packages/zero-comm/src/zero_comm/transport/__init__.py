"""Exchange of bytes between ranks, and discovery of the ranks on a node."""
