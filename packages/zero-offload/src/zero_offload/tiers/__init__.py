"""State tiers, which update shares of a flat space and publish new values to parameters."""
