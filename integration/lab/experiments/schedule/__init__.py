"""Length of steps with offload in virtual time, and relative to steps without offload."""
