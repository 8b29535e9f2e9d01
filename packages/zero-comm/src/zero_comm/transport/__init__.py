"""Exchange of bytes between ranks, and the ranks' places on nodes."""
