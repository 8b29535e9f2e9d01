"""Records of a training on disk: one JSON line per step and rank."""
