"""Settings for all tests: a busy machine must not fail a property by being slow."""

from hypothesis import settings

settings.register_profile("zero-comm", deadline=None)
settings.load_profile("zero-comm")
