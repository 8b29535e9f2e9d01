"""Records of which published values have changed, and their encoding."""
