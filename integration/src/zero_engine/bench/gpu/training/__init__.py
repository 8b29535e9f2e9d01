"""Training with nothing offloaded, by whoever is compared: for single and fragmentation."""
