"""Parameter shards that stay off the compute device between uses."""
