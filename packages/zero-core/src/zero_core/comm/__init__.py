"""Everything that sends: transports, groups of ranks, queues, and the meter."""
