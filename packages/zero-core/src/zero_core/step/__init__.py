"""Step logic: from the reduced gradient to the decision on the step and the update."""
