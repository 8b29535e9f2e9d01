"""Training over a slow link between two network namespaces of one machine."""
