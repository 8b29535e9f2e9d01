"""Training over a slow link: two network namespaces on one machine."""
