"""The flat space: layout of pieces and shards, and gradients by element range."""
