"""Settings for all tests: a busy machine must not fail a property by being slow."""

from hypothesis import settings

settings.register_profile("zero-comm", deadline=None, max_examples=50)
settings.load_profile("zero-comm")
