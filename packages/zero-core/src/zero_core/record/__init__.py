"""Records of a training on disk. Each rank writes JSON lines: one per step, and some details."""
