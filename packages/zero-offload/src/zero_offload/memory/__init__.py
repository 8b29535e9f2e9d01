"""Host memory, state files, and copies between host memory and the compute device."""
