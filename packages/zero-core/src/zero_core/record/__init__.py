"""Records of a training on disk, which each rank writes as lines of JSON."""
