"""Settings for all tests: a busy machine must not fail a property by being slow."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "zero-comm", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zero-comm")
