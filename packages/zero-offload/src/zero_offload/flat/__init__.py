"""The flat space: intervals, pieces and shards, and the gradients offered for it."""
