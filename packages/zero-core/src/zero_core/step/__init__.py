"""The path from the reduced gradient to the decided step."""
