"""Records of a training on disk: a JSON line per step and rank."""
