"""State tiers: who updates which elements, when, and how values reach the parameters."""
