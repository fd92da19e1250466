"""Hypothesis: the same examples in every run, and no deadline, because CI shares its cores."""

from hypothesis import settings

settings.register_profile("unit", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("unit")
