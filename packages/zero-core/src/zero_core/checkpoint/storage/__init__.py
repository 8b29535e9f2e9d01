"""Storage of checkpoints: folders of this machine, and any file system that fsspec serves."""
