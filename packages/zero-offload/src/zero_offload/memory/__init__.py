"""Host memory, files, and the copies between them and the compute device."""
