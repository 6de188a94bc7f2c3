"""Property-based tests: the same examples in every run, and no clock decides."""

from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
