"""Steps with offload in virtual time: how long they are, and beside steps without offload."""
