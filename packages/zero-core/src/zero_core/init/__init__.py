"""Parameter values before there is an engine."""
