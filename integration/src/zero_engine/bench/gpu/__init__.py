"""Old name of the benchmark `gpu`."""
